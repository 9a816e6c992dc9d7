"""Keys of the commands' JSON, as docs/cli.md documents them and as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def documented(heading: str) -> set[str]:
    """Return the keys in the tables under a heading of docs/cli.md that hold values."""
    section = DOCS.read_text().partition(f"### `{heading}`\n")[2].partition("\n##")[0]
    table, _, each = section.partition("Each dispatcher and experts backend:")
    keys = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    for key in re.findall(r"^\| `([^`]+)` \|", each, re.M):
        keys += [f"plugins[].{kind}[].{key}" for kind in ("dispatchers", "experts", "fused")]
    return {k for k in keys if not any(o.startswith((f"{k}.", f"{k}[]")) for o in keys if o != k)}


def actual(value: Any, path: str = "") -> set[str]:
    """Return the keys of real output in the same notation."""
    if isinstance(value, dict):
        named = path.rpartition(".")[2] in (
            "environment",
            "requires",
            "rejected_dispatchers",
            "rejected_experts",
        )
        found = (actual(v, f"{path}.{'NAME' if named else k}") for k, v in value.items())
        return set().union(*found)
    if isinstance(value, list):
        return set().union(*(actual(v, f"{path}[]") for v in value))
    return {path.removeprefix(".")}
