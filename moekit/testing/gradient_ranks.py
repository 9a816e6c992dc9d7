"""The gradient kit for dispatchers: gradients reach the ranks of the experts, and come home."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.contract.training import TrainableDispatcher
from moekit.problem import ParallelConfig
from moekit.problem.weights import ExpertWeights
from moekit.testing import cases
from moekit.testing.base import OfAnotherClass
from moekit.testing.cases import UNUSUAL, Case
from moekit.testing.dispatchers import DispatcherBase
from moekit.testing.gradients import (
    FORMS,
    Gradients,
    differentiate,
    fault,
    inputs_of,
    kept_beyond_stated,
    leaves,
    random_grad,
    right_gradients,
)
from moekit.testing.ranks import Call, Rank
from moekit.training.kernel import TrainableKernel

_COUNTS = (3, 0, 9, 13)
_OTHER = Call((5, 2, 0, 8), "masked")
_MASKED = Call(_COUNTS, "masked")

# What is unusual -> the calls, how their backwards run (see `gradients_of_calls`), and changes of
# the problem.
_CALLS: dict[str, tuple[Sequence[Call], str, dict[str, Any]]] = {
    **{name: ([Call((5, 2, 9, 13), kind)], "", more) for name, (kind, more) in UNUSUAL.items()},
    "even": ([Call((9, 9, 9, 9))], "", {}),
    "a_rank_without_tokens": ([Call(_COUNTS), Call(_COUNTS[::-1])], "", {}),
    "one_token_in_all": ([Call((0, 0, 0, 1))], "", {}),
    "no_tokens": ([Call((0, 0, 0, 0))], "", {}),
    "top_8": ([Call(_COUNTS)], "", {"top_k": 8}),
    "experts_do_not_divide_by_ranks": ([_MASKED], "", {"num_experts": 7}),
    "reference_experts": ([_MASKED], "", {"experts": "reference"}),
    "float32": ([_MASKED], "", {"dtype": torch.float32}),
    "first_first": ([Call(_COUNTS), _OTHER, Call(_COUNTS, "rows")], "first_first", {}),
    "last_first": ([Call(_COUNTS), _OTHER, Call(_COUNTS, "rows")], "last_first", {}),
    "backward_twice": ([_MASKED, _OTHER], "twice", {}),
    "expanded_gradient": ([_MASKED], "expanded", {}),
    "ranks_want_others": ([_MASKED, _OTHER], "some", {}),
    "frozen_experts": ([_MASKED], "frozen", {}),
    "no_backward": ([Call(_COUNTS), _OTHER], "dropped", {}),
}

# Of "some": what requires a gradient on each rank.
_SOME = (("x",), ("topk_weights", "w2"), ("w13",), ("x", "w2_bias"))


@dataclass(frozen=True)
class _Right:
    """This rank's call, and what its right gradients are made of.

    grad: the gradient (T, H) of its output.
    whole: the call as the oracle sees it; a partial sum has this rank's experts alone.
    batches: such calls of all batches, and the gradients of their outputs.
    """

    case: Case
    grad: Tensor
    whole: Case
    batches: Sequence[tuple[Case, Tensor]]

    @classmethod
    def of(cls, r: Rank, wanted: Call, index: int, how: str) -> _Right:
        problem = cases.whole(r.problem)
        weights, mine, batches = cases.random_weights(problem), list[Case](), []
        for batch in range(r.problem.parallel.dp_size):
            there = copy(r)
            there.batch = batch
            mine.append(there.case(wanted, index)[0])
            whole = Case(problem, weights, mine[-1].x, mine[-1].routing)
            batches.append((whole, FORMS.get(how, torch.clone)(random_grad(whole, (index, batch)))))
        case, (whole, grad) = mine[r.batch], batches[r.batch]
        return cls(case, grad, case if r.alone and r.world_size > 1 else whole, batches)

    def fault(self, found: Gradients, asked: Sequence[str], times: int) -> str:
        """Describe the first gradient of ``asked`` that is wrong after ``times`` backwards."""
        right = self._gradients(times)
        want = {name: right[name] for name in asked}
        return fault(found, want, self.whole, lambda _, **a: self._gradients(times, **a))

    def _gradients(self, times: int, **around: Any) -> Gradients:
        """Weights get the sum over all batches, from which this rank's share of them is cut."""
        mine = right_gradients(self.whole, times * self.grad, **around)
        each = [right_gradients(case, times * grad, **around) for case, grad in self.batches]
        weights, problem = self.case.weights.tensors(), self.case.problem
        total: dict[str, Any] = {name: sum(found[name] for found in each) for name in weights}
        held = ExpertWeights(**total).select(list(problem.local_experts))
        if problem.parallel.tp_size > 1:
            held = cases.tp_shard(held, problem)
        return {**mine, **held.tensors()}


def gradients_of_calls(r: Rank, sequence: Sequence[Call], how: str) -> None:
    """Make calls and their backwards, and compare the gradients with the oracle's.

    Args:
        how: a way of `differentiate`. expanded: incoming gradients have strides of 0. some: ranks
            want different gradients. frozen: weights want none.
    """
    kernel = r.kernel
    assert isinstance(kernel, TrainableKernel)
    made = [_Right.of(r, wanted, index, how) for index, wanted in enumerate(sequence)]
    asked = list(inputs_of(made[0].case))
    if how == "frozen":
        asked = asked[:2]
    if how == "some":
        asked = list(_SOME[r.rank % len(_SOME)])
    found = differentiate(kernel, [(right.case, right.grad) for right in made], how, asked)
    for index, right in enumerate(made):
        if how == "dropped" and not index:
            continue
        said = right.fault(found[index], asked, 1 + (how == "twice"))
        r.expect(not said, f"rank {r.rank}, call {index} of {sequence}: {said}")


def memory_of_calls(r: Rank, num_tokens: int) -> None:
    """Check what a call without a backward keeps, and that it goes with the output."""
    assert isinstance(r.kernel, TrainableKernel)
    case, _ = r.case(Call((num_tokens,), "hot"))
    said = kept_beyond_stated(r.kernel, leaves(case), 3)
    r.expect(not said, f"rank {r.rank}: {said}")


class DispatcherGradientConformance(OfAnotherClass, DispatcherBase):
    """The gradient kit for dispatchers that declare ``training``. Subclass it with ``backend``.

    Ranks run as in `DispatcherConformance`.
    """

    _interface, _names_class, _wants = TrainableDispatcher, "training", {"training": True}

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

    def test_memory_of_calls_without_backward(self, ends: int) -> None:
        """The experts save nothing."""
        sizes = {"num_experts": 8, "top_k": 4, "experts": "reference"}
        self._check(ends, memory_of_calls, 32, **sizes, has_bias=True)
