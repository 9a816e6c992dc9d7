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
from conformance_catches import killed_by, suite, wrong
from right_naive import Naive

from moekit import MoEProblem, ParallelConfig, Routing
from moekit.contract.pending import Pending
from moekit.errors import Unsupported
from moekit.plugin import weight_and_reduce

SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=4)
SLICES_ONLY = ParallelConfig(tp_size=4, dp_size=4)
SHARED_SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=2)
SHARED = ParallelConfig(ep_size=4, dp_size=2)

many = killed_by("test_many_assignments", 4, says="tokens are wrong")

# -- capacity ------------------------------------------------------------------


@killed_by("test_capacity", 2, says="at most 13 tokens.*(relative error|exact zeros)", handed=Naive)
def RowsOfOneRank(self, tokens):
    """Takes the most tokens of any rank for the rows of all ranks: others' tokens get no expert."""
    ids = tokens.topk_ids.clone()
    ids[self.told or len(ids) :] = -1
    return replace(tokens, topk_ids=ids)


@killed_by("test_capacity", 2, says="other bits than with the smallest capacity", finalize=Naive)
def SumsByCapacity(self, y, dispatched, out_TH):
    """Rounds otherwise where it was composed for many tokens."""
    if self.problem.max_num_tokens > 100:
        y = y * (1 + 2**-7)
    return Naive.finalize(self, y, dispatched, out_TH)


# -- groups --------------------------------------------------------------------


@killed_by("test_tokens_per_rank", "uneven", 2, says="the process group has 4 ranks|did not come")
class World(Naive):
    """It resolves WORLD instead of its group."""

    def __init__(self, spec, problem, group=None):
        moves = problem.parallel.moves_tokens
        super().__init__(spec, problem, dist.group.WORLD if moves else None)


@killed_by("test_tokens_per_rank", "uneven", 2, says=".", _exchange_headers=Naive)
def WorldForTransfers(self, header):
    """Resolves its group, but exchanges sizes in WORLD."""
    mine = torch.tensor(header)
    everyone = mine.new_empty(dist.get_world_size() * len(header))
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(-1, len(header)).tolist()[: self.group.size()]


@killed_by("test_tokens_per_rank", "uneven", 2, says="relative error|exact zeros", _arrived=Naive)
def SharesByGlobalRank(self, x_RH, meta_RM, sizes):
    """The global rank chooses the share of the experts."""
    parallel = self.problem.parallel
    mine = replace(parallel, ep_rank=dist.get_rank() % parallel.ep_size)
    asked, self.problem = self.problem, self.problem.replace(parallel=mine)
    tokens = Naive._arrived(self, x_RH, meta_RM, sizes)
    self.problem = asked
    return tokens


@killed_by("test_tokens_per_rank", "uneven", 2, says="not part of group", _gather=Naive)
def SendsFromGlobalRanks(self, mine, everyone, sizes, works):
    """Broadcasts name global ranks."""
    if len(set(sizes.sent)) == 1:
        Naive._gather(self, mine, everyone, sizes, works)
        return
    for rank, part in enumerate(torch.split(everyone, list(sizes.sent))):
        if rank == dist.get_rank():
            part.copy_(mine)
        dist.broadcast(part.view(torch.uint8), src=rank, group=self.group)


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


@killed_by("test_groups_of_one_name", says="group 2 of one name: (relative error|exact zeros)")
class SharesByName(Naive):
    """Keeps the share of the experts that this rank has in the group of a name."""

    _first: ClassVar[dict[str, MoEProblem]] = {}

    def _arrived(self, x_RH, meta_RM, sizes):
        asked = self.problem
        self.problem = self._first.setdefault(self.group.group_name, asked)
        tokens = super()._arrived(x_RH, meta_RM, sizes)
        self.problem = asked
        return tokens


