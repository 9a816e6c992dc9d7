"""A check for ``python -m moekit doctor``: is the GPU as fast as its kind was measured to be?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .limits import known_ceilings, measure_ceilings
from .records import Ceilings

Finding = tuple[str, str, str]  # what was tried; ok, no or bad; what was found

_SIZE, _READ = 4096, 1 << 30  # smaller than the ceilings' own, which take seconds
_LEAST = 0.5


def checks() -> Iterator[Finding]:
    """Time a bf16 matmul and a read of memory."""
    if not torch.cuda.is_available():
        yield "GPU speed", "no", "no GPU to time"
        return
    device = torch.device("cuda", torch.cuda.current_device())
    measured = measure_ceilings(device, _SIZE, _READ)
    known = known_ceilings(torch.cuda.get_device_name(device))
    yield "GPU speed", *judge(measured, known)


def judge(measured: Ceilings, known: Ceilings | None) -> tuple[str, str]:
    """Return ok or bad, and how fast the GPU is."""
    flops = measured.flops["bf16"]
    text = f"bf16 matmul {flops / 1e12:.0f} TFLOP/s, read {measured.read / 1e9:.0f} GB/s"
    if known is None:
        return "ok", text
    shares = flops / known.flops["bf16"], measured.read / known.read
    text += f": {shares[0]:.0%} and {shares[1]:.0%} of this GPU's known ceilings"
    if min(shares) < _LEAST:
        return "bad", f"{text}; another process may use it, or its clocks may be limited"
    return "ok", text
