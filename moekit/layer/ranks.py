"""The ranks of a layer: how tensor, data and expert parallelism flatten, where experts go, and what
ranks exchange besides the tokens that dispatchers move.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import GroupMismatch, InvalidInput, InvalidProblem
from moekit.problem import MoEProblem, ParallelConfig
from moekit.problem.placement import Placement
from moekit.runtime.group import has_backend, resolve
from moekit.runtime.workspace import is_capturing
from moekit.untrusted.arguments import FLAG, MAX_RANKS, accept, size

PLACEMENTS = ("linear", "round_robin")
_KINDS = {
    "tp_size": size(1, MAX_RANKS),
    "dp_size": size(1, MAX_RANKS),
    "rank": size(0, MAX_RANKS),
    "enable_expert_parallel": FLAG,
}


def parallel_config(
    tp_size: int = 1, dp_size: int = 1, rank: int = 0, enable_expert_parallel: bool = False
) -> ParallelConfig:
    """The field's flattening of ``dp_size * tp_size`` ranks, rank = dp_rank * tp_size + tp_rank.

    Ranks of one dp_rank hold the same tokens. With expert parallelism every rank holds a share of
    the experts, whole; without, a slice of every expert: ep_size, or else tp_size, is
    dp_size * tp_size. Tokens move where dp_size > 1.
    """
    accept(_KINDS, locals())
    ranks = tp_size * dp_size
    if not 0 <= rank < ranks:
        raise InvalidProblem(
            f"rank={rank} with tp_size={tp_size} and dp_size={dp_size}: want a rank in [0, {ranks})"
        )
    if enable_expert_parallel:
        return ParallelConfig(ep_size=ranks, ep_rank=rank, dp_size=dp_size)
    return ParallelConfig(tp_size=ranks, tp_rank=rank, dp_size=dp_size)


def config_of_group(
    group: dist.ProcessGroup | None, tp_size: int | None, dp_size: int, enable_expert_parallel: bool
) -> ParallelConfig:
    """`parallel_config` of this process in ``group`` (None: all), if there are several ranks.

    tp_size None: 1, or what dp_size leaves of a group that is given.
    """
    if group is None and (tp_size or 1) == dp_size == 1:
        return ParallelConfig()
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidProblem(
            f"tp_size={tp_size}, dp_size={dp_size}: the rank comes from torch.distributed, which "
            "is not initialized; initialize it, or pass parallel=parallel_config(..., rank=...)"
        )
    if tp_size is None:
        tp_size = 1 if group is None else max(1, group.size() // max(1, dp_size))
    return parallel_config(tp_size, dp_size, dist.get_rank(group), enable_expert_parallel)


def place(problem: MoEProblem, strategy: str) -> Placement:
    """Which logical expert each physical slot holds at first.

    linear: contiguous shares, then the replicas. round_robin: expert e on rank e % ep_size. Either
    way the first ranks get the remainder.
    """
    if strategy == "linear":
        return Placement.default(problem)
    if problem.num_redundant_experts:
        raise InvalidProblem(
            "expert_placement_strategy='round_robin' places no replicas: with "
            f"num_redundant_experts={problem.num_redundant_experts} use 'linear'"
        )
    experts, ranks = problem.num_experts, problem.parallel.ep_size
    held = tuple(expert for rank in range(ranks) for expert in range(rank, experts, ranks))
    return Placement(held, experts, ranks)


class LayerRanks:
    """What the ranks of one layer exchange around its kernel.

    tokens: the ParallelConfig as the layer's caller has its tokens; ``problem.parallel`` is as the
    kernel has them: ``splits`` (sequence parallel) gives each rank its own share of the tokens
    that it would have in common with others. common: what else ranks must agree on.
    timeout: seconds to wait for a rank.

    Collective over the layer's ranks where they exchange anything. Raises GroupMismatch on all.
    """

    def __init__(
        self,
        problem: MoEProblem,
        tokens: ParallelConfig,
        group: dist.ProcessGroup | None,
        *,
        reduces: bool,
        splits: bool,
        common: str,
        timeout: float,
    ) -> None:
        parallel = problem.parallel
        self.size = parallel.ep_size * parallel.tp_size
        self.rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
        if self.size % tokens.dp_size:
            raise InvalidProblem(
                f"{self.size} ranks do not divide into dp_size={tokens.dp_size} batches of tokens"
            )
        # Consecutive ranks that hold the same tokens.
        self.copies = self.size // tokens.dp_size
        self.moves, self.splits = parallel.moves_tokens, splits and self.copies > 1
        self.sums = reduces and self.size > 1 and not self.moves
        self._capacity = problem.max_num_tokens
        self._device = problem.device.type
        self.group: dist.ProcessGroup | None = None
        if self.size == 1 or not (self.moves or self.sums or group is not None):
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise GroupMismatch(
                f"a layer over {self.size} ranks exchanges tokens or sums, but torch.distributed "
                "is not initialized: call torch.distributed.init_process_group first, or take "
                "partial sums (dp_size=1, reduce_results=False)"
            )
        self.group = group or dist.group.WORLD
        assert self.group is not None
        resolve(problem, self.group, common, timeout)
        self._on_host = has_backend(self.group, "cpu")

    def num_chunks(self, tokens: int, most: int | None) -> int:
        """Calls of at most ``max_num_tokens`` that all ranks make, this one for ``tokens``.

        most: the most tokens of any rank, where the caller knows it; else, where tokens move,
        ranks ask each other, over the host if the group has a CPU backend.
        """
        if self._capacity is None:
            return 1
        mine = max(1, -(-tokens // self._capacity))
        if not self.moves:
            return mine
        if most is not None:
            most = -(-most // self.copies) if self.splits else most
            return max(1, -(-most // self._capacity))
        assert self.group is not None
        if not self._on_host and is_capturing(torch.device(self._device)):
            raise InvalidInput(
                "ranks must agree on the number of chunks, which a graph being captured cannot "
                "wait for: pass max_tokens, the most tokens of any rank, or give the process "
                "group a CPU backend ('cpu:gloo,cuda:nccl')"
            )
        count = torch.tensor(mine, device="cpu" if self._on_host else self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX, self.group)
        return int(count)

    def share(self, tokens: int) -> slice:
        """This rank's tokens of ``tokens`` that several ranks have in common."""
        if not self.splits:
            return slice(0, tokens)
        each, at = -(-tokens // self.copies), self.rank % self.copies
        return slice(min(at * each, tokens), min((at + 1) * each, tokens))

    def gather(self, mine: Tensor, tokens: int) -> Tensor:
        """(T, H) of ``tokens`` rows from each rank's `share` of them."""
        each = -(-tokens // self.copies)
        mine = _padded(mine, each)
        return self._exchange(mine.repeat(self.copies, 1)).flatten(0, 1)[:tokens]

    def sum_all(self, out_TH: Tensor) -> None:
        """In place, over the layer's ranks, where nothing moved and the sum was asked for."""
        if self.sums and out_TH.numel():
            dist.all_reduce(out_TH, group=self.group)

    def sum_batch(self, part_TH: Tensor) -> Tensor:
        """The sum over the ranks that hold these tokens, in fp32 and in order of ranks."""
        tokens, each = part_TH.shape[0], -(-part_TH.shape[0] // self.copies)
        if self.copies == 1:
            return part_TH
        parts = self._exchange(_padded(part_TH, self.copies * each))
        return self.gather(parts.float().sum(dim=0).to(part_TH.dtype), tokens)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Rows in equal blocks, one for each rank that holds these tokens, in order; what those
        ranks sent here: (copies, rows / copies, H).

        In the layer's group: another one would have to be made by ranks outside it, too.
        """
        each, first = len(rows) // self.copies, self.rank - self.rank % self.copies
        peers = range(first, first + self.copies)
        splits = [each * (rank in peers) for rank in range(self.size)]
        received = torch.empty_like(rows)
        # Ranks of other batches take part, so this one does even if it has nothing to send.
        dist.all_to_all_single(
            received.view(torch.uint8), rows.view(torch.uint8), splits, splits, self.group
        )
        return received.view(self.copies, each, rows.shape[1])


def _padded(rows: Tensor, count: int) -> Tensor:
    """``rows`` (N, H), followed by zeros up to ``count`` rows; contiguous."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((count - len(rows), rows.shape[1]))])
