"""The kit for experts that take adapters (LoRA): outputs, bits without one, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.backends.reference import oracle
from moekit.contract import Adapters, PackedWeights
from moekit.contract.adapters import AdapterExperts
from moekit.kernel import ModularKernel
from moekit.problem import AdapterSlots, MoEProblem, ParallelConfig
from moekit.problem.activation import Activation
from moekit.problem.quant import SCHEMES
from moekit.runtime.adapters import shapes
from moekit.testing.base import OfAnotherClass, over
from moekit.testing.calls import Watch, same_bits
from moekit.testing.cases import Case, generator, make_case
from moekit.testing.diagnose import assert_close, assert_right
from moekit.testing.experts_base import ExpertsBase
from moekit.testing.gradients import Gradients, backward, fault, leaves, random_grad
from moekit.testing.memory import poisoned_allocations

_SLOTS = AdapterSlots(3, 8)
_A_SHARE = ParallelConfig(ep_size=2, ep_rank=1, dp_size=1)
_A_SLICE = ParallelConfig(tp_size=2, tp_rank=1, dp_size=1)
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
    "share_of_experts": ("masked", None, {"parallel": _A_SHARE}, ""),
    "slice_of_experts": ("masked", None, {"parallel": _A_SLICE}, ""),
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


def merged(case: Case, slot: int) -> Case:
    """Return the call with unquantized weights to which one slot's adapter is added, in fp32."""
    p, adapters = case.problem, case.adapters
    assert adapters is not None
    dense = case.weights.canonical(p).dequantize(p.quant)
    made: dict[str, Any] = {"w13": dense.w13, "w2": dense.w2}
    for name in ("w13", "w2"):
        if (pair := adapters.pair(name)) is not None:
            a_LGrK, b_LNr = (t[slot].float() for t in pair)
            parts = b_LNr.chunk(a_LGrK.shape[1], dim=1)
            delta = torch.cat([b @ a_LGrK[:, g] for g, b in enumerate(parts)], dim=1)
            made[name] = made[name] + float(adapters.scaling[slot]) * delta
    plain = p.replace(quant="none", dtype=torch.float32, adapters=None)
    return replace(case, problem=plain, weights=replace(dense, **made), adapters=None)


