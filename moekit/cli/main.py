"""The command line: ``python -m moekit {plugins, explain, check, bench, tune, doctor, demo}``.

Exit codes: 0 yes, 1 no, 2 the question was wrong. docs/cli.md documents the ``--json`` output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import moekit
from moekit.discovery import registry as plugins
from moekit.discovery.entry_points import PluginState
from moekit.discovery.registry import registry
from moekit.discovery.specs import BackendSpec, importable
from moekit.errors import MoekitError, UnknownBackend
from moekit.problem import DTYPES
from moekit.problem.activation import ACTIVATIONS, Activation
from moekit.problem.quant import SCHEMES
from moekit.selection import select, topology
from moekit.selection.explanation import summary

_WIDTH = 100


def main(argv: Sequence[str] | None = None, *, owns_stdout: bool = False) -> int:
    """Run one command and return its exit code.

    owns_stdout: the process has no other purpose, so that file descriptor 1 may be redirected.
    """
    args, rest = _parser().parse_known_args(argv)
    if rest and args.command not in (_demo, _bench, _tune):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest, args.out, args.owns_stdout = rest, sys.stdout, owns_stdout
    try:
        with _alone_on_stdout(args) if args.command in _ANSWERS else nullcontext():
            code = int(args.command(args))
            args.out.flush()
        return code
    except BrokenPipeError:  # who read it, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), args.out.fileno())
        return 0
    except MoekitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _alone_on_stdout(args: argparse.Namespace) -> Iterator[None]:
    """Leave stdout to what moekit prints on ``args.out``: what plugins print goes to stderr.

    In a program of its own that includes what a C library writes to file descriptor 1, and what is
    written after the answer.
    """
    if args.owns_stdout and sys.stdout is not None and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        own = os.dup(1)
        args.out = open(own, "w", encoding=sys.stdout.encoding, errors="backslashreplace")
        os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit", description="Mixture-of-Experts layers from what is installed."
    )
    parser.add_argument("--version", action="version", version=f"moekit {moekit.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    listing = commands.add_parser("plugins", help="what is installed, and what is wrong with it")
    listing.add_argument("--json", action="store_true", help="machine-readable output")
    listing.set_defaults(command=_plugins, parser=listing)

    explain = commands.add_parser(
        "explain",
        help="which backends can do a problem, which is chosen, and why not the others",
        description="Exit code 0: something can do it; 1: nothing can; 2: no such problem or name.",
    )
    _add_problem(explain)
    explain.add_argument("--dispatcher", metavar="NAME", help="insist on this dispatcher")
    explain.add_argument("--experts", metavar="NAME", help="insist on this experts backend")
    explain.add_argument("--json", action="store_true", help="machine-readable output")
    explain.set_defaults(command=_explain, parser=explain)

    check = commands.add_parser("check", help="run the conformance kit on an installed backend")
    check.add_argument("name", help="a dispatcher, experts backend or composite")
    check.add_argument("pytest_args", nargs=argparse.REMAINDER, help="passed to pytest")
    check.set_defaults(command=_check, parser=check)

    # These have parsers of their own, --help included.
    bench = commands.add_parser(
        "bench", help="how fast the installed experts backends are, and how right", add_help=False
    )
    bench.set_defaults(command=_bench, parser=bench)

    tune = commands.add_parser(
        "tune", help="measure the experts backends, for the choice among them", add_help=False
    )
    tune.set_defaults(command=_tune, parser=tune)

    doctor = commands.add_parser(
        "doctor",
        help="try what is installed: devices, backends, Triton, caches",
        description="Tries what is installed on this machine: versions, backends, devices, Triton, "
        "network, caches. Exit code 0: nothing is at fault; 1: something is.",
    )
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="end a plugin that takes longer (default: %(default)g)",
    )
    doctor.set_defaults(command=_doctor, parser=doctor)

    demo = commands.add_parser(
        "demo", help="a Hugging Face model's MoE layer through moekit", add_help=False
    )
    demo.set_defaults(command=_demo, parser=demo)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: want a number of seconds above 0")
    return seconds


def _add_problem(parser: argparse.ArgumentParser) -> None:
    for name in ("num-experts", "top-k", "hidden-size", "intermediate-size"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quant", default="none", metavar="SCHEME", help=", ".join(SCHEMES))
    kinds = ", ".join(sorted(ACTIVATIONS))
    parser.add_argument("--activation", default="silu", metavar="KIND", help=kinds)
    parser.add_argument("--activation-limit", type=float, metavar="X", help="clamp gate and up")
    parser.add_argument("--has-bias", action="store_true")
    parser.add_argument(
        "--weight-on-input", action="store_true", help="the router weight scales the token"
    )
    parser.add_argument("--redundant-experts", type=int, default=0, metavar="N")
    parser.add_argument("--max-num-tokens", type=int, metavar="N", help="most tokens in one call")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert parallel ranks")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel ranks")
    parser.add_argument(
        "--dp", type=int, default=0, metavar="N", help="batches of tokens (default: as --ep)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="hosts the ranks are spread over; also prints what each rank would need",
    )
    parser.add_argument("--device", help="e.g. cpu, sm90 (default: this machine's)")


def _explain(args: argparse.Namespace) -> int:
    problem = moekit.MoEProblem(
        num_experts=args.num_experts,
        top_k=args.top_k,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        dtype=DTYPES[args.dtype],
        activation=Activation(args.activation, limit=args.activation_limit),
        quant=args.quant,
        has_bias=args.has_bias,
        apply_router_weight_on_input=args.weight_on_input,
        num_redundant_experts=args.redundant_experts,
        max_num_tokens=args.max_num_tokens,
        parallel=moekit.ParallelConfig(
            ep_size=args.ep,
            tp_size=args.tp,
            dp_size=args.dp,
            nodes=1 if args.nodes is None else args.nodes,
        ),
        device=args.device,
    )
    explanation = moekit.explain(problem, args.dispatcher, args.experts)
    hosts = None if args.nodes is None else topology.on_hosts(problem, explanation)
    if args.json:
        answer = explanation.as_dict()
        if hosts is not None:
            answer["topology"] = topology.as_dict(problem, hosts)
        print(json.dumps(answer, indent=2), file=args.out)
    else:
        lines = f"{summary(problem)}\n{explanation}".splitlines()
        lines += [f"  note: {fault}" for fault in registry().faults()]
        lines += [] if hosts is None else topology.lines(problem, hosts)
        print("\n".join(_wrap(line, 6) for line in lines), file=args.out)
    return 0 if explanation.chosen else 1


def _plugins(args: argparse.Namespace) -> int:
    states = registry().plugins
    if args.json:
        print(json.dumps(_plugins_dict(states), indent=2), file=args.out)
    else:
        print(_plugins_text(states), file=args.out)
    return int(any(state.state in ("broken", "clash") for state in states))


def _plugins_dict(states: Sequence[PluginState]) -> dict[str, Any]:
    return {
        "moekit": moekit.__version__,
        "environment": {name: os.environ.get(name) for name in _switches()},
        "plugins": [
            {
                "name": state.name,
                "distribution": state.distribution,
                "version": state.version,
                "state": state.state,
                "reason": state.reason,
                "dispatchers": [_backend_dict(spec) for spec in state.dispatchers],
                "experts": [_backend_dict(spec) for spec in state.experts],
            }
            for state in states
        ],
    }


def _backend_dict(spec: BackendSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "usable": _usable(spec),
        "target": spec.target,
        "format": spec.format.value,
        "devices": list(spec.devices),
        "dtypes": sorted(spec.dtypes),
        "schemes": sorted(spec.schemes),
        "priority": spec.priority,
        "requires": {name: importable(name) for name in spec.requires},
        "install_hint": spec.install_hint,
    }


def _usable(spec: BackendSpec) -> bool:
    """Whether the name means this backend alone, and what it requires is installed."""
    known = registry()
    named = known.dispatchers if isinstance(spec, moekit.DispatcherSpec) else known.experts
    return spec.name in named and all(importable(name) for name in spec.requires)


def _plugins_text(states: Sequence[PluginState]) -> str:
    rows = [
        (s.name, s.state, f"{s.distribution} {s.version}".strip() or "-", _details(s))
        for s in states
    ]
    head = ("PLUGIN", "STATE", "DISTRIBUTION")
    widths = [
        max(len(text) for text in column)
        for column in zip(head, *(r[:3] for r in rows), strict=True)
    ]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for *cells, details in (*[(*head, ["OFFERS"])], *rows):
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        body = [_wrap(" " * indent + line, indent + 2) for line in details] or [""]
        lines.append(start.rstrip() if not details else start + body[0].lstrip())
        lines += body[1:]
    switches = [f"{name}={os.environ[name]}" for name in _switches() if name in os.environ]
    return "\n".join([*lines, *(["", "environment: " + " ".join(switches)] if switches else [])])


def _details(state: PluginState) -> list[str]:
    lines = [state.reason] if state.reason else []
    for kind, specs in (("dispatchers", state.dispatchers), ("experts", state.experts)):
        if specs:
            lines.append(f"{kind}: {', '.join(spec.name for spec in specs)}")
    needs = {name: spec.install_hint for spec in state.backends for name in spec.requires}
    for name, hint in needs.items():
        missing = f"missing ({hint})" if hint else "missing"
        lines.append(f"requires {name}: {'found' if importable(name) else missing}")
    return lines


def _wrap(line: str, indent: int) -> str:
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, tabsize=4
    )


def _switches() -> tuple[str, ...]:
    return (*plugins.SWITCHES, *select.SWITCHES)


def _check(args: argparse.Namespace) -> int:
    known = registry()
    unknown = []
    if "|" in args.name and args.name not in known.experts:
        known.register(select.find_experts(args.name, known))
    for find in (known.dispatcher, known.expert):
        try:
            find(args.name)
        except UnknownBackend as error:
            unknown.append(error)
    if len(unknown) == 2:
        lines = [str(error).splitlines()[0] for error in unknown]
        raise UnknownBackend("\n  ".join([*lines, *known.faults()]))
    if importlib.util.find_spec("pytest") is None:
        raise MoekitError(
            "`check` needs pytest, which is an optional extra: pip install 'moekit[testing]'"
        )
    return int(importlib.import_module("moekit.testing").run(args.name, args.pytest_args))


def _bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module("moekit_bench.bench").main(args.rest))


def _tune(args: argparse.Namespace) -> int:
    return int(importlib.import_module("moekit_bench.tune.cli").main(args.rest))


def _doctor(args: argparse.Namespace) -> int:
    doctor = importlib.import_module("moekit.cli.doctor")
    return int(doctor.run(args.out, as_json=args.json, seconds=args.time_limit))


def _demo(args: argparse.Namespace) -> int:
    return int(importlib.import_module("moekit.cli.demo").main(args.rest))


# Commands whose whole output is an answer.
_ANSWERS = (_plugins, _explain, _doctor)
