"""Settings of moekit's own tests, and the cases that run without a GPU.

Tests use one thread each, because two cores run two workers, and Triton's interpreter without a
GPU. Both are chosen before torch and triton are imported.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MOEKIT_TUNED", "")  # a table must not steer the choice in tests
os.environ.setdefault("MOEKIT_CALIBRATE", "0")  # times must not decide: they differ between runs

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_SUPPORT = str(Path(__file__).parent / "tests" / "support")
# Fixtures of tests that call Triton kernels.
_KERNELS = {"device", "standins"}


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of kernel tests as full where Triton's interpreter runs the kernels.

    A test with several parameters has a case for each combination of their values. The unmarked
    cases are those on a diagonal, which has every value of every parameter at least once.
    """
    if not INTERPRETED:
        return
    if "moekit.testing.base" in sys.modules:  # some of them are the kit's
        if _SUPPORT not in sys.path:  # as where another pyproject.toml, or none, is pytest's
            sys.path.append(_SUPPORT)
        kit_full = importlib.import_module("kit_full")
        kit_full.mark(items)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "plugins" in item.path.parts:
            of_kit = hasattr(item.cls, "expected_failures")  # which marks its own
            fixtures = set(item.fixturenames) - set(item.callspec.params)
            if _KERNELS & fixtures and not of_kit:
                cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        steps = [_steps(item) for item in group]
        ranks = [
            {step: i for i, step in enumerate(dict.fromkeys(column))}
            for column in zip(*steps, strict=True)
        ]
        longest = max(len(rank) for rank in ranks)
        diagonal = {tuple(i % len(rank) for rank in ranks) for i in range(longest)}
        for item, place in zip(group, steps, strict=True):
            if tuple(rank[step] for rank, step in zip(ranks, place, strict=True)) not in diagonal:
                item.add_marker("full")


def pytest_collection_finish() -> None:
    """Let garbage collections skip modules and tests, of which there are thousands."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python free them at its end, without which Triton reports leaks."""
    gc.unfreeze()


def _steps(item: pytest.Item) -> tuple[str, ...]:
    """Return the case's values, one text for each `parametrize` of the test."""
    params = dict(item.callspec.params)
    steps = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        steps.append(repr([params.pop(name, None) for name in names]))
    return (*steps, *(repr(value) for value in params.values()))
