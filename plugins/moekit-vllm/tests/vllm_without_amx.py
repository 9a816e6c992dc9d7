"""A plugin of vLLM that hides AMX from it.

With AMX, vLLM has other kernels: for MLA in bf16 only, and for quantized experts.
"""

from __future__ import annotations


def register() -> None:
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False
