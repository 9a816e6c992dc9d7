"""Find FlashInfer and get its compiled modules. The library is imported only where it is used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from moekit.errors import BackendError
from moekit.plugin import VendorLibrary

logger = logging.getLogger("moekit")

REQUIRES = ("flashinfer", "tvm_ffi", "triton")
FLASHINFER = VendorLibrary(
    distribution="flashinfer-python",
    versions=">=0.6.8,<0.6.9",
    module="flashinfer",
    install_hint="pip install 'moekit-flashinfer[library]'",
)
_LATER = replace(FLASHINFER, versions=">=0.7.2,<0.7.3")  # nobody has read the versions in between
MEMORY_MODULE = "flashinfer.comm.mnnvl"


def unsupported() -> list[str]:
    """Return why the installed version cannot be used; empty if it can, or is missing."""
    if not FLASHINFER.unsupported() or not unsupported_mega():
        return []
    return [
        f"flashinfer-python {FLASHINFER.version()} is installed, but {FLASHINFER.versions} or "
        f"{_LATER.versions} is required ({FLASHINFER.install_hint})"
    ]


def unsupported_mega() -> list[str]:
    """Return why the installed version has no layers that push tokens; empty if it has them."""
    return list(_LATER.unsupported())


def one_sided() -> Any:
    """Return the functions behind ``flashinfer.comm.MoeAlltoAll``, compiled."""
    from flashinfer.comm import trtllm_moe_alltoall
    from flashinfer.jit.comm import gen_moe_alltoall_module

    with compiling(gen_moe_alltoall_module):
        trtllm_moe_alltoall.get_moe_alltoall_module()
    return trtllm_moe_alltoall


def two_sided() -> Any:
    """Return the functions behind ``flashinfer.comm.trtllm_alltoall.MnnvlMoe``, compiled."""
    from flashinfer.comm import trtllm_alltoall
    from flashinfer.jit.comm import gen_comm_alltoall_module

    with compiling(gen_comm_alltoall_module):
        trtllm_alltoall.get_comm_alltoall_module()
    return trtllm_alltoall


def push_layers() -> tuple[Any, Any]:
    """Return the packages of the layers that push tokens: in fp8, and in bf16."""
    from flashinfer.moe_ep.kernel_src.sm90 import cake_bf16_megamoe, push_style_megamoe

    return push_style_megamoe, cake_bf16_megamoe


def memory() -> Any:
    """Return another class that maps the memory of all ranks into every rank's address space.

    The library keeps the ranks and the next free address in attributes of the class, and reads them
    again after it has waited for other ranks. A lock would have to be held while it waits, and
    ranks whose threads begin in different orders would wait for each other. So every call loads the
    library's module once more: threads, groups and other users of the library share no attribute.
    """
    spec = importlib.util.find_spec(MEMORY_MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MnnvlMemory


def fused_moe() -> Any:
    """Return ``flashinfer.fused_moe.core`` with the module for SM90 compiled."""
    from flashinfer.fused_moe import core
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    with compiling(gen_cutlass_fused_moe_sm90_module):
        core.get_cutlass_fused_moe_module("90")
    return core


def autotune() -> AbstractContextManager[None]:
    """Return a context in which fused MoE calls time their kernels and remember the fastest."""
    from flashinfer.autotuner import autotune

    context: AbstractContextManager[None] = autotune()
    return context


@contextmanager
def compiling(make_spec: Any) -> Iterator[None]:
    """Log a warning if FlashInfer has to compile the module inside the block, which takes minutes.
    Raises BackendError if compilation is disabled (FLASHINFER_DISABLE_JIT), or it failed."""
    spec = make_spec()
    if not spec.is_compiled:
        logger.warning(
            "FlashInfer compiles %s: %d files, once per machine, for minutes (flashinfer-jit-cache "
            "has it compiled)",
            spec.name,
            len(spec.sources),
        )
    try:
        yield
    except Exception as error:  # ninja, the compiler and the loader fail with different classes
        raise BackendError(
            f"FlashInfer's module {spec.name} is not available: {type(error).__name__}: {error}; "
            "put nvcc and ninja on the PATH and unset FLASHINFER_DISABLE_JIT, so that it can be "
            "compiled, or install flashinfer-jit-cache, which has it compiled"
        ) from error
