"""Finding FlashInfer, and getting its compiled modules. Imports it only where it is used."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from moekit.errors import BackendError

logger = logging.getLogger("moekit")

REQUIRES = ("flashinfer", "tvm_ffi", "triton")
INSTALL_HINT = "pip install 'moekit-flashinfer[library]'"

# Versions (from, up to but without) that this package was written against.
_RANGE = ((0, 6, 8), (0, 6, 9))
_PROGRESS_SECONDS = 15.0


@functools.cache
def version() -> str:
    """The installed version, or an empty string (not installed, or only unpacked somewhere)."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return ""


def faults() -> list[str]:
    """Why an installed FlashInfer cannot be used."""
    found = tuple(int(n) for n in re.findall(r"\d+", version())[:3])
    if not found or _RANGE[0] <= found < _RANGE[1]:
        return []
    low, high = (".".join(map(str, bound)) for bound in _RANGE)
    return [f"flashinfer-python {version()} is installed, want >={low},<{high} ({INSTALL_HINT})"]


def one_sided() -> ModuleType:
    """The functions behind ``flashinfer.comm.MoeAlltoAll``, compiled."""
    from flashinfer.comm import trtllm_moe_alltoall
    from flashinfer.jit.comm import gen_moe_alltoall_module

    with compiling(gen_moe_alltoall_module):
        trtllm_moe_alltoall.get_moe_alltoall_module()
    return trtllm_moe_alltoall


def two_sided() -> ModuleType:
    """The functions behind ``MnnvlMoe``, compiled."""
    from flashinfer.comm import trtllm_alltoall
    from flashinfer.jit.comm import gen_comm_alltoall_module

    with compiling(gen_comm_alltoall_module):
        trtllm_alltoall.get_comm_alltoall_module()
    return trtllm_alltoall


def memory() -> type[Any]:
    """The class that maps memory of all ranks into one another's address space."""
    from flashinfer.comm.mnnvl import MnnvlMemory

    return MnnvlMemory


def fused_moe() -> ModuleType:
    """``flashinfer.fused_moe.core`` with the SM90 module compiled."""
    from flashinfer.fused_moe import core
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    with compiling(gen_cutlass_fused_moe_sm90_module):
        core.get_cutlass_fused_moe_module("90")
    return core


def autotune() -> AbstractContextManager[None]:
    """Within it, calls of fused MoE time their kernels instead of using what they know."""
    from flashinfer.autotuner import autotune

    context: AbstractContextManager[None] = autotune()
    return context


@contextmanager
def compiling(make_spec: Any) -> Iterator[None]:
    """Says how far the compilation inside the block is, if FlashInfer has to compile.

    Raises BackendError where it may not (FLASHINFER_DISABLE_JIT) or fails.
    """
    spec = make_spec()
    finished = threading.Event()
    if not spec.is_compiled:
        threading.Thread(target=_report, args=(spec, finished), daemon=True).start()
    try:
        yield
    except Exception as error:  # ninja, a compiler, the loader: all of them fail in their own ways
        raise BackendError(
            f"FlashInfer's module {spec.name} cannot be had: {type(error).__name__}: {error}; it "
            "is compiled at first use (nvcc and ninja on the PATH, FLASHINFER_DISABLE_JIT unset), "
            "or comes prebuilt with flashinfer-jit-cache"
        ) from error
    finally:
        finished.set()


def _report(spec: Any, finished: threading.Event) -> None:
    start, total = time.monotonic(), len(spec.sources)
    logger.warning(
        "FlashInfer compiles %s: %d files, once per machine (flashinfer-jit-cache has it compiled)",
        spec.name,
        total,
    )
    while not finished.wait(_PROGRESS_SECONDS):
        done = len(list(spec.build_dir.glob("*.o")))
        seconds = time.monotonic() - start
        logger.warning("FlashInfer compiles %s: %d of %d, %.0f s", spec.name, done, total, seconds)
