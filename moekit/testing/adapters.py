"""The kit for experts that take adapters (LoRA): outputs, bits without one, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moekit.contract import Adapters
from moekit.contract.adapters import AdapterExperts
from moekit.contract.interfaces import ADAPTER_NAMES
from moekit.problem import AdapterSlots, MoEProblem
from moekit.problem.activation import Activation
from moekit.problem.quant import SCHEMES
from moekit.runtime.adapters import shapes
from moekit.testing.base import OfAnotherClass, over
from moekit.testing.calls import call, check_call, same_bits
from moekit.testing.cases import SHARES, Case, generator, make_case
from moekit.testing.diagnose import assert_right
from moekit.testing.experts_base import ExpertsBase
from moekit.testing.gradients import (
    assert_right_gradients,
    gradients,
    inputs_of,
    leaves,
    random_grad,
    right_gradients,
)

_SLOTS = AdapterSlots(3, 8)
# The name of a call -> its routing, its tokens (None: the usual number), changes of the problem,
# and the kind of its adapters (`random_adapters`).
_CALLS: dict[str, tuple[str, int | None, dict[str, Any], str]] = {
    "random": ("random", None, {}, ""),
    "masked_with_bias": ("masked", None, {"has_bias": True}, ""),
    "gate_and_up_apart": ("random", None, {"adapters": replace(_SLOTS, separate=True)}, ""),
    "no_gate": ("random", None, {"activation": "silu_no_mul"}, ""),
    "clamped": ("random", None, {"activation": Activation("silu", limit=2.0)}, ""),
    "rank_5": ("random", None, {"adapters": AdapterSlots(2, 5)}, ""),
    "rank_72": ("random", None, {"adapters": AdapterSlots(2, 72)}, ""),
    "one_slot": ("hot", None, {"adapters": AdapterSlots(1, 16)}, ""),
    "no_tokens": ("random", 0, {}, ""),
    "one_token": ("random", 1, {}, ""),
    "share_of_experts": ("masked", None, {"parallel": SHARES["of experts"]}, ""),
    "slice_of_experts": ("masked", None, {"parallel": SHARES["of I"]}, ""),
    "shared_by_experts": ("random", None, {}, "shared"),
    "w13_alone": ("random", None, {}, "w13"),
    "w2_alone": ("random", None, {}, "w2"),
}


def random_adapters(problem: MoEProblem, kind: str = "", key: object = 0) -> Adapters:
    """Return adapters of another scaling in each slot, with deltas as large as the weights.

    kind: "w13" or "w2": only this matrix has deltas; "shared": experts share A of w13 and B of w2.
    """
    made, device = {}, torch.device(problem.device.type)
    for name, shape in shapes(problem).items():
        if kind.startswith("w") and not name.startswith(kind):
            continue
        shared = kind == "shared" and name in ("w13_a", "w2_b")
        held = (shape[0], 1, *shape[2:]) if shared else shape
        values = torch.randn(held, generator=generator(name, key)) / shape[-1] ** 0.5
        made[name] = values.to(problem.dtype).to(device).expand(shape)
    scaling = torch.tensor([1.5**slot for slot in range(shape[0])], device=device)
    return Adapters(scaling, **made)


class AdapterConformance(OfAnotherClass, ExpertsBase):
    """The kit for experts that declare ``adapters``. Subclass it with ``backend``.

    New memory is NaN, and the rows of tokens without an expert are NaN.
    """

    _interface, _names_class, _wants = AdapterExperts, "adapters", {"adapters": _SLOTS}

    def _named(self, name: str, **more: Any) -> tuple[Case, Adapters]:
        """Return a call of `_CALLS` in which tokens have every slot or none, and its adapters."""
        kind, num_tokens, changes, unusual = _CALLS[name]
        problem = self._problem(changes, **more)
        case = make_case(problem, self._T if num_tokens is None else num_tokens, kind).physical()
        assert problem.adapters is not None
        count = problem.adapters.count
        ids = (torch.arange(len(case.x), dtype=torch.int32) + 1) % (count + 1) - 1
        routing = replace(case.routing, adapter_ids=ids.to(case.x.device))
        adapters = random_adapters(problem, unusual)
        return replace(case, routing=routing, adapters=adapters), adapters

    @pytest.mark.parametrize("name", _CALLS)
    def test_adapters(self, name: str) -> None:
        """Calls in which one thing is unusual give right outputs, and the same bits twice."""
        case, _ = self._named(name)
        kernel, packed = self._packed(case.problem, weights=case.weights)
        out = check_call(kernel, case, packed)
        if self._spec().deterministic:
            assert same_bits(out, call(kernel, packed, case)), "equal calls, different bits"

    @over("scheme", list(SCHEMES))
    def test_adapters_over_scheme(self, scheme: str) -> None:
        """Deltas over weights of every scheme are right."""
        case, adapters = self._named("random", quant=scheme)
        # Larger deltas leave few steps of a shared scale to tokens without an adapter.
        adapters = replace(adapters, scaling=adapters.scaling / 2)
        check_call(self._compose(case.problem, self._native), replace(case, adapters=adapters))

    def test_bits_without_adapters(self) -> None:
        """Tokens without an adapter, and adapters of zeros, keep the base's bits."""
        case, stack = self._named("random")
        kernel, packed = self._packed(case.problem, weights=case.weights)
        bare = replace(case, adapters=None, routing=replace(case.routing, adapter_ids=None))
        base, out = (call(kernel, packed, each) for each in (bare, case))
        none = case.routing.adapter_ids == -1
        assert same_bits(out[none], base[none]), "tokens without an adapter have other bits"
        zeros = replace(stack, **{n: torch.zeros_like(t) for n, t in stack.tensors().items()})
        out = call(kernel, packed, replace(case, adapters=zeros))
        assert same_bits(out, base), "zeros change bits"

    def test_slots_change_in_place(self) -> None:
        """A call sees what its slots and ids hold now, in the same memory."""
        case, stack = self._named("random")
        kernel, packed = self._packed(case.problem, weights=case.weights)
        ids, other = case.routing.adapter_ids, random_adapters(case.problem, key=1)
        assert ids is not None
        for turn in range(3):
            assert_right(call(kernel, packed, case), case, f"slots changed {turn} times")
            ids.copy_(ids.roll(1))
            stack.scaling.mul_(-0.5)
            for name, t in stack.tensors().items():
                t[turn].copy_(getattr(other, name)[turn])

    # -- gradients --------------------------------------------------------------------------------

    def _check_gradients(self, case: Case, wanted: Sequence[str] = ADAPTER_NAMES) -> None:
        """Compare the gradients of x, the router weights and the wanted matrices."""
        if self._spec().adapters_training is None:
            self._skip("it does not train adapters")
        case = replace(case, problem=case.problem.replace(training=True))
        kernel, packed = self._packed(case.problem, weights=case.weights)
        names = [n for n in inputs_of(case) if n in ("x", "topk_weights", *wanted)]
        frozen: Any = packed
        given, grad = replace(leaves(case, names), weights=frozen), random_grad(case)
        found, right = gradients(kernel, given, grad), right_gradients(case, grad)
        assert not set(found) - set(names), f"wanted: {names}, found: {[*found]}"
        assert_right_gradients(found, {n: right[n] for n in names}, case, grad)

    @pytest.mark.parametrize("name", [n for n in _CALLS if n != "clamped"])  # h may cross it
    def test_adapter_gradients(self, name: str) -> None:
        """Gradients of matrices, x and router weights are right."""
        self._check_gradients(self._named(name)[0])

    @over("scheme", list(SCHEMES))
    def test_adapter_gradients_over_scheme(self, scheme: str) -> None:
        self._check_gradients(self._named("random", quant=scheme, training=True)[0])

    @pytest.mark.parametrize("wanted", [("w13_a",), ("w2_b",), ("w13_b", "w2_a")])
    def test_wanted_adapter_gradients(self, wanted: tuple[str, ...]) -> None:
        self._check_gradients(self._named("random")[0], wanted)