class AdapterConformance(OfAnotherClass, ExpertsBase):
    """The kit for experts that declare ``adapters``. Subclass it with ``backend``.

    New memory is NaN, and the rows of tokens without an expert are NaN.
    """

    _interface, _names_class, _wants = AdapterExperts, "adapters", {"adapters": _SLOTS}

    def _named(self, name: str, **more: Any) -> tuple[Case, Adapters]:
        """Return a call of `_CALLS` in which tokens have every slot or none, and its adapters."""
        kind, num_tokens, changes, unusual = _CALLS[name]
        problem = self._at(changes, **more)
        case = make_case(problem, self._T if num_tokens is None else num_tokens, kind).physical()
        assert problem.adapters is not None
        count = problem.adapters.count
        ids = (torch.arange(len(case.x), dtype=torch.int32) + 1) % (count + 1) - 1
        routing = replace(case.routing, adapter_ids=ids.to(case.x.device))
        return replace(case, routing=routing), random_adapters(problem, unusual)

    def _run(
        self, kernel: ModularKernel, case: Case, packed: PackedWeights, adapters: Adapters | None
    ) -> Tensor:
        watch = Watch(x=case.x, **({} if adapters is None else adapters.tensors()))
        ids = case.routing.adapter_ids if adapters is not None else None
        with poisoned_allocations():
            routing = replace(case.routing, adapter_ids=ids)
            out = kernel(case.x, replace(packed, adapters=adapters), routing)
        watch.check("the call")
        return out

    def _assert_right(self, out: Tensor, case: Case, adapters: Adapters, what: str) -> None:
        assert_right(out, replace(case, adapters=adapters), what)

    @pytest.mark.parametrize("name", _CALLS)
    def test_adapters(self, name: str) -> None:
        """Calls in which one thing is unusual give right outputs, and the same bits twice."""
        case, adapters = self._named(name)
        kernel, packed = self._packed(case.problem, weights=case.weights)
        out = self._run(kernel, case, packed, adapters)
        self._assert_right(out, case, adapters, name)
        if self._spec().deterministic:
            assert same_bits(out, self._run(kernel, case, packed, adapters)), f"{name}: other bits"

    @over("scheme", list(SCHEMES))
    def test_adapters_over_scheme(self, scheme: str) -> None:
        """Deltas over weights of every scheme are right; merged weights give the same output."""
        case, adapters = self._named("random", quant=scheme)
        # Larger deltas leave few steps of a shared scale to tokens without an adapter.
        adapters = replace(adapters, scaling=adapters.scaling / 2)
        kernel, packed = self._packed(case.problem, weights=case.weights)
        out = self._run(kernel, case, packed, adapters)
        self._assert_right(out, case, adapters, scheme)
        case = replace(case, adapters=adapters)
        want = case.reference()
        for slot in range(len(adapters.scaling)):
            mine = case.routing.adapter_ids == slot
            want[mine] = merged(case, slot).reference()[mine]
        assert_close(out, want, case.problem, f"{scheme}, with merged weights", case=case)

    def test_bits_without_adapters(self) -> None:
        """Tokens without an adapter, and adapters of zeros, keep the base's bits."""
        case, adapters = self._named("random")
        kernel, packed = self._packed(case.problem, weights=case.weights)
        base = self._run(kernel, case, packed, None)
        none, out = case.routing.adapter_ids == -1, self._run(kernel, case, packed, adapters)
        assert same_bits(out[none], base[none]), "tokens without an adapter have other bits"
        zeros = replace(adapters, **{n: torch.zeros_like(t) for n, t in adapters.tensors().items()})
        assert same_bits(self._run(kernel, case, packed, zeros), base), "zeros change bits"

    def test_slots_change_in_place(self) -> None:
        """A call sees what its slots and ids hold now, in the same memory."""
        case, adapters = self._named("random")
        kernel, packed = self._packed(case.problem, weights=case.weights)
        ids, other = case.routing.adapter_ids, random_adapters(case.problem, key=1)
        assert ids is not None
        for turn in range(3):
            self._assert_right(self._run(kernel, case, packed, adapters), case, adapters, f"{turn}")
            ids.copy_(ids.roll(1))
            adapters.scaling.mul_(-0.5)
            for name, t in adapters.tensors().items():
                t[turn].copy_(getattr(other, name)[turn])

    # -- gradients --------------------------------------------------------------------------------

    def _check_gradients(
        self, case: Case, adapters: Adapters, wanted: Sequence[str] | None = None
    ) -> Gradients:
        """Compare the gradients of a call with the oracle's; return those for the matrices.

        The same matrices must get one: a token of zeros gives none to w13.
        """
        if self._spec().adapters_training is None:
            self._skip("it does not train adapters")
        case = replace(case, problem=case.problem.replace(training=True))
        kernel, packed = self._packed(case.problem, weights=case.weights)
        grad, names = random_grad(case), wanted or tuple(adapters.tensors())

        def made(dtype: torch.dtype) -> tuple[Case, Adapters]:
            given = leaves(replace(case, x=case.x.to(dtype)), ("x", "topk_weights"))
            own = {n: t.detach().to(dtype) for n, t in adapters.tensors().items()}
            return given, replace(
                adapters, **{n: t.requires_grad_(n in names) for n, t in own.items()}
            )

        given, stack = made(case.problem.dtype)
        with poisoned_allocations():
            out = kernel(given.x, replace(packed, adapters=stack), given.routing)
        backward(out, grad)
        right, wide = made(torch.float32)
        want = oracle(right.x, right.weights, right.routing, case.problem, wide)
        if want.requires_grad:
            backward(want, grad.float().where(want != 0, 0))  # NaN may stand where nothing is

        def of(case: Case, stack: Adapters) -> Gradients:
            inputs = {"x": case.x, "topk_weights": case.routing.topk_weights, **stack.tensors()}
            asked = {n: t for n, t in inputs.items() if t.requires_grad}
            found = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in asked.items()}
            return {n: t.flatten(0, 1) if n in names else t for n, t in found.items()}

        found, expected = of(given, stack), of(right, wide)
        said = fault(found, expected, case)
        assert not said, f"{said}\n  problem: {case.problem!r}"
        for name in names:
            moved, right_ones = (t[name].flatten(1).any(dim=1) for t in (found, expected))
            assert torch.equal(moved, right_ones), f"{name}: {moved} have gradients"
        return {name: found[name] for name in names}

    @pytest.mark.parametrize("name", [n for n in _CALLS if n != "clamped"])  # h may cross it
    def test_adapter_gradients(self, name: str) -> None:
        """Gradients of matrices, x and router weights are right."""
        case, adapters = self._named(name)
        found = self._check_gradients(case, adapters)
        moved = {n: int(t.flatten(1).any(dim=1).sum()) for n, t in found.items()}
        count = len(adapters.scaling) * case.problem.num_local_experts
        print(f"{name}: of {count} matrices, so many have gradients: {moved}")
        assert all(moved.values()) or not len(case.x)

    @over("scheme", list(SCHEMES))
    def test_adapter_gradients_over_scheme(self, scheme: str) -> None:
        self._check_gradients(*self._named("random", quant=scheme, training=True))

    def test_wanted_adapter_gradients(self) -> None:
        case, adapters = self._named("random")
        for wanted in (("w13_a",), ("w2_b",), ("w13_b", "w2_a")):
            assert self._check_gradients(case, adapters, wanted).keys() == set(wanted)
