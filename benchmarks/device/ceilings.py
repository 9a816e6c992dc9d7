"""Measure the ceilings of this machine's GPU: square matmuls, and a sum over memory.

    python benchmarks/device/ceilings.py

`moekit_bench.limits.CEILINGS` holds what it printed for each device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from moekit_bench import Ceilings, Timer
from torch import Tensor


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the ceilings by square matmuls and a sum over memory."""
    size, read_bytes = (2048, 1 << 29) if device.type == "cpu" else (8192, 8 << 29)
    flops = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a = torch.randn(size, size, device=device, dtype=dtype)
        b = torch.randn(size, size, device=device, dtype=dtype)
        flops[name] = 2 * size**3 / _best_seconds(lambda a=a, b=b: a @ b.T, device)  # type: ignore[misc]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        x, one = a.to(torch.float8_e4m3fn), torch.ones((), device=device)
        scaled = getattr(torch, "_scaled_mm")  # noqa: B009 (private, and untyped)
        seconds = _best_seconds(
            lambda: scaled(x, x.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), device
        )
        flops["fp8"] = flops["int8"] = 2 * size**3 / seconds
    data = torch.zeros(read_bytes // 4, device=device)
    return Ceilings(flops, read_bytes / _best_seconds(lambda: data.sum(), device))


def _best_seconds(function: Callable[[], Tensor], device: torch.device) -> float:
    timer = Timer(device)
    return min([timer.eager_us(function)[0] for _ in range(10)][1:]) / 1e6


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), measure_ceilings(torch.device("cuda")))
