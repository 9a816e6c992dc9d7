"""int4 weights as checkpoints pack them -> the form of `moekit.quant` (see its docstring).

Sizes of one expert's Linear: N outputs, K inputs, G groups along K. Leading dimensions (experts)
may be present everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.quant import pack_int4

Int4 = tuple[Tensor, "Tensor | None"]

# AWQ stores column i of each 8 in nibble _AWQ_NIBBLE[i].
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


def from_gptq(qweight: Tensor, qzeros: Tensor | None = None, *, offset: int = 1) -> Int4:
    """qweight int32 (K / 8, N), qzeros int32 (G, N / 8) -> weight (N, K / 2), zeros (N, G), uint8.

    The scales (G, N) need only be transposed, g_idx (K,) is taken as it is. ``offset``: GPTQ's
    first format stores zero points less one (AutoGPTQ's ``checkpoint_format: gptq``; 0 for
    gptq_v2). A symmetric checkpoint's zeros are all 8: leave them out.
    """
    weight = _nibbles(qweight.mT, "qweight")
    if qzeros is None:
        return pack_int4(weight), None
    zeros = _nibbles(qzeros, "qzeros") + offset
    return pack_int4(weight), (zeros & 15).mT.contiguous()


def from_awq(qweight: Tensor, qzeros: Tensor) -> Int4:
    """qweight int32 (K, N / 8), qzeros int32 (G, N / 8) -> weight (N, K / 2), zeros (N, G).

    The scales (G, N) need only be transposed.
    """

    def columns(t: Tensor, name: str) -> Tensor:
        nibbles = torch.unflatten(_nibbles(t, name), -1, (-1, 8))
        return torch.flatten(nibbles[..., list(_AWQ_NIBBLE)], -2)

    weight = columns(qweight, "qweight").mT.contiguous()
    return pack_int4(weight), columns(qzeros, "qzeros").mT.contiguous()


def from_compressed_tensors(packed: Tensor, zeros: Tensor | None = None) -> Int4:
    """weight_packed int32 (N, K / 8), weight_zero_point int32 (N / 8, G) -> weight (N, K / 2),
    zeros (N, G), uint8. The scales (N, G) are taken as they are."""
    weight = pack_int4(_nibbles(packed, "weight_packed"))
    if zeros is None:
        return weight, None
    return weight, _nibbles(zeros.mT, "weight_zero_point").mT.contiguous()


def _nibbles(words: Tensor, name: str) -> Tensor:
    """int32 (..., n) -> uint8 (..., 8 n), the lowest bits first."""
    if words.dtype != torch.int32:
        raise WeightsError(f"{name} is {words.dtype}, want torch.int32 holding eight 4-bit values")
    values = words.contiguous().view(torch.uint8)
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
