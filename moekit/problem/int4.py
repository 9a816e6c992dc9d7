"""Conversion of int4 values from a checkpoint's 32-bit words to the form of `moekit.problem.quant`.

Leading dimensions, for example experts, may be present everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The nibble of a word that holds each of its eight values, counted from the lowest.
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_rows(words: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """Unpack int32 (..., n, c), whose words hold eight rows' values, to uint8 (..., 8 n, c).

    order: the nibble of each of the eight rows.
    """
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device).view(-1, 1) * 4
    return ((words.unsqueeze(-2) >> shifts) & 15).to(torch.uint8).flatten(-3, -2)


def repack_rows(words: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """Return ``pack_int4(unpack_rows(words, order))`` in one step.

    words: contiguous int32 (..., n, K) with an even K; the result is uint8 (..., 8 n, K / 2).
    """
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
