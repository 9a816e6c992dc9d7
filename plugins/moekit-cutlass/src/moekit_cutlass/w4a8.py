"""Pack int4 weights for `cutlass_w4a8_moe_mm` of vLLM's library.

The operator multiplies e4m3 by e4m3. It looks up every weight in a table of its group's eight
values, of -8 to -1 (positive weights flip the sign, and 0 needs no entry), and multiplies the
sums by a scale per channel. The library's `cutlass_pack_scale_fp8` makes tables from e4m3 scales
and so rounds twice. Here entries are rounded once, from the true scale, and of `PHASES` channel
scales within a factor of two the one with the most exact tables is used.

| relative RMS | this module | the library |
|---|---|---|
| Gaussian weights, 4 and 32 groups per channel | 1.8e-2, 2.4e-2 | 3.1e-2, 3.4e-2 |
| whole block, H 512 and 2048 | 5.0e-2, 5.9e-2 | 7.0e-2, 7.2e-2 |
| of which e4m3 activations | 4.2e-2, 4.5e-2 | |
"""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.plugin import ExpertWeights, MoEProblem, PackedWeights

from . import providers

PHASES = 16
_E4M3 = torch.float8_e4m3fn
_ZEROS = 0x88  # two columns' zero point: offset binary to two's complement, and back


def pack(weights: ExpertWeights, problem: MoEProblem, backend: str) -> PackedWeights:
    """Return, per GEMM, weights int32 (L, N, K / 8) in the library's order, ``_table`` e4m3
    (L, K / 128, N, 8), ``_scale`` fp32 (L, N), ``_layout`` int32 (L, few), and the biases.

    Raises WeightsError if the weights are not on the GPU, where the operator runs that orders them.
    """
    experts: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        values: Tensor = getattr(weights, name)
        if values.device.type != problem.device.type:
            raise WeightsError(
                f"{name} is on {values.device}, but int4 weights are packed by an operator on "
                f"{problem.device.type}: pack weights.to({problem.device.type!r})"
            )
        experts[name], experts[f"{name}_layout"] = _reorder(values)
        scale_LNG: Tensor = getattr(weights, f"{name}_scale")
        L, N, G = scale_LNG.shape
        table = torch.empty((L, G, N, 8), dtype=_E4M3, device=values.device)
        channel = torch.empty((L, N), dtype=torch.float32, device=values.device)
        for expert, scale_NG in enumerate(scale_LNG):
            table_NG8, channel[expert] = tables(scale_NG)
            table[expert].copy_(table_NG8.transpose(0, 1))
        experts[f"{name}_table"], experts[f"{name}_scale"] = table, channel
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            experts[f"{name}_bias"] = bias.contiguous()
    return PackedWeights(backend, experts)


def tables(scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return tables for scales (N, G) fp32.

    Returns:
        e4m3 (N, G, 8), the values of -8 to -1 in units of the channel's scale, and that scale,
        fp32 (N,).
    """
    exact = scale_NG[:, :, None] * torch.arange(-8.0, 0.0, device=scale_NG.device)
    smallest_N = exact.abs().amax(dim=(1, 2)) / torch.finfo(_E4M3).max

    def rounded(channel_N: Tensor) -> Tensor:
        return (exact / channel_N[:, None, None]).to(_E4M3)

    errors = []
    for phase in range(PHASES):
        channel_N = smallest_N * 2 ** (phase / PHASES)
        difference = rounded(channel_N).float() * channel_N[:, None, None] - exact
        errors.append(difference.square().sum(dim=(1, 2)))
    best_N = torch.stack(errors).argmin(dim=0)
    channel_N = smallest_N * torch.exp2(best_N / PHASES)
    return rounded(channel_N), channel_N


def _reorder(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operator's b_tensors and b_strides for uint8 (L, N, K / 2)."""
    reorder = providers.vllm_operator("cutlass_encode_and_reorder_int4b_grouped")
    words = (values ^ _ZEROS).view(torch.int32)
    if not words.is_cuda:
        ordered, layout = reorder(words)
        return ordered, layout
    with torch.cuda.device(words.device):
        torch.cuda.synchronize()  # the library uses the default stream
        ordered, layout = reorder(words)
        torch.cuda.synchronize()
    return ordered, layout