@killed_by("test_groups_of_one_name", says="rank 1 did not send its sizes")
class BoardByName(Naive):
    """Keeps the memory that it shares with the ranks of a group by the group's name."""

    _boards: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._board = self._boards.setdefault(self.group.group_name, self._board)
        self._board._timeout = 1.0


@killed_by("test_ranks_that_served_others", says="wait timeout")
class CountsAllGroups(Naive):
    """Ranks exchange keys with a number that counts the exchanges of all groups of a process."""

    _exchanges: ClassVar[list[None]] = []

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        store = dist.distributed_c10d._get_process_group_store(self.group)
        keys = [f"{len(self._exchanges)} of {rank}" for rank in range(self.group.size())]
        self._exchanges.append(None)
        store.set(keys[self.group.rank()], "")
        store.wait(keys, timedelta(seconds=2))


@killed_by("test_ranks_that_served_others", says="no rank supports the problem.*serves 2 ranks")
class RefusesFourRanks(Naive):
    """Refuses a number of ranks that its spec declares."""

    def __init__(self, spec, problem, group=None):
        if problem.parallel.num_ranks == 4:
            raise Unsupported("serves 2 ranks")
        super().__init__(spec, problem, group)


@killed_by("test_group_is_resolved", 2, says="ranks compose for different layers")
class NotResolved(Naive):
    """Takes any group and any problem of the other ranks."""

    def __init__(self, spec, problem, group=None):
        with mock.patch("moekit_naive.dispatcher.resolve", lambda *_: group or dist.group.WORLD):
            super().__init__(spec, problem, group)


@killed_by("test_group_is_resolved", 2, says="the dispatcher's `group` is None")
class GroupForgotten(Naive):
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


# -- how ranks share experts and tokens ----------------------------------------


@killed_by("test_slices_and_shared_tokens", SLICES)
@killed_by("test_slices_and_shared_tokens", SLICES_ONLY)
@killed_by("test_slices_and_shared_tokens", SHARED_SLICES, _arrived=Naive)
def TensorRanksStarved(self, *args):
    """Sends tokens to the first of the ranks that hold slices of an expert."""
    tokens = Naive._arrived(self, *args)
    if self.problem.parallel.tp_rank:
        tokens.topk_ids.fill_(-1)
    return tokens


@killed_by("test_slices_and_shared_tokens", SLICES, says="NaN|relative error", _gather=Naive)
def PlaceByExpertRank(self, mine, everyone, sizes, works):
    """Takes ep_rank for the rank in the group."""
    for rank, part in enumerate(torch.split(everyone, list(sizes.sent))):
        if rank == self.problem.parallel.ep_rank and len(part) == len(mine):
            part.copy_(mine)
        dist.broadcast(part.view(torch.uint8), group=self.group, group_src=rank)


@pytest.mark.parametrize("mutant", [TensorRanksStarved, PlaceByExpertRank])
def test_other_tests_miss_tensor_parallel_ranks(mutant):
    suite(mutant, "naive").test_tokens_per_rank("uneven", 4)


@killed_by("test_slices_and_shared_tokens", SHARED, says="relative error")
@killed_by("test_slices_and_shared_tokens", SHARED_SLICES, says="relative error", finalize=Naive)
def LeadersOnly(self, y, dispatched, out_TH):
    """Returns results to the first of the ranks that hold the same tokens."""
    pending = Naive.finalize(self, y, dispatched, out_TH)
    if self.group is None or dispatched.handle.sizes.sent[self.group.rank()]:
        return pending
    return Pending(lambda: pending.result().zero_())


@killed_by("test_slices_and_shared_tokens", SHARED, says="relative error")
@killed_by("test_slices_and_shared_tokens", SHARED_SLICES, says="relative error", finalize=Naive)
def EachCopySums(self, y, dispatched, out_TH):
    """Adds the results that all ranks with the same tokens would get."""
    pending = Naive.finalize(self, y, dispatched, out_TH)
    copies = self.problem.parallel.num_ranks // self.problem.parallel.dp_size
    return Pending(lambda: pending.result().mul_(copies if self.group else 1))


