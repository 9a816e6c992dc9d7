"""A check for ``python -m moekit doctor``: does Triton compile and run a kernel here?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

Finding = tuple[str, str, str]  # what was tried; ok, no or bad; what was found


def checks() -> Iterator[Finding]:
    """Compile and run a kernel, as the first call of every Triton backend does."""
    yield "Triton kernel", *_compile()


def _compile() -> tuple[str, str]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        return "no", "no GPU to compile for (TRITON_INTERPRET=1 runs kernels on the CPU, slowly)"
    begin = time.monotonic()
    try:
        right = add_one("cpu" if interpreted else "cuda")
    except Exception as error:  # a missing C compiler, a wrong driver, an unwritable cache
        return "bad", f"{type(error).__name__}: {error}"
    if not right:
        return "bad", "x + 1 came out wrong"
    return "ok", "interpreted" if interpreted else f"compiled in {time.monotonic() - begin:.1f} s"


def add_one(device: str) -> bool:
    """Return whether a kernel that adds one to 64 numbers does so."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, BLOCK: tl.constexpr):
        x_ptrs = x_ptr + tl.arange(0, BLOCK)
        tl.store(x_ptrs, tl.load(x_ptrs) + 1)

    x = torch.arange(64, dtype=torch.float32, device=device)
    kernel[(1,)](x, BLOCK=64)
    return torch.equal(x.cpu(), torch.arange(1, 65, dtype=torch.float32))
