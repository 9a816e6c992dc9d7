"""Choose the kit's tests that pytest collects, and those that an interpreter need not always run.

A class whose backend's spec excludes this machine's device keeps the tests of the declaration, and
one test that skips with the reason. Tests marked ``kit_full`` repeat, in Triton's interpreter, a
path through the backend that another test takes; ``pytest -m "not kit_full"`` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from moekit.problem.activation import GATED
from moekit.problem.quant import SCHEMES

_MARK = (
    "kit_full: a test of moekit's conformance kit that takes long in Triton's interpreter and "
    "repeats what another test shows"
)

# The value of a parameter of which the spec declares none: `test_undeclared` says so for all.
UNDECLARED = "undeclared"
# Tests that need neither the backend's library nor its device.
WITHOUT_DEVICE = frozenset({
    "test_backend_runs_here",
    "test_class_fits_the_spec",
    "test_declared_is_reachable",
    "test_kit_is_not_overridden",
    "test_undeclared",
    "test_undeclared_raises",
    "test_unsupported_answers_for_any_device",
})  # fmt: skip


_NOT_IN_CI = "left out"  # the kind of values, or of whole tests, that CI leaves out


def _path(scheme: str) -> object:
    """Return what a kernel distinguishes in a scheme: equal for schemes on the same path."""
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    if weight is None:
        return None
    group = tuple(min(extent, 2) for extent in weight.group)  # -1, 1, or more
    return replace(weight, group=(1, 1)), group, activation


def _order(scheme: str) -> object:
    """Return what may decide a scheme's tiles and orders of sums, which zero points do not."""
    weight = SCHEMES[scheme].weight
    if weight is None or not weight.zero_points:
        return _path(scheme)
    return _path(scheme.replace("_zp", ""))


def _activation(name: str) -> str:
    own = ("situ", "swigluoai", "swiglustep")  # kernels branch for them
    return name if name in own else "gated" if name in GATED else "plain"


# Of the cases of a test that are of one kind, CI runs the first in Triton's interpreter.
_KIND_OF_CASE: Mapping[str, Callable[..., object]] = {
    "test_scheme": lambda scheme: _path(scheme),
    "test_batch_invariant_scheme": lambda scheme: _order(scheme),
    "test_input_form": lambda scheme, wire: (
        (SCHEMES[scheme].activation, wire) if wire != "other_format" else wire
    ),
    "test_activation": lambda name: _activation(name),
    "test_routing": lambda kind: _NOT_IN_CI if kind in ("idle", "hot", "signed") else kind,
    "test_format": lambda kind: "any",
    "test_memory_is_stated": lambda dispatcher: "any",
    "test_magnitude": lambda factor: "any",
    "test_combination": lambda index: _NOT_IN_CI if index > 1 else index,
    **dict.fromkeys(
        ("test_many_experts", "test_large", "test_wide", "test_published_sizes"),
        lambda **parameters: _NOT_IN_CI,
    ),
}


class _Collection:
    """A pytest plugin: drops and marks tests of the kit."""

    @pytest.hookimpl(tryfirst=True)  # before pytest applies -m
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: set[object] = set()
        kept = []
        for item in items:
            kit, test = _kit_of(item), getattr(item, "originalname", item.name)
            callspec = getattr(item, "callspec", None)
            case = callspec.params if callspec else {}
            if kit is not None and kit.cannot_run_here and test not in WITHOUT_DEVICE:
                continue
            if kit is not None and UNDECLARED in case.values():
                continue
            kept.append(item)
            if kit is not None and kit.interpreted and test in _KIND_OF_CASE:
                kind = _KIND_OF_CASE[test](**case)
                if kind == _NOT_IN_CI or (kit, test, kind) in seen:
                    item.add_marker("kit_full")
                seen.add((kit, test, kind))
        items[:] = kept


@dataclass(frozen=True)
class _Kit:
    """A class of the kit: why it cannot run here, or "", and whether an interpreter runs it."""

    name: str
    cannot_run_here: str
    interpreted: bool


@cache
def _kit(owner: Any) -> _Kit:
    instance = owner()
    return _Kit(repr(owner), instance._cannot_run_here(), instance._interpreted)


def _kit_of(item: pytest.Item) -> _Kit | None:
    """Return the class of a test of the kit; None for other tests, also in such a class."""
    owner = getattr(item, "cls", None)
    function = getattr(item, "function", None)
    if not getattr(function, "__module__", "").startswith("moekit.testing."):
        return None
    return _kit(owner) if hasattr(owner, "_cannot_run_here") else None


def register(config: pytest.Config) -> None:
    """Make pytest ask `_Collection`. Called while it collects; idempotent."""
    name = "moekit-conformance-kit"
    if not config.pluginmanager.has_plugin(name):
        config.addinivalue_line("markers", _MARK)
        config.pluginmanager.register(_Collection(), name)
