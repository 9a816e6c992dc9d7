"""Exchanges between the ranks of a layer, in addition to the tokens that its dispatcher moves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import GroupMismatch, InvalidInput
from moekit.layer.parallelism import LayerParallelism
from moekit.problem import MoEProblem, ParallelConfig
from moekit.runtime.group import has_backend, resolve
from moekit.runtime.workspace import is_capturing


class LayerRanks:
    """The collectives of one layer outside its kernel.

    Construction is collective over the layer's ranks where they exchange anything. It raises
    GroupMismatch on all ranks if the group does not fit or ranks differ.

    Args:
        problem: The kernel's problem. Under sequence parallelism its ``parallel`` counts each
            rank's share of the tokens as a batch.
        tokens: Describes the tokens as the layer's caller holds them.
        common: Further settings that must be equal on all ranks.
    """

    def __init__(
        self,
        problem: MoEProblem,
        tokens: ParallelConfig,
        parallelism: LayerParallelism,
        common: str,
        timeout: float,
    ) -> None:
        parallel = problem.parallel
        self.size, self.rank = parallel.num_ranks, parallel.rank
        # Number of consecutive ranks that hold the same tokens.
        self.copies = self.size // tokens.dp_size
        self.moves = parallel.moves_tokens
        self.splits = parallelism.is_sequence_parallel and self.copies > 1
        self.sums = parallelism.reduce_results and self.size > 1 and not self.moves
        self.capacity = problem.max_num_tokens
        self._device = problem.device.type
        self.group: dist.ProcessGroup | None = None
        group = parallelism.group
        if self.size == 1 or not (self.moves or self.sums or group is not None):
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise GroupMismatch(
                f"a layer over {self.size} ranks exchanges tokens or sums, but torch.distributed "
                "is not initialized: call torch.distributed.init_process_group first, or sum the "
                "outputs yourself (dp_size=1, reduce_results=False)"
            )
        self.group = group or dist.group.WORLD
        assert self.group is not None
        resolve(problem, self.group, common, timeout)
        self._on_host = has_backend(self.group, "cpu")

    @property
    def partial(self) -> bool:
        """Return whether outputs are partial sums, which the caller adds up over the ranks."""
        return self.size > 1 and not (self.moves or self.sums)

    def most_tokens(self, tokens: int, max_tokens: int | None) -> int | None:
        """Return the most tokens of any rank, or None if no rank needs to know.

        Where the kernel has a capacity and the caller does not know ``max_tokens``, the ranks agree
        by an all-reduce, on the host if the group has a CPU backend. Raises InvalidInput if the
        all-reduce would synchronize a CUDA graph that is being captured.
        """
        if not self.moves:
            return tokens
        if max_tokens is not None:
            return -(-max_tokens // self.copies) if self.splits else max_tokens
        if self.capacity is None:
            return None
        assert self.group is not None
        if not self._on_host and is_capturing(torch.device(self._device)):
            raise InvalidInput(
                "ranks must agree on the most tokens of any rank, and a graph being captured "
                "cannot wait for that: pass max_tokens, or give the process group a CPU backend "
                "('cpu:gloo,cuda:nccl')"
            )
        count = torch.tensor(tokens, device="cpu" if self._on_host else self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX, self.group)
        return int(count)

    def share(self, tokens: int) -> slice:
        """Return this rank's share of ``tokens`` that several ranks hold."""
        if not self.splits:
            return slice(0, tokens)
        each, at = -(-tokens // self.copies), self.rank % self.copies
        return slice(min(at * each, tokens), min((at + 1) * each, tokens))

    def gather(self, mine: Tensor, tokens: int) -> Tensor:
        """Return all ``tokens`` rows (tokens, H) from each rank's `share` of them.

        Uses the layer's group: creating a smaller one would involve ranks outside it.
        """
        each, first = -(-tokens // self.copies), self.rank - self.rank % self.copies
        filled = torch.cat([mine, mine.new_zeros((each - len(mine), mine.shape[1]))])
        sent = filled.repeat(self.copies, 1)
        splits = [each * (first <= rank < first + self.copies) for rank in range(self.size)]
        received = torch.empty_like(sent)
        # Collective over all ranks, so a rank takes part even if it has nothing to send.
        dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), splits, splits, self.group
        )
        return received[:tokens]

    def sum_all(self, out_TH: Tensor) -> None:
        """Sum ``out_TH`` in place over all ranks, if the layer is to do that."""
        if self.sums and out_TH.numel():
            dist.all_reduce(out_TH, group=self.group)
