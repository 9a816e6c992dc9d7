"""Tuned tables with synthetic times, written where moekit looks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import moekit
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.discovery.registry import Registry, registry
from moekit.problem import ActivationFormat
from moekit.selection import tuned
from moekit.selection.tuned import VARIABLE, table
from moekit.selection.tuned.table import Key, Record, Table

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=48, dtype=torch.float32, device="cpu"
)
MADE = {"date": "2026-01-02T03:04:05+00:00", "made_with": "acme 1.0"}

# microseconds by tokens, or the coefficient and exponent of a power of T
Times = "Mapping[int, float | None] | tuple[float, float]"
TOKENS = (1, 4, 16, 64, 256)


def make_table(
    times: Mapping[str, Times],
    problem: moekit.MoEProblem = PROBLEM,
    *,
    copied: Mapping[str, float | None] | None = None,
    **facts: str,
) -> Table:
    """Return a table of times by experts (with `local`) or by ``dispatcher+experts``.

    copied: the share of the weights that a backend copies; default: 0.
    """
    rows = {}
    for name, given in times.items():
        dispatcher, plus, experts = name.partition("+")
        combination = (dispatcher, experts) if plus else ("local", name)
        points = given
        if isinstance(given, tuple):
            points = {t: given[0] * t ** given[1] for t in TOKENS}
        share = (copied or {}).get(name, 0.0)
        rows[combination] = {t: Record(us, share, **{**MADE, **facts}) for t, us in points.items()}
    return {Key.of(problem): rows}


def write_table(file: Path, *tables: Table) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table.encode(table.merge(tables)))
    return file


def no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Body of the fixture ``tuned``: the folder that holds the only tables."""
    for variable in ("MOEKIT_EXPERTS", "MOEKIT_DISPATCHER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tuned"))
    yield tmp_path / "tuned"


def fakes(*names: str, **facts: object) -> Registry:
    """Return a registry of the core's backends and of copies of `torch` under these names."""
    core = next(state for state in registry().plugins if state.name == "core")
    made = Registry(plugins=(core,))
    values = {
        "target": "moekit.backends.torch_experts:TorchExperts",
        "format": ActivationFormat.STANDARD,
        "reduces": True,
        "schemes": registry().expert("torch").schemes,
        **facts,
    }
    for name in names:
        made.register(ExpertsSpec(name=name, **values))
    return made


def movers(*names: str, priorities: Mapping[str, int] | None = None) -> Registry:
    """Return `fakes` and two dispatchers that move tokens: `rows` and, batched, `slabs`."""
    found = fakes(*names)
    for name, format in (("rows", ActivationFormat.STANDARD), ("slabs", ActivationFormat.BATCHED)):
        found.register(
            DispatcherSpec(
                name=name,
                target="moekit.backends.local:LocalDispatcher",
                format=format,
                moves_tokens=True,
                priority=(priorities or {}).get(name, 0),
            )
        )
    return found
