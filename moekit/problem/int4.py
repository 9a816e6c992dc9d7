"""int4 weights as checkpoints pack them -> the form of `moekit.problem.quant` (see its docstring).

Sizes of one expert's Linear: N outputs, K inputs, G groups along K. Leading dimensions (experts)
may be present everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.errors import WeightsError

Int4 = tuple[Tensor, "Tensor | None"]

# Where a word holds the values 0, 1, 2 ... of its eight.
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def from_gptq(qweight: Tensor, qzeros: Tensor | None = None, *, offset: int = 1) -> Int4:
    """qweight int32 (K / 8, N), qzeros int32 (G, N / 8) -> weight (N, K / 2), zeros (N, G), uint8.

    The scales (G, N) need only be transposed, g_idx (K,) is taken as it is. ``offset``: GPTQ's
    first format stores zero points less one (AutoGPTQ's ``checkpoint_format: gptq``; 0 for
    gptq_v2). A symmetric checkpoint's zeros are all 8: leave them out.
    """
    weight = _words(qweight, "qweight").mT.contiguous().view(torch.uint8)
    if qzeros is None:
        return weight, None
    zeros = unpack_rows(_words(qzeros, "qzeros").mT) + offset
    return weight, zeros & 15


def from_awq(qweight: Tensor, qzeros: Tensor) -> Int4:
    """qweight int32 (K, N / 8), qzeros int32 (G, N / 8) -> weight (N, K / 2), zeros (N, G).

    The scales (G, N) need only be transposed.
    """
    weight = repack_rows(_words(qweight, "qweight").mT.contiguous(), AWQ_ORDER)
    return weight, unpack_rows(_words(qzeros, "qzeros").mT, AWQ_ORDER)


def from_compressed_tensors(packed: Tensor, zeros: Tensor | None = None) -> Int4:
    """weight_packed int32 (N, K / 8), weight_zero_point int32 (N / 8, G) -> weight (N, K / 2),
    zeros (N, G), uint8. The scales (N, G) are taken as they are."""
    weight = _words(packed, "weight_packed").contiguous().view(torch.uint8)
    if zeros is None:
        return weight, None
    return weight, unpack_rows(_words(zeros, "weight_zero_point"))


def unpack_rows(words: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """int32 (..., n, c), eight rows' values in a word -> uint8 (..., 8 n, c).

    order[i]: the nibble, counted from the lowest, that holds row i of the eight.
    """
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device).view(-1, 1) * 4
    return ((words.unsqueeze(-2) >> shifts) & 15).to(torch.uint8).flatten(-3, -2)


def repack_rows(words: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """`unpack_rows` of contiguous words and `pack_int4` of that, at once: int32 (..., n, K), K
    even -> uint8 (..., 8 n, K / 2)."""
    even, odd = words[..., 0::2], words[..., 1::2]
    nibble, upper = 0x0F0F0F0F, -0x0F0F0F10  # the lower nibbles of four bytes, the upper ones
    # Bytes of a word of these: two columns' values of four of the eight rows.
    of = (
        ((even & nibble) | (odd & nibble) << 4).view(torch.uint8),
        ((even >> 4) & nibble | (odd & upper)).view(torch.uint8),
    )
    *lead, n, columns = even.shape
    out = torch.empty(*lead, n, 8, columns, dtype=torch.uint8, device=words.device)
    for row, place in enumerate(order):
        out[..., row, :] = of[place % 2][..., place // 2 :: 4]
    return out.flatten(-3, -2)


def _words(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype != torch.int32:
        raise WeightsError(f"{name} is {tensor.dtype}, want torch.int32 holding eight 4-bit values")
    return tensor
