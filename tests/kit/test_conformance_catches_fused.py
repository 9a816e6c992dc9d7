"""Deliberately wrong fused kernels: each must fail a named test of the kit.

They are the example's kernel with one fault, on one rank or on the ranks of a group.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conformance_catches import killed_by, mutants_of, wrong
from right_fused import Fused, FusedOnRanks

from moekit import ParallelConfig, Routing
from moekit.plugin import FusedKernel, RouterLogits

SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=4)
routing_error = killed_by("test_router_logits", says="experts chosen by softmax")


# -- on one rank ---------------------------------------------------------------


@routing_error
class RenormalizesAlways(Fused):
    """Scales the weights that it computes to a sum of one, although the layer does not."""

    def run(self, out_TH, x_TH, weights, routing, workspace):
        if isinstance(routing, RouterLogits):
            routing = replace(routing, how=replace(routing.how, renormalize=True))
        super().run(out_TH, x_TH, weights, routing, workspace)


@routing_error
class TakesIdsOfLogits(Fused):
    """Reads ids and weights of a call that has logits in their place."""

    def run(self, out_TH, x_TH, weights, routing, workspace):
        routing = Routing(routing.topk_weights, routing.topk_ids)
        super().run(out_TH, x_TH, weights, routing, workspace)


wrong("RoutesMore", "Declares a way of choosing experts that it does not compute.",
      killed_by("test_router_logits", says="experts chosen by sigmoid", routes=lambda how: []),
      of=Fused)  # fmt: skip


@killed_by("test_dtype", "float32", says="NaN or infinite", run=Fused)
def AddsToTheOutput(self, out_TH, x_TH, weights, routing, workspace):
    """Adds to what the output's memory held."""
    held = out_TH.clone()
    Fused.run(self, out_TH, x_TH, weights, routing, workspace)
    out_TH += held


@killed_by("test_dtype", "float32", says="modified the caller.s x", run=Fused)
def ScalesTheTokens(self, out_TH, x_TH, weights, routing, workspace):
    """Scales the caller's tokens in place, and not its own copy."""
    x_TH *= 2
    Fused.run(self, out_TH, x_TH / 2, weights, routing, workspace)


# -- on ranks ------------------------------------------------------------------


@killed_by("test_tokens_per_rank", "uneven", 2, _exchange=FusedOnRanks)
def KeepsItsTokens(self, rows, sent, arrived):
    """Runs this rank's experts only, on this rank's tokens."""
    return rows


@killed_by("test_tokens_per_rank", "uneven", 2, _exchange=FusedOnRanks)
def ForgetsTheLastRank(self, rows, sent, arrived):
    """Leaves out what the last rank computed."""
    made = FusedOnRanks._exchange(self, rows, sent, arrived)
    if made.dtype == torch.float32 and made.shape[1] == self.problem.hidden_size:
        made[sum(arrived[:-1]) :] = 0
    return made


@killed_by("test_slices_and_shared_tokens", SLICES, _experts=FusedOnRanks)
def FirstSliceOnly(self, x, ids, p, weights):
    """Adds up the experts' first slices only."""
    return FusedOnRanks._experts(self, x, ids, p, weights) * (self.problem.parallel.tp_rank == 0)


@killed_by("test_group_is_resolved", 2, says="`group` is None")
class ResolvesNothing(FusedOnRanks):
    """Keeps no group for the kernel's checks, and finds out nothing about other ranks."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self.group = None


@killed_by("test_tokens_per_rank", "uneven", 2, says="the process group has 4 ranks|did not come")
class InWorld(FusedOnRanks):
    """Exchanges tokens in WORLD."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, dist.group.WORLD)


@killed_by("test_memory_is_stated", 2, says="bytes, stated are", transient_bytes=FusedOnRanks)
def StatesNoMemory(self, num_tokens):
    """Does not count the tokens of other ranks."""
    return 0


@pytest.mark.parametrize("mutant", mutants_of(__name__)[:1])
def test_the_controls_are_fused_kernels(mutant):
    assert issubclass(mutant.right, FusedKernel) and mutant.right.BASE == "on one rank"
