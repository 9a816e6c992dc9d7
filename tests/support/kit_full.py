"""Choose the kit's tests of plugins that need not run in `make test`.

Without a GPU they run in Triton's interpreter, where a call takes up to a second, or on stand-ins
for libraries. The tests marked here repeat a path through the backend that another test takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from moekit.problem.activation import GATED
from moekit.problem.quant import SCHEMES
from moekit.testing.base import Conformance
from moekit.testing.crossings import path_of

_NOT_IN_CI = "left out"  # the kind of values, or of whole tests, that CI leaves out


def _order(scheme: str) -> object:
    """Return what may decide a scheme's tiles and orders of sums: bits and activations."""
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    return weight and (weight.packed, activation is None)


def _wire(scheme: str) -> object:
    """Return what decides how a dispatcher sends a scheme's tokens."""
    activation = SCHEMES[scheme].activation
    return activation and (activation.dtype, max(activation.group) > 1)


def _activation(name: str) -> str:
    own = ("situ", "swigluoai", "swiglustep")  # kernels branch for them
    return name if name in own else "gated" if name in GATED else "plain"


_OF_RANKS = (
    "even", "a_rank_without_tokens", "one_token_in_all", "no_tokens", "ids_of_-1",
    "weight_on_input", "replicas", "first_first", "ranks_want_others",
)  # fmt: skip
# Of the cases of a test that are of one kind, CI runs the first of each class. The ranks that it
# has are another parameter of a dispatcher's tests.
_KIND_OF_CASE: Mapping[str, Callable[..., object]] = {
    "test_cases": lambda path: _order(path),
    "test_quantized_tokens": lambda scheme, **ranks: _wire(scheme),
    "test_layers_in_turn": lambda **ranks: "any",
    # `local` makes all those calls.
    "test_gradients": lambda name, **ranks: name if name in _OF_RANKS or not ranks else _NOT_IN_CI,
    **dict.fromkeys(
        ("test_long_run_of_one_shape", "test_many_assignments"), lambda **ranks: _NOT_IN_CI
    ),
}
_CALLS_WITH_ADAPTERS = (
    "masked_with_bias", "gate_and_up_apart", "no_gate", "rank_5", "slice_of_experts",
    "shared_by_experts", "w13_alone", "w2_alone",
)  # fmt: skip
# In Triton's interpreter.
_KIND_INTERPRETED: Mapping[str, Callable[..., object]] = {
    "test_scheme": lambda scheme: path_of(SCHEMES[scheme]),
    "test_batch_invariant_scheme": lambda scheme: _order(scheme),
    "test_batch_invariant_neighbours": lambda **parameters: "any",
    "test_input_form": lambda scheme: _wire(scheme),
    "test_activation": lambda name: _activation(name),
    "test_gradient_of_activation": lambda name: _activation(name),
    "test_gradients": lambda name: name if name in (*_OF_RANKS, "hot_expert") else _NOT_IN_CI,
    "test_routing": lambda kind: _NOT_IN_CI if kind in ("idle", "hot", "signed") else kind,
    "test_memory_is_stated": lambda dispatcher: "any",
    "test_magnitude": lambda factor: "any",
    # Sums are in fp32 in each dtype, and a tile's rows decide their order.
    "test_batch_invariant_tokens": lambda dtype: "any",
    "test_weight_and_reduce": lambda dtype: "any",
    "test_many_experts": lambda **parameters: _NOT_IN_CI,
    # test_triton_dequantize.py compares the weights of all schemes, and test_scheme the products.
    **dict.fromkeys(
        (
            "test_adapters_over_scheme",
            "test_adapter_gradients_over_scheme",
            "test_gradients_through_frozen_experts",
        ),
        lambda scheme: _order(scheme),
    ),
    "test_adapters": lambda name: name if name in ("clamped", "rank_72") else _NOT_IN_CI,
    "test_adapter_gradients": lambda name: name if name in _CALLS_WITH_ADAPTERS else _NOT_IN_CI,
}
# CI runs these for each class, and more for the first class of a folder: the classes of a package
# share the code around their kernels.
_OF_EACH_CLASS = (
    "test_calls", "test_cases", "test_class_fits_the_spec", "test_declared_is_reachable",
    "test_gradients", "test_pack", "test_quantized_tokens", "test_routing", "test_scheme",
    "test_tokens_per_rank", "test_undeclared", "test_undeclared_raises",
)  # fmt: skip
# Of a package whose library has a stand-in, which computes with torch, those are what a call of the
# adapter goes through. The others look at kernels.
_OF_ADAPTERS = (
    *_OF_EACH_CLASS, "test_activation", "test_capacity", "test_dtype",
    "test_failure_after_dispatch", "test_group_is_resolved", "test_input_form",
    "test_quantized_tokens", "test_repeated_calls", "test_slices_and_shared_tokens",
    "test_two_calls_in_flight",
)  # fmt: skip
_WITHOUT_STAND_INS = ("moekit-naive", "moekit-nvlink", "moekit-triton")


def mark(items: list[pytest.Item]) -> set[str]:
    """Mark the kit's tests that repeat a path as full.

    Return the ids of those whose values it decided about.
    """
    seen: set[object] = set()
    decided: set[str] = set()
    first: dict[object, type] = {}
    interpreted = cache(lambda owner: owner()._interpreted)
    for item in items:
        owner, test = getattr(item, "cls", None), getattr(item, "originalname", item.name)
        if owner is None or not issubclass(owner, Conformance) or test in vars(owner):
            continue
        kit = next(c for c in owner.__mro__ if c.__module__.startswith("moekit.testing."))
        others = first.setdefault((item.path.parent, kit, test), owner) is not owner
        plugin = "plugins" in item.path.parts
        stands_in = plugin and not set(item.path.parts) & set(_WITHOUT_STAND_INS)
        enough = _OF_EACH_CLASS if others else _OF_ADAPTERS if stands_in else (test,)
        if test not in enough:
            item.add_marker("full")
        kinds = _KIND_OF_CASE if plugin else {}
        if interpreted(owner):
            kinds = {**kinds, **_KIND_INTERPRETED}
        if test in kinds:
            decided.add(item.nodeid)
            callspec = getattr(item, "callspec", None)
            kind = kinds[test](**(callspec.params if callspec else {}))
            if kind == _NOT_IN_CI or (owner, test, kind) in seen:
                item.add_marker("full")
            seen.add((owner, test, kind))
    return decided
