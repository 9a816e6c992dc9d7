"""The parallelism of one MoE layer."""

from __future__ import annotations

from dataclasses import dataclass

from moekit.errors import InvalidProblem
from moekit.untrusted.arguments import MAX_RANKS, accept_fields, size


def partition(total: int, size: int, rank: int) -> range:
    """Return a rank's contiguous share of ``total`` items; the first ranks get the remainder.

    Raises InvalidProblem unless 0 <= rank < size.
    """
    if not 0 <= rank < size:
        raise InvalidProblem(f"rank={rank} with size={size}: expected a rank in [0, {size})")
    share, extra = divmod(total, size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


_RANKS = {
    "ep_size": size(1, MAX_RANKS),
    "ep_rank": size(0, MAX_RANKS),
    "tp_size": size(1, MAX_RANKS),
    "tp_rank": size(0, MAX_RANKS),
    "dp_size": size(0, MAX_RANKS),
    "nodes": size(1, MAX_RANKS),
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The parallelism of one MoE layer, seen from one rank.

    A rank's place in the layer's process group is ``ep_rank * tp_size + tp_rank``.

    ep_size, ep_rank: the experts are split; each rank holds a contiguous share (`partition`).
    tp_size, tp_rank: the intermediate size of every expert is split.
    dp_size: the number of different batches of tokens that the ranks of the process group hold.
        The default is ``ep_size``: each expert-parallel rank has its own tokens, so tokens must
        move. With ``dp_size=1`` all ranks hold the same tokens: nothing moves, and every rank's
        output is a partial sum that the caller all-reduces. Otherwise every rank's output is
        complete, and if there are fewer batches than ranks, consecutive ranks share one.
    nodes: the hosts of these ranks, with equally many ranks each, in the order of their places.

    Raises InvalidProblem for values of another type, out of range, or that contradict each other.
    """

    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 0
    nodes: int = 1

    def __post_init__(self) -> None:
        accept_fields(self, _RANKS)
        for kind in ("ep", "tp"):
            most, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if rank >= most:
                raise InvalidProblem(
                    f"{kind}_rank={rank} with {kind}_size={most}: expected a rank in [0, {most})"
                )
        if self.num_ranks % self.nodes:
            raise InvalidProblem(
                f"nodes must divide the number of ranks, ep_size x tp_size (got {self.num_ranks} "
                f"ranks, {self.nodes} nodes)"
            )
        object.__setattr__(self, "dp_size", self.dp_size or self.ep_size)
        if self.num_ranks % self.dp_size:
            raise InvalidProblem(
                f"dp_size={self.dp_size} must divide the number of ranks, ep_size x tp_size "
                f"({self.num_ranks}): as many consecutive ranks hold each of the batches"
            )

    @property
    def num_ranks(self) -> int:
        """The size of the layer's process group."""
        return self.ep_size * self.tp_size

    @property
    def rank(self) -> int:
        """The place in the layer's process group."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def moves_tokens(self) -> bool:
        """True when ranks hold different tokens, so that a dispatcher must exchange them."""
        return self.dp_size > 1
