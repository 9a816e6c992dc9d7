"""The user's record of how a layer is spread over ranks, and what it means for each rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from moekit.errors import InvalidProblem
from moekit.problem import ParallelConfig


def parallel_config(
    tp_size: int = 1, dp_size: int = 1, rank: int = 0, enable_expert_parallel: bool = False
) -> ParallelConfig:
    """Flatten ``dp_size * tp_size`` ranks into one layer's ParallelConfig, as vLLM does.

    The ranks of one ``dp_rank`` hold the same tokens, and tokens move where ``dp_size > 1``.

    Args:
        tp_size: Tensor-parallel ranks of each token batch.
        dp_size: Number of token batches.
        rank: This rank, ``dp_rank * tp_size + tp_rank``.
        enable_expert_parallel: Give each rank whole experts (ep_size is dp_size * tp_size).
            Otherwise each rank holds a slice of every expert (tp_size is dp_size * tp_size).

    Raises:
        InvalidProblem: A value is out of range.
    """
    ranks = tp_size * dp_size
    if not 0 <= rank < ranks:
        raise InvalidProblem(
            f"rank must be in [0, {ranks}) with tp_size={tp_size} and dp_size={dp_size} "
            f"(got rank={rank})"
        )
    if enable_expert_parallel:
        return ParallelConfig(ep_size=ranks, ep_rank=rank, dp_size=dp_size)
    return ParallelConfig(tp_size=ranks, tp_rank=rank, dp_size=dp_size)


@dataclass(frozen=True, kw_only=True)
class LayerParallelism:
    """Settings that spread a `FusedMoE` layer over ranks.

    Args:
        tp_size: Tensor-parallel ranks; see `parallel_config`. None: ``group.size() / dp_size`` if
            a group is given, else 1.
        dp_size: Number of token batches that the ranks hold.
        enable_expert_parallel: Give each rank whole experts.
        parallel: Any other split, in place of the three arguments above.
        group: The process group of the layer's ranks. None: all ranks.
        is_sequence_parallel: Ranks that hold the same tokens each dispatch a share of them and
            gather the results.
        expert_placement_strategy: "linear" for contiguous shares, or "round_robin" for expert e
            on rank ``e % ep_size``.
        num_redundant_experts: Replicas beyond one of each expert, as in `MoEProblem`.
        reduce_results: Sum the ranks' outputs where no tokens move. If False, the caller sums.

    Raises:
        InvalidProblem: ``parallel`` is given with a size.
    """

    tp_size: int | None = None
    dp_size: int = 1
    enable_expert_parallel: bool = False
    parallel: ParallelConfig | None = None
    group: dist.ProcessGroup | None = None
    is_sequence_parallel: bool = False
    expert_placement_strategy: str = "linear"
    num_redundant_experts: int = 0
    reduce_results: bool = True

    def __post_init__(self) -> None:
        sizes = (self.tp_size, self.dp_size, self.enable_expert_parallel)
        if self.parallel is not None and sizes != (None, 1, False):
            raise InvalidProblem(
                "parallel is given, so tp_size, dp_size and enable_expert_parallel must not be"
            )

    def config(self) -> ParallelConfig:
        """Return the ParallelConfig of this process, whose rank torch.distributed knows."""
        group, tp_size, dp_size = self.group, self.tp_size, self.dp_size
        if self.parallel is not None:
            return self.parallel
        if group is None and (tp_size or 1) == dp_size == 1:
            return ParallelConfig()
        if tp_size is None:
            tp_size = 1 if group is None else max(1, group.size() // dp_size)
        rank = dist.get_rank(group)
        return parallel_config(tp_size, dp_size, rank, self.enable_expert_parallel)
