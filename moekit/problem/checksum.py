"""A checksum of tensors that depends on neither the device nor the strides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_WORDS = 2**22  # words of 8 bytes that are read at once
# Odd constants; products of int64 wrap around.
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def checksum(tensors: Mapping[str, Tensor], more: str = "") -> str:
    """Return 16 hexadecimal digits of the names, dtypes, shapes and bits of ``tensors``."""
    parts = [
        (name, str(t.dtype), tuple(t.shape), _sum(t.detach()))
        for name, t in sorted(tensors.items())
    ]
    return hashlib.blake2b(repr((parts, more)).encode(), digest_size=8).hexdigest()


def _sum(tensor: Tensor) -> int:
    """Return the sum of all words of a tensor, each mixed with its position, modulo 2**64."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 8 * _WORDS):
        part = flat[start : start + 8 * _WORDS]
        words = F.pad(part, (0, -len(part) % 8)).view(torch.int64)
        place = torch.arange(start, start + len(words), device=flat.device)
        mixed = (words + place * _ODD[0]) * _ODD[1]
        mixed = (mixed ^ (mixed >> 31)) * _ODD[2]
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total)
