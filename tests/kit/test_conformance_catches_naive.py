"""Deliberately wrong dispatchers that move tokens: each must fail a named test of the kit.

They are `naive` with one fault. The kit runs them on four processes.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance_catches import suite
from moekit_naive.dispatcher import NaiveDispatcher
from right_naive import caught_naive

from moekit import MoEProblem, ParallelConfig, Routing
from moekit.contract.pending import Pending
from moekit.errors import Unsupported
from moekit.plugin import weight_and_reduce

# -- groups --------------------------------------------------------------------


class World(NaiveDispatcher):
    def __init__(self, spec, problem, group=None):
        moves = problem.parallel.moves_tokens
        super().__init__(spec, problem, dist.group.WORLD if moves else None)


class WorldForTransfers(NaiveDispatcher):
    """Resolves its group, but exchanges sizes in WORLD."""

    def _exchange_headers(self, header):
        mine = torch.tensor(header)
        everyone = mine.new_empty(dist.get_world_size() * len(header))
        dist.all_gather_into_tensor(everyone, mine)
        return everyone.view(-1, len(header)).tolist()[: self.group.size()]


class SharesByGlobalRank(NaiveDispatcher):
    def _arrived(self, x_RH, meta_RM, sizes):
        parallel = self.problem.parallel
        mine = replace(parallel, ep_rank=dist.get_rank() % parallel.ep_size)
        asked, self.problem = self.problem, self.problem.replace(parallel=mine)
        tokens = super()._arrived(x_RH, meta_RM, sizes)
        self.problem = asked
        return tokens


class SendsFromGlobalRanks(NaiveDispatcher):
    def _gather(self, mine, everyone, sizes, works):
        if len(set(sizes.sent)) == 1:
            super()._gather(mine, everyone, sizes, works)
            return
        for rank, part in enumerate(torch.split(everyone, list(sizes.sent))):
            if rank == dist.get_rank():
                part.copy_(mine)
            dist.broadcast(part.view(torch.uint8), src=rank, group=self.group)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (World, "the process group has 4 ranks"),
        (WorldForTransfers, "."),
        (SharesByGlobalRank, "relative error|exact zeros"),
        (SendsFromGlobalRanks, "not part of group"),
    ],
)
def test_another_group_than_its_own(wrong, says):
    caught_naive(wrong, "test_groups_at_once", says=says)


def wants_world(problem):
    ranks = problem.parallel.num_ranks
    if dist.is_initialized() and problem.parallel.moves_tokens and ranks != dist.get_world_size():
        return [f"the library wants WORLD, which has {dist.get_world_size()} ranks"]
    return []


def test_dispatcher_that_says_it_needs_world_is_skipped():
    kit = suite(World, "naive", check=wants_world)
    with pytest.raises(pytest.skip.Exception, match="not WORLD: .*the library wants WORLD"):
        kit.test_tokens_per_rank("uneven", 2)
    kit.test_tokens_per_rank("uneven", 4)


class SharesByName(NaiveDispatcher):
    """Keeps the share of the experts that this rank has in the group of a name."""

    _first: ClassVar[dict[str, MoEProblem]] = {}

    def _arrived(self, x_RH, meta_RM, sizes):
        asked = self.problem
        self.problem = self._first.setdefault(self.group.group_name, asked)
        tokens = super()._arrived(x_RH, meta_RM, sizes)
        self.problem = asked
        return tokens


class BoardByName(NaiveDispatcher):
    """Keeps the memory that it shares with the ranks of a group by the group's name."""

    _boards: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._board = self._boards.setdefault(self.group.group_name, self._board)
        self._board._timeout = 1.0


def test_state_of_another_group_of_that_name():
    test = "test_groups_of_one_name"
    caught_naive(SharesByName, test, says="group 2 of one name: (relative error|exact zeros)")
    caught_naive(BoardByName, test, says="rank 1 did not send its sizes")


class CountsAllGroups(NaiveDispatcher):
    """Ranks exchange keys with a number that counts the exchanges of all groups of a process."""

    _exchanges: ClassVar[list[None]] = []

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        store = dist.distributed_c10d._get_process_group_store(self.group)
        keys = [f"{len(self._exchanges)} of {rank}" for rank in range(self.group.size())]
        self._exchanges.append(None)
        store.set(keys[self.group.rank()], "")
        store.wait(keys, timedelta(seconds=2))


def test_keys_numbered_by_all_groups_of_a_process():
    caught_naive(CountsAllGroups, "test_ranks_that_served_others", says="wait timeout")


