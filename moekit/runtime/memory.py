"""The bytes that a composed kernel needs."""

from __future__ import annotations

from dataclasses import dataclass

from moekit.contract import (
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
)
from moekit.contract.sizes import size_text
from moekit.contract.sums import BY_EXPERTS, Sums, output_dtype
from moekit.problem import ActivationFormat
from moekit.runtime.workspace import Workspace


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes that a kernel needs in addition to its weights and the caller's own tensors.

    Calls that run at the same time, on several threads or streams, each need workspace and
    intermediate.

    num_tokens: tokens that every rank passes.
    workspace: the arena, which all layers share.
    intermediate: the experts' output and other tensors that each call allocates.
    buffers: memory that the dispatcher keeps between calls.
    """

    num_tokens: int
    workspace: int
    intermediate: int
    buffers: int

    @classmethod
    def of(
        cls, dispatcher: PrepareAndFinalize, experts: PermuteExpertsUnpermute, num_tokens: int
    ) -> MemoryReport:
        """Return the report for these two when every rank passes ``num_tokens`` tokens.

        Of a composite's members, any may serve these calls, and each keeps its buffers.
        """
        if len(dispatcher.members) > 1:
            every = [cls.of(member, experts, num_tokens) for member in dispatcher.members]
            workspace = max(each.workspace for each in every)
            intermediate = max(each.intermediate for each in every)
            return cls(num_tokens, workspace, intermediate, sum(each.buffers for each in every))
        p, batched = experts.problem, experts.spec.format is ActivationFormat.BATCHED
        rows = dispatcher.max_rows(num_tokens)
        output_bytes = p.hidden_size * output_dtype(p, experts.spec, dispatcher.spec).itemsize
        all_rows = rows * p.num_local_experts if batched else rows
        sums = Sums.of(p, experts.spec)
        by_assignment = not batched and sums not in BY_EXPERTS
        # The experts write to the dispatcher's memory if it offers some, or to the caller's output
        # where nothing moves and rows are tokens.
        if dispatcher.spec.moves_tokens and not experts.spec.fused:
            offered = type(dispatcher).output is not PrepareAndFinalize.output
        else:
            offered = not batched and rows == num_tokens
        intermediate = 0
        if not (offered or (by_assignment and sums is Sums.BY_DISPATCHER)):
            intermediate = all_rows * (
                output_bytes if batched else p.hidden_size * p.dtype.itemsize
            )
        if by_assignment:
            # y_RKH, and weight_and_reduce's fp32 sum with its two temporaries
            intermediate += rows * p.top_k * output_bytes + 3 * rows * p.hidden_size * 4
        if p.quant.activation is not None:
            # the quantized copy of the rows, and the fp32 values that it is made from
            intermediate += all_rows * p.hidden_size * 10
        return cls(
            num_tokens=num_tokens,
            workspace=Workspace.nbytes_for(experts.workspace(rows)),
            intermediate=intermediate
            + experts.transient_bytes(rows)
            + (0 if experts.spec.fused else dispatcher.transient_bytes(num_tokens)),
            buffers=dispatcher.buffer_bytes(),
        )

    def __repr__(self) -> str:
        parts = ("workspace", "intermediate", "buffers", "total")
        sizes = ", ".join(f"{name} {size_text(getattr(self, name))}" for name in parts)
        return f"MemoryReport({self.num_tokens} tokens: {sizes})"

    @property
    def total(self) -> int:
        """All of these bytes."""
        return self.workspace + self.intermediate + self.buffers
