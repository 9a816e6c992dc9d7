"""The `ktransformers` experts: STANDARD, reducing.

Shape suffixes: R rows, K slots of a row, L local experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.plugin import (
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    PermuteExpertsUnpermute,
)

from . import kinds, library
from .pool import MAX_ROWS, pool

library.load()  # here, so that a library that does not load is a backend that does not load


class KTransformersExperts(PermuteExpertsUnpermute):
    """Runs one of the library's MoE classes on its own threads.

    Packed weights are plain tensors in the library's input layout. The library's object for them
    is made at their first call, kept as long as they live, and loaded anew when they change.
    """

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        kind = kinds.chosen(problem.quant.name)
        assert kind is not None, "the spec's schemes have a class"
        self._kind = kind

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        experts, _ = weights.by_expert()
        for name in ("w13_scale", "w2_scale"):
            if name in experts:
                experts[name] = _stored(experts[name], self._kind.scales)
        return PackedWeights(self.spec.name, {n: _versioned(t) for n, t in experts.items()})

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        # x and the output contiguous, ids in int64, weights in fp32: only where they are not.
        return (
            BufferSpec((rows, p.hidden_size), p.dtype),
            BufferSpec((rows, p.hidden_size), p.dtype),
            BufferSpec((rows, p.top_k), torch.int64),
            BufferSpec((rows, p.top_k), torch.float32),
        )

    def transient_bytes(self, rows: int) -> int:
        """Return the bytes of the library's buffers (for all layers) and its copy of the weights.

        Both stay allocated between calls. Buffers of pages that no call touched cost nothing.
        """
        p = self.problem
        H, inner = p.hidden_size, p.local_intermediate_size
        slots = MAX_ROWS * p.top_k
        padded = slots + 32 * p.num_local_experts
        gathered = 2 * slots * (2 * H + 2 * inner)
        operands = padded * (2 * (H + inner) + 4 * (2 * inner + H) + 5 * 64)
        outputs = 2 * 4 * MAX_ROWS * H
        return gathered + operands + outputs + kinds.copied_bytes(p, self._kind)

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        rows = tokens.x.shape[0]
        if rows == 0:
            return
        x_buffer, y_buffer, ids_buffer, weights_buffer = workspace
        x_RH = _contiguous(tokens.x, x_buffer)
        ids_RK = _contiguous(tokens.topk_ids, ids_buffer)
        weights_RK = _contiguous(tokens.topk_weights, weights_buffer)
        out_RH = y if y.is_contiguous() else y_buffer[:rows]
        pool().run(self._kind, self.problem, weights.experts, x_RH, ids_RK, weights_RK, out_RH)
        if out_RH is not y:
            y.copy_(out_RH)


def _contiguous(given: Tensor, buffer: Tensor) -> Tensor:
    """Return ``given`` if it has the layout and dtype that the library reads, else a copy."""
    if given.is_contiguous() and given.dtype == buffer.dtype:
        return given
    flat = buffer.view(-1)[: math.prod(given.shape)].view(given.shape)
    return flat.copy_(given)


def _stored(scale: Tensor, scales: str) -> Tensor:
    if scales == "e8m0":
        return (torch.frexp(scale).exponent + 126).to(torch.uint8)
    return scale.to(getattr(torch, scales)).contiguous()


def _versioned(tensor: Tensor) -> Tensor:
    """Return a tensor that counts its changes, which one made in inference mode does not."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
