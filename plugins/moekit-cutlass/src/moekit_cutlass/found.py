"""Which of the libraries are here, in which version. Imports none of them, nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from moekit.plugin import importable

QUACK_HINT = "pip install 'moekit-cutlass[quack]'"
VLLM_LIBRARY = "_C_stable_libtorch.abi3.so"
W4A8 = "int4_w4a8_g128"

# distribution -> versions (from, up to but without) that this package was written against
_RANGES = {
    "quack-kernels": ((0, 6, 5), (0, 7)),
    "nvidia-cutlass-dsl": ((4, 7, 1), (4, 8)),
    "vllm": ((0, 33), (0, 34)),
}
# scheme -> the libraries that have it at all
_HAS_SCHEME = {
    "none": ("quack", "torch"),
    "fp8_tensor": ("torch", "vllm"),
    "fp8_tensor_static": ("torch", "vllm"),
    "fp8_channel_token": ("torch", "vllm"),
    W4A8: ("vllm",),
}


def forced() -> str:
    """The library that MOEKIT_CUTLASS_PROVIDER insists on, or an empty string."""
    return os.environ.get("MOEKIT_CUTLASS_PROVIDER", "").strip().lower()


def providers_for(scheme: str, dtype_name: str) -> tuple[list[str], list[str]]:
    """The libraries that can do it here, and for each other one why not."""
    usable, why_not = [], []
    for name in _HAS_SCHEME[scheme]:
        reason = missing(name)
        if not reason and forced() not in ("", name):
            reason = f"MOEKIT_CUTLASS_PROVIDER={forced()} excludes {name}"
        if not reason and name == "torch" and scheme == "none" and dtype_name != "bfloat16":
            reason = f"torch's grouped GEMM has no {dtype_name}"
        if not reason and scheme == W4A8 and dtype_name != "bfloat16":
            reason = f"vLLM's cutlass_w4a8_moe_mm gives bfloat16, not {dtype_name}"
        if reason:
            why_not.append(reason)
        else:
            usable.append(name)
    return usable, why_not


def missing(provider: str) -> str:
    """Why a library cannot be used here, or an empty string."""
    if provider == "quack":
        for module in ("quack", "cutlass.cute", "tvm_ffi"):
            if not importable(module):
                return f"{module} is not installed ({QUACK_HINT})"
        return _wrong_version("quack-kernels") or _wrong_version("nvidia-cutlass-dsl")
    if provider == "vllm":
        library = vllm_library()
        if library is None:
            return (
                f"vLLM's {VLLM_LIBRARY} is not found (pip install 'vllm==0.33.*', or unpack its "
                "wheel and set MOEKIT_VLLM_PATH to the vllm folder in it)"
            )
        beside = sorted(library.parent.parent.glob("vllm-*.dist-info"))
        version = beside[0].name[len("vllm-") : -len(".dist-info")] if beside else ""
        return _outside("vllm", version) if version else ""
    return ""


def vllm_library() -> Path | None:
    """vLLM's library of CUTLASS operators; imports nothing."""
    if named := os.environ.get("MOEKIT_VLLM_PATH"):
        folders = [Path(named)]
    else:
        try:
            spec = importlib.util.find_spec("vllm")
        except (ImportError, ValueError):
            spec = None
        folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for candidate in (folder / VLLM_LIBRARY, folder / "vllm" / VLLM_LIBRARY):
            if candidate.is_file():
                return candidate
    return None


def _wrong_version(distribution: str) -> str:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""  # on the path without its metadata: only trying it can tell
    return _outside(distribution, version)


def _outside(distribution: str, version: str) -> str:
    low, high = _RANGES[distribution]
    found = tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
    if low <= found < high:
        return ""
    low_text, high_text = (".".join(map(str, bound)) for bound in (low, high))
    return (
        f"{distribution} {version} is installed, want >={low_text},<{high_text} "
        f"(pip install '{distribution}>={low_text},<{high_text}')"
    )
