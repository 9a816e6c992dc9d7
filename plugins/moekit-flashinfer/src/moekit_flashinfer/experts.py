"""`flashinfer_cutlass`: the whole block, from permutation to weighted sum, in one library call.

    sort by expert -> copy rows -> GEMM 1 -> bias, activation (quantized) -> GEMM 2 -> bias, sum

GEMM 1 reads up rows before gate rows. The library skips ids outside [0, L), -1 included. A call
runs the kernels that FlashInfer's tuner holds for its sizes. Untuned sizes run the first kernel of
its list, which is far from the best, so call `FlashInferCutlassExperts.tuning` before you measure.
Some of its kernels add with atomics, in the output's dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from moekit_kernels.rows import quantize_activations, quantize_rows_per_tensor
from torch import Tensor

from moekit.plugin import (
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    PermuteExpertsUnpermute,
    round_up,
)

from . import library
from .kernels import dequantize_rows

_ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",  # becomes SwigluBias with its parameters
    "silu_no_mul": "Silu",
    "relu2": "Relu2",
}

# Bounds for the tensor maps of each SM, and for the pointers and strides of each expert.
_GEMM_WORKSPACE = 1 << 20
_PER_EXPERT = 1024

# The library's runner and tuner keep state between calls, so one thread at a time calls them.
_lock = threading.Lock()


class FlashInferCutlassExperts(PermuteExpertsUnpermute):
    """STANDARD, reducing.

    fp8_block: the library takes bf16 and quantizes itself, so tokens that arrive quantized are
    dequantized first; quantizing them again gives the same values. fp8_tensor_static: the library
    takes fp8, so tokens that arrive unquantized are quantized first.
    """

    quantizer = staticmethod(quantize_activations)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._core: Any = library.fused_moe()
        self._block = problem.quant.name == "fp8_block"
        self._static = problem.quant.name == "fp8_tensor_static"
        self._activation = self._core.ActivationType[_ACTIVATIONS[problem.activation.name]]

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Put up before gate in w13, its bias and its block scales.

        Values that the activation and the scheme need are added, one per expert.
        """
        experts, shared = weights.by_expert()
        for name in ("w13", "w13_bias", "w13_scale"):
            if name in experts and self.problem.activation.gated and experts[name].shape[1] > 1:
                gate, up = experts[name].chunk(2, dim=1)
                experts[name] = torch.empty_like(experts[name])  # cat has no fp8 under autocast
                experts[name][:, : up.shape[1]], experts[name][:, up.shape[1] :] = up, gate
        if self._static:
            a1, a2 = shared["a1_scale"].view(()), shared.pop("a2_scale").view(())
            experts["w13_dequant"] = experts.pop("w13_scale").flatten() * a1
            experts["w2_dequant"] = experts.pop("w2_scale").flatten() * a2
            shared["a2_quant"] = a2.reciprocal()
        for name, value in self._parameters().items():
            w13 = experts["w13"]
            experts[name] = w13.new_full((len(w13),), value, dtype=torch.float32)
        return PackedWeights(self.spec.name, experts, shared)

    def _parameters(self) -> dict[str, float]:
        """Return the parameters of gate * sigmoid(alpha * gate) * (up + beta), clamped to limit."""
        activation = self.problem.activation
        found = {} if activation.limit is None else {"swiglu_limit": activation.limit}
        if activation.alpha is not None:
            found |= {"swiglu_alpha": activation.alpha, "swiglu_beta": 1.0}
        return found

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        """Reserve room for x where it arrives in another form than the library takes."""
        operand, shape = self.problem.quant.activation, (rows, self.problem.hidden_size)
        if operand is None:
            return ()
        return (BufferSpec(shape, self.problem.dtype if self._block else operand.torch_dtype),)

    def transient_bytes(self, rows: int) -> int:
        """Return what the library allocates, and the bytes of ids as int32.

        In fp8_block the library's workspace never shrinks, so its largest call so far counts.
        """
        return experts_transient(self.problem, rows) + rows * self.problem.top_k * 4

    def tuning(self) -> AbstractContextManager[object]:
        """Time the library's kernels in the calls of a ``with`` block; later calls use the fastest.

        Sizes up to 8192 rows are tuned, once per shape and process, in seconds to minutes.
        """
        # In blocks of fp8 the library chooses one kernel per size, not by time.
        return nullcontext() if self._block else library.autotune()

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        x = self._input(tokens, weights, workspace)
        with _lock:
            self._core.cutlass_fused_moe(
                x, tokens.topk_ids.to(torch.int32).contiguous(), tokens.topk_weights.contiguous(),
                weights["w13"], weights["w2"], self.problem.dtype,
                quant_scales=self._scales(weights),
                fc1_expert_biases=weights.get("w13_bias"),
                fc2_expert_biases=weights.get("w2_bias"),
                output=y,
                use_deepseek_fp8_block_scale=self._block,
                activation_type=self._activation,
                **{name: weights[name] for name in self._parameters()},
            )  # fmt: skip

    def _input(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Tensor:
        x_RH = tokens.x
        if self._static and tokens.x_scale is None:
            (q,) = workspace
            quantize_rows_per_tensor(x_RH, q, weights.shared["a1_scale"], scratch=None)
            return q
        if self._block and tokens.x_scale is not None:
            (wide,) = workspace
            assert tokens.topk_ids is not None
            dequantize_rows(x_RH, tokens.x_scale, tokens.topk_ids, wide)
            return wide
        return x_RH

    def _scales(self, weights: PackedWeights) -> list[Tensor]:
        if self._static:
            a1, a2_quant = weights.shared["a1_scale"].view(()), weights.shared["a2_quant"]
            return [weights["w13_dequant"], a2_quant, weights["w2_dequant"], a1]
        return [weights["w13_scale"], weights["w2_scale"]] if self._block else []


def experts_transient(problem: MoEProblem, rows: int) -> int:
    """Return what one call of the fused MoE allocates for ``rows`` rows of top_k assignments."""
    if not rows:
        return 0
    p, L, pairs = problem, problem.num_local_experts, rows * problem.top_k
    block = p.quant.name == "fp8_block"
    out = p.dtype.itemsize
    a = 1 if p.quant.activation is not None and not block else out
    hidden, inner = pairs * p.hidden_size, pairs * p.local_intermediate_size
    # GEMM 1 and the activation have separate outputs where there is a gate or a quantization.
    apart = p.activation.gated or a != out or block
    first = max(hidden * a, hidden * out, inner * a if apart else 0)
    second = max(pairs * p.w13_rows * out, hidden * out) if apart else inner * a
    quantized = [_quantized(pairs, k, L) for k in (p.hidden_size, p.local_intermediate_size)]
    parts = (
        *[4 * pairs] * 4,  # two maps, experts in order, router weights in order
        *[4 * L * -(-rows // 32)] * 2,  # token blocks of the counting sort, at most
        4 * L * rows,
        8 * (L + 1),
        first,
        second,
        _PER_EXPERT * L,
        _GEMM_WORKSPACE,
        4 * L * rows,  # for another mode, but allocated in this one as well
        max(quantized) if block else 0,
    )
    return sum(round_up(part, 128) for part in parts)


def _quantized(pairs: int, k: int, experts: int) -> int:
    """Return the bytes of a GEMM's fp8 input and its scales, padded expert by expert."""
    padded = (pairs + experts * 31) // 32 * 32
    return round_up(pairs, 4) * k + 4 * padded * -(-k // 128)