@killed_by("test_calls", "experts_do_not_divide_by_ranks", 4, says="relative error|exact zeros")
class EqualShares(Naive):
    """Takes E // ranks experts for every rank's share."""

    def _arrived(self, x_RH, meta_RM, sizes):
        tokens, p = super()._arrived(x_RH, meta_RM, sizes), self.problem
        each = p.num_physical_experts // p.parallel.ep_size
        ids = meta_RM[:, : p.top_k].long() - each * p.parallel.ep_rank
        return replace(tokens, topk_ids=torch.where((ids >= 0) & (ids < each), ids, -1))


@killed_by("test_slices_and_shared_tokens", SLICES, says="relative error|exact zeros")
class EqualSharesOfSlices(EqualShares):
    """Takes E // ranks experts where ranks hold slices of them."""

    def _arrived(self, *args):
        sliced = self.problem.parallel.tp_size > 1
        return (super() if sliced else super(EqualShares, self))._arrived(*args)


@killed_by("test_tokens_per_rank", "empty_rank", 4, says="no tokens", prepare=Naive)
def NoTokensNoCall(self, x_TH, routing, quantize):
    """A rank with T = 0 fails."""
    assert len(x_TH), "no tokens"
    return Naive.prepare(self, x_TH, routing, quantize)


# -- many calls ----------------------------------------------------------------


@killed_by("test_long_run_of_one_shape", 4, says="of one shape: relative error")
class Stale(Naive):
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


wrong("StaleLate", "It returns the last result again, from call 20 or 60 of one shape",
      killed_by("test_long_run_of_one_shape", 4, says="of one shape: relative error"), of=Stale,
      _from=60)  # fmt: skip


@killed_by("test_long_run_of_one_shape", 4, says="12 calls leave")
class KeepsTokens(Naive):
    """A list keeps every call's x, or ids."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._kept = []

    def prepare(self, x_TH, routing, quantize):
        self._kept.append(x_TH)
        return super().prepare(x_TH, routing, quantize)


@killed_by("test_long_run_of_one_shape", 4, says="12 calls leave", prepare=KeepsTokens)
def KeepsIds(self, x_TH, routing, quantize):
    """A list keeps every call's x, or ids."""
    self._kept.append(routing.topk_ids)
    return Naive.prepare(self, x_TH, routing, quantize)


# -- numbers and values out of the ordinary ------------------------------------


@many
class IdsBelow128(Naive):
    """Larger ids are dropped."""

    _below = 128

    def _to_send(self, x_TH, routing, quantize):
        ids = torch.where(routing.topk_ids < self._below, routing.topk_ids, -1)
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


wrong("IdsBelow256", "Larger ids are dropped", many, of=IdsBelow128, _below=256)
wrong("IdsBelow512", "Larger ids are dropped", many, of=IdsBelow128, _below=512)


@many
def IdsInAByte(self, routing):
    """Ids are sent modulo 256."""
    ids = torch.where(routing.topk_ids < 0, -1, routing.topk_ids % 256)
    return Routing(routing.topk_weights, ids)


@killed_by("test_tokens_per_rank", "uneven", 2, says="relative error|exact zeros|NaN")
def IdsOf64Bits(self, routing):
    """Declares ids of any dtype, and reads their memory as int64."""
    ids = routing.topk_ids
    if ids.dtype is torch.int32:
        flat = ids.flatten()
        memory = torch.cat([flat, torch.zeros_like(flat)]).view(torch.int64)
        ids = memory[: len(flat)].view(ids.shape)
    return Routing(routing.topk_weights, ids)


@killed_by("test_tokens_per_rank", "uneven", 2, says="relative error|exact zeros|NaN")
def IdsOf32Bits(self, routing):
    """Declares ids of any dtype, and reads their memory as int32."""
    ids = routing.topk_ids
    read = ids.flatten().view(torch.int32)[: ids.numel()].view(ids.shape)
    return Routing(routing.topk_weights, read)


