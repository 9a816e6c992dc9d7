"""Choose the kit's tests that an interpreted backend need not run in `make test`.

In Triton's interpreter a call takes up to a second. The tests marked here repeat a path through the
backend that another test takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from moekit.problem.activation import GATED
from moekit.problem.quant import SCHEMES
from moekit.testing.base import Conformance
from moekit.testing.crossings import path_of

_NOT_IN_CI = "left out"  # the kind of values, or of whole tests, that CI leaves out


def _order(scheme: str) -> object:
    """Return what may decide a scheme's tiles and orders of sums: bits, groups and activations."""
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    return weight and (weight.packed, weight.group[1] > 1, activation is None)


def _activation(name: str) -> str:
    own = ("situ", "swigluoai", "swiglustep")  # kernels branch for them
    return name if name in own else "gated" if name in GATED else "plain"


# Of the cases of a test that are of one kind, CI runs the first in Triton's interpreter.
_KIND_OF_CASE: Mapping[str, Callable[..., object]] = {
    "test_scheme": lambda scheme: path_of(scheme),
    "test_batch_invariant_scheme": lambda scheme: _order(scheme),
    "test_input_form": lambda scheme, wire: (
        (SCHEMES[scheme].activation, wire) if wire != "other_format" else wire
    ),
    "test_activation": lambda name: _activation(name),
    "test_routing": lambda kind: _NOT_IN_CI if kind in ("idle", "hot", "signed") else kind,
    "test_memory_is_stated": lambda dispatcher: "any",
    "test_magnitude": lambda factor: "any",
    # Sums are in fp32 in each dtype, and a tile's rows decide their order.
    "test_batch_invariant_tokens": lambda dtype: "any",
    "test_weight_and_reduce": lambda dtype: "any",
    **dict.fromkeys(
        ("test_many_experts", "test_large", "test_published_sizes"),
        lambda **parameters: _NOT_IN_CI,
    ),
}


def mark(items: list[pytest.Item]) -> None:
    """Mark the kit's tests that repeat a path as full, where Triton's interpreter runs kernels."""
    seen: set[object] = set()
    for item in items:
        owner, test = getattr(item, "cls", None), getattr(item, "originalname", item.name)
        if owner is None or not issubclass(owner, Conformance) or test not in _KIND_OF_CASE:
            continue
        if owner()._interpreted:
            callspec = getattr(item, "callspec", None)
            kind = _KIND_OF_CASE[test](**(callspec.params if callspec else {}))
            if kind == _NOT_IN_CI or (owner, test, kind) in seen:
                item.add_marker("full")
            seen.add((owner, test, kind))
