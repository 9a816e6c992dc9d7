"""Find FlashInfer and get its compiled modules. The library is imported only where it is used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    calls = {
        "moe_a2a_get_workspace_size_per_rank": "4", "moe_a2a_initialize": "4",
        "moe_a2a_dispatch": "9", "moe_a2a_combine": "10", "get_moe_alltoall_module": "0",
    }  # fmt: skip
    return _compiled("comm.trtllm_moe_alltoall", calls, "comm", "gen_moe_alltoall_module")


def two_sided() -> Any:
    """Return the functions behind ``flashinfer.comm.trtllm_alltoall.MnnvlMoe``, compiled."""
    calls = {
        "get_moe_commworkspace_size_per_rank": "1", "get_moe_prepare_workspace_size_per_rank": "1",
        "moe_prepare": "10", "moe_comm": "9", "get_comm_alltoall_module": "0",
    }  # fmt: skip
    return _compiled("comm.trtllm_alltoall", calls, "comm", "gen_comm_alltoall_module")


def fused_moe() -> Any:
    """Return ``flashinfer.fused_moe.core`` with the module for SM90 compiled."""
    calls = {
        "cutlass_fused_moe": "6 quant_scales fc1_expert_biases fc2_expert_biases output "
        "use_deepseek_fp8_block_scale activation_type swiglu_alpha swiglu_beta swiglu_limit",
        "ActivationType": "", "get_cutlass_fused_moe_module": "1",
    }  # fmt: skip
    made = "gen_cutlass_fused_moe_sm90_module"
    return _compiled("fused_moe.core", calls, "fused_moe", made, "90")


def _compiled(name: str, calls: Mapping[str, str], jit: str, make_spec: str, *args: str) -> Any:
    """Return a module that has the functions ``calls``. The last one compiles the module."""
    module = FLASHINFER.load(f"flashinfer.{name}", calls)
    made = FLASHINFER.load(f"flashinfer.jit.{jit}", {make_spec: "0"})
    with compiling(getattr(made, make_spec)):
        getattr(module, [*calls][-1])(*args)
    return module


def push_layers() -> tuple[Any, Any]:
    """Return the packages of the layers that push tokens: in fp8, and in bf16."""
    folder = "flashinfer.moe_ep.kernel_src.sm90"
    return (
        _LATER.load(f"{folder}.push_style_megamoe", _PUSH),
        _LATER.load(f"{folder}.cake_bf16_megamoe", _CAKE),
    )


_PUSH = {
    "Sm90PushPayload": "", "Sm90PushCombine": "", "Sm90PushWeights": "4", "Sm90PushMoERunner": "2",
    "Sm90PushConfig": "0 payload_dtype combine_dtype dedup_dispatch",
    "Sm90PushPipe": "0 ep_size rank num_local_experts hidden_size top_k token_capacity "
    "device_index config comm_backend out_dtype",
    "Sm90PushMoERunner.bind_weights": "2", "Sm90PushMoERunner.forward": "4 output",
}  # fmt: skip
_CAKE = {
    "Sm90CakeBf16Weights": "5", "Sm90CakeBf16MoERunner": "2",
    "Sm90CakeBf16MoERunner.bind_weights": "2", "Sm90CakeBf16MoERunner.forward": "4 output",
}  # fmt: skip


def memory() -> Any:
    """Return another class that maps the memory of all ranks into every rank's address space.

    The library keeps the ranks and the next free address in attributes of the class, and reads them
    again after it has waited for other ranks. A lock would have to be held while it waits, and
    ranks whose threads begin in different orders would wait for each other. So every call loads the
    library's module once more: threads, groups and other users of the library share no attribute.
    """
    FLASHINFER.load(MEMORY_MODULE, {"MnnvlMemory": "2"})
    spec = importlib.util.find_spec(MEMORY_MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MnnvlMemory


def autotune() -> Any:
    """Return a context in which fused MoE calls time their kernels and remember the fastest."""
    return FLASHINFER.load("flashinfer.autotuner", {"autotune": "0"}).autotune()


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
