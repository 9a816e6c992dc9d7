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
from collections.abc import Collection
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


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as full where there is no GPU, and `make test` has two cores.

    A test with several parameters has a case for each combination of their values. The unmarked
    cases are those on a diagonal, which has every value of every parameter at least once.
    """
    if not INTERPRETED:
        return
    of_kinds: Collection[str] = ()
    if "moekit.testing.base" in sys.modules:  # some tests are the kit's
        if _SUPPORT not in sys.path:  # as where another pyproject.toml, or none, is pytest's
            sys.path.append(_SUPPORT)
        kit_full = importlib.import_module("kit_full")
        of_kinds = kit_full.mark(items)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.nodeid not in of_kinds:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        values = [_values(item) for item in group]
        numbers = [
            {value: i for i, value in enumerate(dict.fromkeys(column))}
            for column in zip(*values, strict=True)
        ]
        longest = max(map(len, numbers))
        diagonal = {tuple(i % len(each) for each in numbers) for i in range(longest)}
        met: set[tuple[int, int]] = set()  # a parameter, and the number of its value
        places = [tuple(n[v] for n, v in zip(numbers, each, strict=True)) for each in values]
        in_order = sorted(zip(places, group, strict=True), key=lambda case: case[0] not in diagonal)
        for place, item in in_order:
            if place in diagonal or not met.issuperset(enumerate(place)):
                met.update(enumerate(place))
            else:
                item.add_marker("full")


def pytest_collection_finish() -> None:
    """Let garbage collections skip modules and tests, of which there are thousands."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python free them at its end, without which Triton reports leaks."""
    gc.unfreeze()


def _values(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """Return the case's values, as the ids of their objects, for each `parametrize` of the test."""
    params = {name: id(value) for name, value in item.callspec.params.items()}
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        values.append(tuple(params.pop(name, 0) for name in names))
    return (*values, *((value,) for value in params.values()))