class RefusesFourRanks(NaiveDispatcher):
    """Refuses a number of ranks that its spec declares."""

    def __init__(self, spec, problem, group=None):
        if problem.parallel.num_ranks == 4:
            raise Unsupported("serves 2 ranks")
        super().__init__(spec, problem, group)


def test_ranks_that_all_refuse_a_declared_problem():
    said = "no rank supports the problem.*serves 2 ranks"
    caught_naive(RefusesFourRanks, "test_ranks_that_served_others", says=said)


class NotResolved(NaiveDispatcher):
    """Takes any group and any problem of the other ranks."""

    def __init__(self, spec, problem, group=None):
        with mock.patch("moekit_naive.dispatcher.resolve", lambda *_: group or dist.group.WORLD):
            super().__init__(spec, problem, group)


class GroupForgotten(NaiveDispatcher):
    """Resolves its group, and keeps it where the kernel does not find it."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._own, self.group = self.group, None

    def _within(self, method, *args):
        self.group = self._own
        try:
            return method(*args)
        finally:
            self.group = None

    def prepare(self, *args):
        return self._within(super().prepare, *args)

    def finalize(self, *args):
        return self._within(super().finalize, *args)


def test_group_not_resolved_or_not_kept():
    test = "test_group_is_resolved"
    caught_naive(NotResolved, test, 2, says="ranks compose for different layers")
    caught_naive(GroupForgotten, test, 2, says="the dispatcher's `group` is None")
    caught_naive(NotResolved, "test_group_mismatch", 2, says="was taken for")


# -- how ranks share experts and tokens ----------------------------------------


class TensorRanksStarved(NaiveDispatcher):
    """Sends tokens to the first of the ranks that hold slices of an expert."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        if self.problem.parallel.tp_rank:
            tokens.topk_ids.fill_(-1)
        return tokens


class PlaceByExpertRank(NaiveDispatcher):
    """Takes ep_rank for the rank in the group."""

    def _gather(self, mine, everyone, sizes, works):
        for rank, part in enumerate(torch.split(everyone, list(sizes.sent))):
            if rank == self.problem.parallel.ep_rank and len(part) == len(mine):
                part.copy_(mine)
            dist.broadcast(part.view(torch.uint8), group=self.group, group_src=rank)


SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=4)
SLICES_ONLY = ParallelConfig(tp_size=4, dp_size=4)
SHARED_SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=2)
SHARED = ParallelConfig(ep_size=4, dp_size=2)


@pytest.mark.parametrize("layout", [SLICES, SLICES_ONLY, SHARED_SLICES])
def test_tensor_parallel_ranks_starved(layout):
    test = "test_slices_and_shared_tokens"
    caught_naive(TensorRanksStarved, test, layout, says="relative error")
    suite(TensorRanksStarved, "naive").test_tokens_per_rank("uneven", 4)  # nothing else sees it


def test_place_in_the_group_by_expert_rank():
    test = "test_slices_and_shared_tokens"
    caught_naive(PlaceByExpertRank, test, SLICES, says="NaN|relative error")
    suite(PlaceByExpertRank, "naive").test_tokens_per_rank("uneven", 4)


class LeadersOnly(NaiveDispatcher):
    """Returns results to the first of the ranks that hold the same tokens."""

    def finalize(self, y, dispatched, out_TH):
        pending = super().finalize(y, dispatched, out_TH)
        if self.group is None or dispatched.handle.sizes.sent[self.group.rank()]:
            return pending
        return Pending(lambda: pending.result().zero_())


class EachCopySums(NaiveDispatcher):
    """Adds the results that all ranks with the same tokens would get."""

    def finalize(self, y, dispatched, out_TH):
        pending = super().finalize(y, dispatched, out_TH)
        copies = self.problem.parallel.num_ranks // self.problem.parallel.dp_size
        return Pending(lambda: pending.result().mul_(copies if self.group else 1))


@pytest.mark.parametrize("wrong", [LeadersOnly, EachCopySums])
@pytest.mark.parametrize("layout", [SHARED, SHARED_SLICES])
def test_fewer_batches_than_ranks(wrong, layout):
    says = "relative error"
    caught_naive(wrong, "test_slices_and_shared_tokens", layout, says=says)


