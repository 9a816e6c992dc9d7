"""The block formats of GGUF: their numbers by the gguf library, and the blocks that a scheme holds.

A block is a run of columns with its own scales: 32 of them, or 256 in the "K" types, whose scales
are quantized again. ggml-common.h and ggml-quants.c define the layouts in
https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.formats.format import Format, Part, scale_values
from moekit.formats.method import Matrix, Method
from moekit.problem.quantize import pack_int4


def dequantize(blocks: Tensor, name: str) -> Tensor:
    """Return the numbers of GGUF blocks as fp32.

    Args:
        blocks: uint8 (..., number of blocks, bytes of a block), on the CPU.
        name: ggml's name of the type, such as "Q4_K".

    Returns:
        (..., number of blocks x elements of a block).

    Raises:
        WeightsError: The installed gguf library cannot read the type.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    try:
        made = gguf.dequantize(blocks.flatten(-2).contiguous().numpy(), kind)
    except NotImplementedError as error:
        raise WeightsError(
            f"this version of the gguf library cannot read {name}: pip install -U gguf, "
            "or choose a file of another type"
        ) from error
    return torch.from_numpy(made)


@dataclass(frozen=True, kw_only=True)
class BlockFormat(Format):
    """GGUF blocks of one type, which hold weights and scales in one tensor.

    Blocks that a scheme of moekit holds, Q4_0, Q8_0 and MXFP4, have its ``dtype``. Others can only
    be dequantized.
    """

    block: str

    @property
    def packs_rows(self) -> bool:
        return True  # the stored form is never the core's

    def __str__(self) -> str:
        return self.name

    def core_weight(self, stored: Tensor) -> Tensor:
        """Return bytes (n, K / 2), or int8 (n, K), of blocks (n, k', bytes)."""
        q = stored.flatten(0, -2)[:, 1 if self.dtype == "float4_e2m1" else 2 :]
        q = (
            q.view(torch.int8)
            if self.dtype == "int8"
            else pack_int4(torch.cat((q & 15, q >> 4), 1))
        )
        return q.reshape(len(stored), -1)

    def core_scale(self, stored: Tensor, factor: Tensor | None) -> Tensor:
        """Return fp32 scales (n, k') of blocks."""
        if self.dtype == "float4_e2m1":
            return scale_values(stored[..., 0])
        return stored[..., :2].contiguous().view(torch.float16).squeeze(-1).float()


# Blocks that a scheme of moekit holds.
_COMPUTED: Mapping[str, dict[str, Any]] = {
    "MXFP4": {"dtype": "float4_e2m1", "scale_dtype": "float8_e8m0fnu"},
    "Q8_0": {"dtype": "int8"},
    "Q4_0": {"dtype": "int4"},
}


class Gguf(Method):
    """Blocks of ggml's types."""

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.block:
            return None
        import gguf

        elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[matrix.block]]
        part = Part("weight", (torch.uint8,), (1, elements), tail=(nbytes,))
        said = _COMPUTED.get(matrix.block, {})
        parts = dict.fromkeys(("weight", *("scale",) * bool(said)), part)
        name, said = f"GGUF {matrix.block}", {"dtype": "blocks", **said}
        return BlockFormat(name=name, block=matrix.block, parts=parts, **said)