@many
def EightChoices(self, routing):
    """A token's assignments from the ninth on are dropped."""
    ids = routing.topk_ids.clone()
    ids[:, 8:] = -1
    return Routing(routing.topk_weights, ids)


@many
class Rows1024(Naive):
    """Hands over 1024 rows at most."""

    _most = 1024

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        tokens.topk_ids[self._most :] = -1
        return tokens


wrong("Rows32768", "Counts rows in 16 bits", many, of=Rows1024, _most=32768)


@many
def Assignments32768(self, handed):
    """Counts assignments in 16 bits."""
    handed.topk_ids.view(-1)[32768:] = -1
    return handed


wrong("WeightsNotNegative", "Takes the magnitude of router weights",
      lambda self, routing: Routing(routing.topk_weights.abs(), routing.topk_ids),
      many)  # fmt: skip
wrong("WeightsUpTo2", "Clamps router weights to 2",
      lambda self, routing: Routing(routing.topk_weights.clamp(max=2), routing.topk_ids),
      many)  # fmt: skip
wrong("ZeroWeightIsNaN", "Turns a weight of zero into NaN",
      lambda self, routing: Routing(
          routing.topk_weights * (routing.topk_weights / routing.topk_weights), routing.topk_ids
      ), many)  # fmt: skip
wrong("Within8", "Clamps x to +-8", lambda self, x_TH: x_TH.clamp(-8, 8), many)
wrong("Within100", "Clamps x to +-100", lambda self, x_TH: x_TH.clamp(-100, 100), many)
wrong("InFloat16", "Sends bfloat16 tokens as float16",
      lambda self, x_TH: x_TH if x_TH.dtype is torch.float32 else x_TH.half().to(x_TH.dtype),
      many)  # fmt: skip
wrong("NaNHidden", "Makes numbers of NaN", lambda self, x_TH: x_TH.nan_to_num(), many)
wrong("NaNSpreads", "Lets a NaN of one token reach others",
      lambda self, x_TH: x_TH + 0 * x_TH.sum(), many)  # fmt: skip
wrong("Columns4096", "Drops columns from 4096 on",
      lambda self, x_TH: torch.cat([x_TH[:, :4096], torch.zeros_like(x_TH[:, 4096:])], dim=1),
      killed_by("test_wide_rows", 4, says="tokens are wrong"))  # fmt: skip


@killed_by("test_batch_invariant", "float32", "none", 2, says="not batch-invariant")
@killed_by("test_batch_invariant", "float32", "none", 4, says="not batch-invariant", finalize=Naive)
def PartialSums(self, y, dispatched, out_TH):
    """Each rank sums its own rows, and rounded sums are added: K in the order of ranks."""
    if not self.problem.batch_invariant:
        return Naive.finalize(self, y, dispatched, out_TH)
    rows = y.new_empty((len(y), y.shape[2]))
    ids, weights = dispatched.topk_ids, dispatched.topk_weights
    weight_and_reduce(y.flatten(0, 1), ids, weights, rows)
    asked, self.problem = self.problem, self.problem.replace(batch_invariant=False)
    pending = Naive.finalize(self, rows, dispatched, out_TH)
    self.problem = asked
    return pending


@killed_by("test_batch_invariant", "float32", "none", 2, says="not batch-invariant")
@killed_by("test_batch_invariant", "float32", "none", 4, says="not batch-invariant")
class OrderOfRanks(Naive):
    """It sums K in the order of the ranks that hold the experts."""

    def _in_order_of_k(self, rows_GTN, routing, out_TH):
        ids, order = routing.topk_ids.sort(dim=1)
        rows = rows_GTN.unflatten(2, (ids.shape[1], out_TH.shape[1]))
        rows = rows.gather(2, order[None, :, :, None].expand_as(rows)).flatten(2)
        ascending = Routing(routing.topk_weights.gather(1, order), ids)
        return super()._in_order_of_k(rows, ascending, out_TH)