class EqualShares(NaiveDispatcher):
    """Takes E // ranks experts for every rank's share."""

    def _arrived(self, x_RH, meta_RM, sizes):
        tokens, p = super()._arrived(x_RH, meta_RM, sizes), self.problem
        each = p.num_physical_experts // p.parallel.ep_size
        ids = meta_RM[:, : p.top_k].long() - each * p.parallel.ep_rank
        return replace(tokens, topk_ids=torch.where((ids >= 0) & (ids < each), ids, -1))


def test_experts_that_do_not_divide():
    test = "test_experts_do_not_divide_by_ranks"
    caught_naive(EqualShares, test, 4, says="relative error|exact zeros")


class EqualSharesOfSlices(EqualShares):
    """Takes E // ranks experts where ranks hold slices of them."""

    def _arrived(self, *args):
        sliced = self.problem.parallel.tp_size > 1
        return (super() if sliced else super(EqualShares, self))._arrived(*args)


def test_slices_of_experts_that_do_not_divide():
    test = "test_slices_and_shared_tokens"
    caught_naive(EqualSharesOfSlices, test, SLICES, says="relative error|exact zeros")


class NoTokensNoCall(NaiveDispatcher):
    def prepare(self, x_TH, routing, quantize):
        assert len(x_TH), "no tokens"
        return super().prepare(x_TH, routing, quantize)


def test_rank_without_tokens():
    caught_naive(NoTokensNoCall, "test_tokens_per_rank", "empty_rank", 4, says="no tokens")


# -- many calls ----------------------------------------------------------------


class Stale(NaiveDispatcher):
    """Returns the last result again from its n-th call of a number of tokens on."""

    _from = 20

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._seen = {}

    def finalize(self, y, dispatched, out_TH):
        pending, (count, last) = super().finalize(y, dispatched, out_TH), (0, None)
        count, last = self._seen.get(len(out_TH), (0, None))

        def arrive():
            out = pending.result()
            new = out.clone()
            if count >= self._from:
                out.copy_(last)
            self._seen[len(out_TH)] = (count + 1, new)
            return out

        return Pending(arrive)


class StaleLate(Stale):
    _from = 60


@pytest.mark.parametrize("wrong", [Stale, StaleLate])
def test_stale_output_of_a_late_call(wrong):
    caught_naive(wrong, "test_long_run_of_one_shape", 4, says="of one shape: relative error")


class KeepsTokens(NaiveDispatcher):
    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._kept = []

    def prepare(self, x_TH, routing, quantize):
        self._kept.append(x_TH)
        return super().prepare(x_TH, routing, quantize)


class KeepsIds(KeepsTokens):
    def prepare(self, x_TH, routing, quantize):
        self._kept.append(routing.topk_ids)
        return NaiveDispatcher.prepare(self, x_TH, routing, quantize)


@pytest.mark.parametrize("wrong", [KeepsTokens, KeepsIds])
def test_tensors_kept_for_ever(wrong):
    caught_naive(wrong, "test_long_run_of_one_shape", 4, says="12 calls leave")


# -- numbers and values out of the ordinary ------------------------------------


class IdsBelow128(NaiveDispatcher):
    _below = 128

    def _to_send(self, x_TH, routing, quantize):
        ids = torch.where(routing.topk_ids < self._below, routing.topk_ids, -1)
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class IdsBelow256(IdsBelow128):
    _below = 256


class IdsBelow512(IdsBelow128):
    _below = 512


class IdsInAByte(NaiveDispatcher):
    def _to_send(self, x_TH, routing, quantize):
        ids = torch.where(routing.topk_ids < 0, -1, routing.topk_ids % 256)
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class IdsOf64Bits(NaiveDispatcher):
    """Declares ids of any dtype, and reads their memory as int64."""

    def _to_send(self, x_TH, routing, quantize):
        ids = routing.topk_ids
        if ids.dtype is torch.int32:
            flat = ids.flatten()
            memory = torch.cat([flat, torch.zeros_like(flat)]).view(torch.int64)
            ids = memory[: len(flat)].view(ids.shape)
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class IdsOf32Bits(NaiveDispatcher):
    """Declares ids of any dtype, and reads their memory as int32."""

    def _to_send(self, x_TH, routing, quantize):
        ids = routing.topk_ids
        read = ids.flatten().view(torch.int32)[: ids.numel()].view(ids.shape)
        return super()._to_send(x_TH, Routing(routing.topk_weights, read), quantize)


@pytest.mark.parametrize("wrong", [IdsOf64Bits, IdsOf32Bits])
def test_ids_of_the_other_dtype(wrong):
    caught_naive(wrong, "test_tokens_per_rank", "uneven", 2, says="relative error|exact zeros|NaN")


