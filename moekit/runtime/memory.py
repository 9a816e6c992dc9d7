"""How many bytes a composed kernel needs."""

from __future__ import annotations

from dataclasses import dataclass

from moekit.contract import PermuteExpertsUnpermute, PrepareAndFinalize, offers_output, output_dtype
from moekit.problem import ActivationFormat
from moekit.runtime.workspace import Workspace


@dataclass(frozen=True)
class MemoryReport:
    """Bytes a kernel needs besides its weights and the caller's own tensors.

    workspace: the arena, which all layers share; intermediate: the experts' output and other
    tensors allocated per call; buffers: what the dispatcher keeps. Calls that run at one time, on
    several threads or streams, need workspace and intermediate each.
    """

    num_tokens: int
    workspace: int
    intermediate: int
    buffers: int

    @classmethod
    def of(
        cls, dispatcher: PrepareAndFinalize, experts: PermuteExpertsUnpermute, num_tokens: int
    ) -> MemoryReport:
        """Of a kernel of these two when every rank passes ``num_tokens``."""
        p, batched = experts.problem, experts.spec.format is ActivationFormat.BATCHED
        rows = dispatcher.max_rows(num_tokens)
        output_bytes = p.hidden_size * output_dtype(p, experts.spec, dispatcher.spec).itemsize
        slab = rows * p.num_local_experts if batched else rows
        # The experts write where the dispatcher reads, if it gives a place, or the caller's output
        # where nothing moves and rows are tokens.
        stays = not dispatcher.spec.moves_tokens and not batched and rows == num_tokens
        row_bytes = output_bytes if batched else p.hidden_size * p.dtype.itemsize
        intermediate = 0 if offers_output(dispatcher) or stays else slab * row_bytes
        if not batched and not experts.spec.reduces:
            # y_RKH, and weight_and_reduce's fp32 sum with its two temporaries
            intermediate += rows * p.top_k * output_bytes + 3 * rows * p.hidden_size * 4
        if p.quant.activation is not None:
            # the quantized copy of the rows, and fp32 on the way to it
            intermediate += slab * p.hidden_size * 10
        return cls(
            num_tokens=num_tokens,
            workspace=Workspace.nbytes_for(experts.workspace(rows)),
            intermediate=intermediate
            + dispatcher.transient_bytes(num_tokens)
            + experts.transient_bytes(rows),
            buffers=dispatcher.buffer_bytes(),
        )

    @property
    def total(self) -> int:
        return self.workspace + self.intermediate + self.buffers
