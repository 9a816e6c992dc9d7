"""What happens to rows around DeepGEMM's GEMMs and is this plugin's own. Launches kernels.py.

Two layouts. STANDARD: pairs (row, slot) own a row of the padded layout each, `rows_S` says which
(-1: none). BATCHED: slab l holds rows l * slab + c, c < counts_L[l]. Rows that no pair owns are
neither read nor written here; the GEMMs compute on whatever lies there, but a row of a GEMM's
input reaches the same row of its output alone, so nothing of it is ever seen.

fp8 rows come with a scale per 128 columns, written as the GEMM reads it on Hopper: fp32, rows
innermost, (cols / 128, rows) of contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from moekit_kernels.numerics import INTERPRETED, Activation

from . import kernels

GROUP = 128
"""Columns that share a scale."""


@dataclass(frozen=True)
class Tiling:
    """How many programs share a row: each takes `groups` groups of 128 columns."""

    groups: int
    programs: int
    warps: int

    @classmethod
    def of(cls, rows: int, cols: int) -> Tiling:
        groups = triton.cdiv(cols, GROUP)
        most = 64 if INTERPRETED else 16 if rows >= 512 else 4
        mine = min(most, triton.next_power_of_2(groups))
        return cls(mine, triton.cdiv(groups, mine), max(1, mine // 4))


def stage_slabs(
    x_LCH: torch.Tensor,
    x_scale: torch.Tensor | None,
    counts_L: torch.Tensor,
    a_LCH: torch.Tensor,
    scale_LGC: torch.Tensor | None,
    *,
    scales_only: bool = False,
) -> None:
    """The used rows of each slab of x to a slab of at least as many rows.

    x: bf16, or fp8 with x_scale (L, C, H / 128) fp32 of any strides. a: fp8 with scale_LGC
    (L, H / 128, C'), or x's dtype without. scales_only: a is x, only the scales are moved.
    """
    L, slab, cols = x_LCH.shape
    assert x_LCH.stride(2) == 1 and a_LCH.is_contiguous()
    tiling = Tiling.of(slab, cols)
    x, a, mode = _mode(x_LCH, x_scale, a_LCH, scale_LGC)
    xs_strides = (0, 0, 0) if x_scale is None else x_scale.stride()
    kernels.stage_slabs[(L, _programs_per_slab(slab, L), tiling.programs)](
        x, x_scale, counts_L, a, scale_LGC, cols, x.stride(0), x.stride(1), *xs_strides,
        a.stride(0), a.stride(1), 0 if scale_LGC is None else scale_LGC.stride(0), _lead(scale_LGC),
        MODE="scales" if scales_only else mode, GROUP=GROUP, GROUPS=tiling.groups,
        num_warps=tiling.warps,
    )  # fmt: skip


def activate_pairs(
    h_MN: torch.Tensor,
    rows_S: torch.Tensor,
    ids_S: torch.Tensor,
    bias_LN: torch.Tensor | None,
    activation: Activation,
    a_MI: torch.Tensor,
    scale_GM: torch.Tensor | None,
) -> None:
    """h (M, 2I if gated else I) bf16, plus the bias of the pair's expert -> a (M, I), in fp32 in
    between. a: fp8 with scale_GM (I / 128, M), or bf16 without."""
    pairs, inner = rows_S.numel(), a_MI.shape[1]
    tiling = Tiling.of(pairs, inner)
    kernels.activate_pairs[(pairs, tiling.programs)](
        h_MN, bias_LN, rows_S, ids_S, a_MI, scale_GM, inner, h_MN.stride(0), a_MI.stride(0),
        _lead(scale_GM), activation.alpha, activation.limit or 0.0, **_flags(activation),
        HAS_BIAS=bias_LN is not None, QUANTIZE=scale_GM is not None, GROUP=GROUP,
        GROUPS=tiling.groups, num_warps=tiling.warps,
    )  # fmt: skip


def activate_slabs(
    h_LCN: torch.Tensor,
    counts_L: torch.Tensor,
    bias_LN: torch.Tensor | None,
    activation: Activation,
    a_LCI: torch.Tensor,
    scale_LGC: torch.Tensor | None,
) -> None:
    """`activate_pairs` for the used rows of slabs: h (L, C, N) -> a (L, C, I), scale (L, I / 128,
    C), all contiguous."""
    L, slab, inner = a_LCI.shape
    tiling = Tiling.of(slab, inner)
    kernels.activate_slabs[(L, _programs_per_slab(slab, L), tiling.programs)](
        h_LCN, bias_LN, counts_L, a_LCI, scale_LGC, slab, inner, h_LCN.stride(1), a_LCI.stride(1),
        0 if scale_LGC is None else scale_LGC.stride(0), _lead(scale_LGC),
        activation.alpha, activation.limit or 0.0, **_flags(activation),
        HAS_BIAS=bias_LN is not None, QUANTIZE=scale_LGC is not None, GROUP=GROUP,
        GROUPS=tiling.groups, num_warps=tiling.warps,
    )  # fmt: skip


def finish_slabs(
    y_LCH: torch.Tensor, counts_L: torch.Tensor, bias_LH: torch.Tensor | None, out_LCH: torch.Tensor
) -> None:
    """Used rows of y plus their expert's bias -> out, which may be y itself."""
    L, slab, cols = out_LCH.shape
    block = min(triton.next_power_of_2(cols), 1024)
    kernels.finish_slabs[(L, _programs_per_slab(slab, L), triton.cdiv(cols, block))](
        y_LCH, bias_LH, counts_L, out_LCH, cols, y_LCH.stride(0), y_LCH.stride(1),
        out_LCH.stride(0), out_LCH.stride(1),
        HAS_BIAS=bias_LH is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _mode(
    x: torch.Tensor, x_scale: torch.Tensor | None, a: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """What becomes of x; quantized values are moved as bytes."""
    assert x.stride(-1) == 1 and a.stride(-1) == 1 and x.shape[-1] == a.shape[-1]
    if x_scale is not None:
        assert scale is not None and x.dtype == a.dtype
        return x.view(torch.uint8), a.view(torch.uint8), "copy_scaled"
    if scale is not None:
        return x, a, "quantize"
    assert x.dtype == a.dtype
    return x, a, "copy"


def _lead(scale: torch.Tensor | None) -> int:
    """Entries between two groups' scales."""
    return 0 if scale is None else scale.stride(-2)


def _flags(activation: Activation) -> dict[str, str | bool]:
    clamp = activation.limit is not None
    return {"ACTIVATION": activation.name, "GATED": activation.gated, "CLAMP": clamp}


def _programs_per_slab(slab: int, num_experts: int) -> int:
    """Programs that share a slab's rows: enough to fill the device, fewer than rows nobody uses."""
    return min(slab, 2 if INTERPRETED else max(8, 2048 // num_experts))