class EightChoices(NaiveDispatcher):
    def _to_send(self, x_TH, routing, quantize):
        ids = routing.topk_ids.clone()
        ids[:, 8:] = -1
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class Rows1024(NaiveDispatcher):
    """Hands over 1024 rows at most."""

    _most = 1024

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        tokens.topk_ids[self._most :] = -1
        return tokens


class Rows32768(Rows1024):
    """Counts rows in 16 bits."""

    _most = 32768


class Assignments32768(NaiveDispatcher):
    """Counts assignments in 16 bits."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        tokens.topk_ids.view(-1)[32768:] = -1
        return tokens


class OtherWeights(NaiveDispatcher):
    def _instead(self, weights):
        return weights

    def _to_send(self, x_TH, routing, quantize):
        changed = Routing(self._instead(routing.topk_weights), routing.topk_ids)
        return super()._to_send(x_TH, changed, quantize)


class WeightsNotNegative(OtherWeights):
    def _instead(self, weights):
        return weights.abs()


class WeightsUpTo2(OtherWeights):
    def _instead(self, weights):
        return weights.clamp(max=2)


class ZeroWeightIsNaN(OtherWeights):
    def _instead(self, weights):
        return weights * (weights / weights)


class OtherTokens(NaiveDispatcher):
    def _instead(self, x):
        return x

    def prepare(self, x_TH, routing, quantize):
        return super().prepare(self._instead(x_TH), routing, quantize)


class Within8(OtherTokens):
    def _instead(self, x):
        return x.clamp(-8, 8)


class Within100(OtherTokens):
    def _instead(self, x):
        return x.clamp(-100, 100)


class InFloat16(OtherTokens):
    """Sends bfloat16 tokens as float16."""

    def _instead(self, x):
        return x if x.dtype is torch.float32 else x.half().to(x.dtype)


class NaNHidden(OtherTokens):
    def _instead(self, x):
        return x.nan_to_num()


class NaNSpreads(OtherTokens):
    def _instead(self, x):
        return x + 0 * x.sum()


@pytest.mark.parametrize(
    "wrong",
    [
        *(IdsBelow128, IdsBelow256, IdsBelow512, IdsInAByte, EightChoices),
        *(Rows1024, Rows32768, Assignments32768),
        *(WeightsNotNegative, WeightsUpTo2, ZeroWeightIsNaN),
        *(Within8, Within100, InFloat16, NaNHidden, NaNSpreads),
    ],
)
def test_numbers_and_values_out_of_the_ordinary(wrong):
    caught_naive(wrong, "test_many_assignments", 4, says="tokens are wrong")


class PartialSums(NaiveDispatcher):
    """Each rank sums its own rows, and rounded sums are added: K in the order of ranks."""

    def finalize(self, y, dispatched, out_TH):
        if not self.problem.batch_invariant:
            return super().finalize(y, dispatched, out_TH)
        rows = y.new_empty((len(y), y.shape[2]))
        ids, weights = dispatched.topk_ids, dispatched.topk_weights
        weight_and_reduce(y.flatten(0, 1), ids, weights, rows)
        asked, self.problem = self.problem, self.problem.replace(batch_invariant=False)
        pending = super().finalize(rows, dispatched, out_TH)
        self.problem = asked
        return pending


class OrderOfRanks(NaiveDispatcher):
    """It sums K in the order of the ranks that hold the experts."""

    def _in_order_of_k(self, rows_GTN, routing, out_TH):
        ids, order = routing.topk_ids.sort(dim=1)
        rows = rows_GTN.unflatten(2, (ids.shape[1], out_TH.shape[1]))
        rows = rows.gather(2, order[None, :, :, None].expand_as(rows)).flatten(2)
        ascending = Routing(routing.topk_weights.gather(1, order), ids)
        return super()._in_order_of_k(rows, ascending, out_TH)


@pytest.mark.parametrize("wrong", [PartialSums, OrderOfRanks])
def test_sums_that_depend_on_the_ranks(wrong):
    for world in (2, 4):
        caught_naive(
            wrong, "test_batch_invariant", "float32", "none", world, says="not batch-invariant"
        )


class Columns4096(OtherTokens):
    def _instead(self, x):
        return torch.cat([x[:, :4096], torch.zeros_like(x[:, 4096:])], dim=1)


def test_rows_wider_than_a_buffer():
    caught_naive(Columns4096, "test_wide_rows", 4, says="tokens are wrong")
