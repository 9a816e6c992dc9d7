"""The gradient kit for dispatchers: gradients reach the ranks of the experts, and come home."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.contract.training import TrainableDispatcher
from moekit.problem import ParallelConfig
from moekit.problem.weights import ExpertWeights
from moekit.testing import cases
from moekit.testing.cases import Case
from moekit.testing.dispatchers import DispatcherBase
from moekit.testing.gradients import (
    Gradients,
    TrainingBase,
    backward,
    call_of,
    fault,
    found_gradients,
    inputs_of,
    leaves,
    random_grad,
    right_gradients,
)  # fmt: skip
from moekit.testing.ranks import Call, Rank, of_rank
from moekit.training.kernel import TrainableKernel

_COUNTS = (3, 0, 9, 13)
_OTHER = Call((5, 2, 0, 8), "masked")

# What is unusual -> the calls, which of them run backward in which way, and changes of the problem.
_CALLS: dict[str, tuple[Sequence[Call], str, dict[str, Any]]] = {
    "even": ([Call((9, 9, 9, 9))], "", {}),
    "a_rank_without_tokens": ([Call(_COUNTS), Call(_COUNTS[::-1])], "", {}),
    "one_token_in_all": ([Call((0, 0, 0, 1))], "", {}),
    "no_tokens": ([Call((0, 0, 0, 0))], "", {}),
    "ids_of_-1": ([Call((5, 2, 9, 13), "masked")], "", {}),
    "tokens_without_experts": ([Call((5, 2, 9, 13), "rows")], "", {}),
    "no_experts_at_all": ([Call(_COUNTS, "none")], "", {}),
    "one_expert": ([Call((5, 2, 9, 13), "one_expert")], "", {}),
    "idle_experts": ([Call((5, 2, 9, 13), "idle")], "", {}),
    "router_weights_of_zero": ([Call((5, 2, 9, 13), "signed")], "", {}),
    "top_1": ([Call(_COUNTS, "masked")], "", {"top_k": 1}),
    "top_8": ([Call(_COUNTS)], "", {"top_k": 8}),
    "weight_on_input": (
        [Call(_COUNTS, "rows")], "", {"top_k": 1, "apply_router_weight_on_input": True},
    ),
    "replicas": ([Call(_COUNTS, "masked")], "", {"num_redundant_experts": 2}),
    "experts_do_not_divide_by_ranks": ([Call(_COUNTS, "masked")], "", {"num_experts": 7}),
    "reference_experts": ([Call(_COUNTS, "masked")], "", {"experts": "reference"}),
    "float32": ([Call(_COUNTS, "masked")], "", {"dtype": torch.float32}),
    "first_first": ([Call(_COUNTS), _OTHER, Call(_COUNTS, "rows")], "first_first", {}),
    "last_first": ([Call(_COUNTS), _OTHER, Call(_COUNTS, "rows")], "last_first", {}),
    "backward_twice": ([Call(_COUNTS, "masked"), _OTHER], "twice", {}),
    "expanded_gradient": ([Call(_COUNTS, "masked")], "expanded", {}),
    "ranks_want_others": ([Call(_COUNTS, "masked"), _OTHER], "some", {}),
    "frozen_experts": ([Call(_COUNTS, "masked")], "frozen", {}),
    "no_backward": ([Call(_COUNTS), _OTHER], "dropped", {}),
}  # fmt: skip

# Of "some": what requires a gradient on each rank.
_SOME = (("x",), ("topk_weights", "w2"), ("w13",), ("x", "w2_bias"))


@dataclass(frozen=True)
class _Right:
    """This rank's call, the gradient of its output, and the right gradients.

    whole: the call as the oracle sees it.
    """

    case: Case
    grad: Tensor
    gradients: Gradients
    whole: Case

    @classmethod
    def of(cls, r: Rank, wanted: Call, index: int, how: str) -> _Right:
        """Weights get the sum over all batches, from which this rank's share of them is cut."""
        problem, parallel = cases.whole(r.problem), r.problem.parallel
        weights, mine = cases.random_weights(problem), None
        total: dict[str, Any] = {}
        for batch in range(parallel.dp_size):
            there = copy(r)
            there.batch = batch
            case, _ = there.forms(wanted, index)
            whole = Case(problem, weights, case.x, case.routing)
            grad = random_grad(whole, (index, batch))
            if how == "expanded":  # as sum().backward() makes it
                grad = torch.ones((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
            found = right_gradients(whole, grad)
            if batch == r.batch:
                mine = cls(case, grad, found, whole)
            for name in weights.tensors():
                total[name] = total[name] + found[name] if batch else found[name]
        assert mine is not None
        if r.alone and r.world_size > 1:  # partial sums
            mine = replace(mine, gradients=right_gradients(mine.case, mine.grad), whole=mine.case)
        held = ExpertWeights(**total).select(list(r.problem.local_experts))
        if parallel.tp_size > 1:
            held = cases.tp_shard(held, r.problem)
        return replace(mine, gradients={**mine.gradients, **held.tensors()})


@of_rank
def gradients_of_calls(r: Rank, sequence: Sequence[Call], how: str) -> None:
    """Make calls and their backwards, and compare the gradients with the oracle's.

    Args:
        how: "": each backward follows its call. first_first, last_first: all calls run before the
            first backward. twice: each backward runs twice. expanded: incoming gradients have
            strides of 0. some: ranks want different gradients. frozen: weights want none. dropped:
            the first call has no backward.
    """
    kernel = r.kernel
    assert isinstance(kernel, TrainableKernel)
    made = [_Right.of(r, wanted, index, how) for index, wanted in enumerate(sequence)]
    asked = list(inputs_of(made[0].case))
    if how == "frozen":
        asked = asked[:2]
    if how == "some":
        asked = list(_SOME[r.rank % len(_SOME)])
    given = [leaves(right.case, asked) for right in made]
    if how in ("first_first", "last_first"):
        outs = [call_of(kernel, case) for case in given]
        for index in sorted(range(len(outs)), reverse=how == "last_first"):
            backward(outs[index], made[index].grad)
    for index, (case, right) in enumerate(zip(given, made, strict=True)):
        times = 2 if how == "twice" else int(how not in ("first_first", "last_first"))
        out = call_of(kernel, case) if times else right.grad
        if how == "dropped" and not index:
            continue
        for _ in range(times):
            backward(out, right.grad, retain_graph=how == "twice")
        want = {name: max(times, 1) * right.gradients[name] for name in asked}
        said = fault(found_gradients(case), want, right.whole)
        r.expect(not said, f"rank {r.rank}, call {index} of {sequence}: {said}")


class DispatcherGradientConformance(TrainingBase, DispatcherBase):
    """The gradient kit for dispatchers that declare ``training``. Subclass it with ``backend``.

    Ranks run as in `DispatcherConformance`.
    """

    _interface = TrainableDispatcher

    @pytest.mark.parametrize("name", _CALLS)
    def test_gradients(self, name: str, ends: int) -> None:
        """Calls in which one thing is unusual."""
        sequence, how, changes = _CALLS[name]
        if changes.get("num_experts") and ends >= changes["num_experts"]:
            changes = {"num_experts": 2 * ends - 1}
        self._check(ends, gradients_of_calls, sequence, how, **changes, has_bias=True)

    def test_gradients_of_slices_and_shared_tokens(self, layout: ParallelConfig) -> None:
        """Ranks hold slices of the same experts (tp_size), or the same tokens (dp_size)."""
        sequence = [Call((3, 0, 9, 13), "masked"), Call((0, 0, 0, 5))]
        changes = self._first({"parallel": layout, "num_experts": 7}, {"parallel": layout})
        changes |= {"has_bias": True}
        self._check(layout.num_ranks, gradients_of_calls, sequence, "first_first", **changes)
