"""``python -m moekit plugins``: what is installed, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import moekit
from moekit.contract.specs import BackendSpec, importable
from moekit.discovery import registry as discovery
from moekit.discovery.entry_points import CORE, SWITCHES, PluginState
from moekit.selection import select

WIDTH = 100
_SWITCHES = (*SWITCHES, *select.SWITCHES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print every plugin; return 1 if one is broken or clashes."""
    states = discovery.registry().plugins
    text = json.dumps(_as_dict(states), indent=2) if args.json else _text(states)
    print(text, file=args.out)
    return int(any(state.state in ("broken", "clash") for state in states))


def wrap(line: str, indent: int) -> str:
    """Break a line at `WIDTH` columns, with ``indent`` spaces before all but the first part."""
    return textwrap.fill(
        line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, tabsize=4
    )


def _as_dict(states: Sequence[PluginState]) -> dict[str, Any]:
    return {
        "moekit": moekit.__version__,
        "environment": {name: os.environ.get(name) for name in _SWITCHES},
        "plugins": [
            {
                "name": state.name,
                "distribution": state.distribution,
                "version": state.version,
                "state": state.state,
                "reason": state.reason,
                "dispatchers": [_backend_dict(spec) for spec in state.dispatchers],
                "experts": [_backend_dict(spec) for spec in state.experts],
                "schemes": [scheme.name for scheme in state.schemes],
                "fused": [_backend_dict(spec) for spec in state.fused],
                "formats": [spec.name for spec in state.formats],
            }
            for state in states
        ],
    }


def _backend_dict(spec: BackendSpec) -> dict[str, Any]:
    known = discovery.registry()
    named = known.dispatchers if spec.kind == "dispatcher" else known.experts
    return {
        "name": spec.name,
        "usable": spec.name in named and not spec.missing(),
        "target": spec.target,
        "format": spec.format.value,
        "devices": list(spec.devices),
        "dtypes": sorted(spec.dtypes),
        "schemes": sorted(spec.schemes),
        "priority": spec.priority,
        "requires": {name: importable(name) for name in spec.requires},
        "install_hint": spec.install_hint,
    }


def _text(states: Sequence[PluginState]) -> str:
    rows = [("PLUGIN", "STATE", "DISTRIBUTION", ["OFFERS"])]
    rows += [
        (s.name, s.state, f"{s.distribution} {s.version}".strip() or "-", _details(s))
        for s in states
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for *cells, details in rows:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        body = [wrap(" " * indent + line, indent + 2) for line in details] or [""]
        lines.append((start + body[0].lstrip()).rstrip())
        lines += body[1:]
    switches = [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    return "\n".join([*lines, *(["", "environment: " + " ".join(switches)] if switches else [])])


def _details(state: PluginState) -> list[str]:
    lines = [state.reason] if state.reason else []
    offered = {
        "dispatchers": [spec.name for spec in state.dispatchers],
        "experts": [spec.name for spec in state.experts],
        "schemes": [scheme.name for scheme in state.schemes],
        "fused kernels": [spec.name for spec in state.fused],
        "formats": [spec.name for spec in state.formats],
    }
    for kind, named in offered.items():
        if named and not (kind in ("schemes", "formats") and state.name == CORE):
            lines.append(f"{kind}: {', '.join(named)}")
    found = dict.fromkeys(n for spec in state.backends for n in spec.requires if importable(n))
    missing: dict[str, dict[str, None]] = {}  # names by the command that installs them
    for spec in state.backends:
        needs = dict.fromkeys(name for name in spec.requires if not importable(name))
        missing.setdefault(spec.install_hint, {}).update(needs)
    lines += [f"requires {', '.join(found)}: found"] if found else []
    for hint, names in missing.items():
        if names:
            lines.append(f"requires {', '.join(names)}: missing" + (f" ({hint})" if hint else ""))
    return lines
