"""Find `nccl.ep`, NCCL, its headers and nvcc, and judge them, without importing the library."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import torch

from moekit.plugin import VendorLibrary, importable

REQUIRES = ("nccl.ep", "nccl.core", "cuda.bindings")
INSTALL_HINT = "pip install 'nccl-extensions[cu13]>=0.1,<0.2', for CUDA 12 with [cu12]"
LIBRARY = VendorLibrary(
    distribution="nccl-extensions", versions=">=0.1,<0.2", module="nccl.ep",
    install_hint=INSTALL_HINT,
)  # fmt: skip
# What calls pass, as in `VendorLibrary.check`.
CALLS = {
    "Group.create": "2", "Group.create_handle": "3 stream", "Group.destroy": "1",
    "GroupConfig": "0 algorithm num_experts max_token_bytes max_dispatch_tokens_per_rank "
    "max_recv_tokens_per_rank timeout_ns zero_copy",
    "Handle.update": "2 stream", "Handle.dispatch": "3 layout_info config stream",
    "Handle.combine": "3 config stream", "DispatchConfig": "0 quantization_recipe pass_direction",
    "DispatchInputs": "0 tokens topk_weights scales", "CombineConfig": "0 pass_direction",
    "DispatchOutputs": "0 tokens scales topk_weights topk_idx",
    "CombineInputs": "0 tokens topk_weights", "CombineOutputs": "0 tokens topk_weights",
}  # fmt: skip
_BINDINGS = VendorLibrary(distribution="cuda-bindings", versions=">=12", module="cuda.bindings")
_NCCL = VendorLibrary(distribution="nvidia-nccl-cu13", versions=">=2", module="nvidia.nccl")
_OLDEST = (2, 30, 7)
_DEFINED = re.compile(r"^#define (?:NCCL_(?:MAJOR|MINOR|PATCH)|CUDA_VERSION) +(\d+)", re.MULTILINE)


def unsupported() -> list[str]:
    """Return why the installed library cannot be used; empty if it can, or is missing."""
    if not all(map(importable, REQUIRES)):
        return []
    return [*LIBRARY.unsupported(), *_nccl_reasons(), *_compiler_reasons()]


def loaded_nccl() -> tuple[int, ...] | None:
    """Return the version of the NCCL in this process, or None. torch knows its own only."""
    version = ctypes.c_int()
    try:  # a library is loaded once for its name, by torch or before it
        ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 10000, version.value // 100 % 100, version.value % 100


def _nccl_reasons() -> list[str]:
    """Return faults of NCCL or its headers: kernels with other headers misread its data."""
    loaded, reasons, get = loaded_nccl(), [], os.environ.get
    if loaded is not None and loaded < _OLDEST:
        reasons.append(
            f"NCCL {_text(loaded)} is loaded, and {_text(_OLDEST)} or later is required: install "
            "nvidia-nccl-cu13==2.30.7 over torch's, or put its libnccl.so.2 into LD_PRELOAD"
        )
    home = Path(get("NCCL_HOME") or _NCCL.folder() or "")
    folder = Path(get("NCCL_EP_JIT_BUILD_INCLUDE_DIR") or home / "include")
    found = _defined(folder / "nccl.h")
    advice = "set NCCL_HOME to the folder of the NCCL that is loaded"
    if len(found) != 3:
        reasons.append(f"NCCL's headers are not in {folder}: {advice}")
    elif loaded is not None and found != loaded:
        reasons.append(
            f"kernels would be compiled with the headers of NCCL {_text(found)} in {folder}, and "
            f"NCCL {_text(loaded)} is loaded: {advice}"
        )
    return reasons


def _compiler_reasons() -> list[str]:
    """Return faults of nvcc, which compiles kernels at their first use."""
    get, wanted = os.environ.get, torch.version.cuda
    named, home = get("NCCL_EP_JIT_NVCC") or get("NVCC"), get("CUDA_HOME") or get("CUDA_PATH")
    inside = Path(home or "", "bin", "nvcc")
    nvcc = str(inside) if home and not named and inside.exists() else shutil.which(named or "nvcc")
    if nvcc is None:
        return [
            "nvcc is not found, and the library compiles kernels at their first use: put nvcc on "
            "the PATH, or set CUDA_HOME or NCCL_EP_JIT_NVCC"
        ]
    toolkit = _defined(Path(nvcc).resolve().parent.parent / "include" / "cuda.h")
    majors = {
        f"nvcc ({nvcc})": str(toolkit[0] // 1000) if toolkit else "",
        "the package cuda-bindings": _BINDINGS.version().partition(".")[0],
    }
    return [
        f"torch is built for CUDA {wanted}, and {what} is of CUDA {major}: all must have one "
        "major version"
        for what, major in majors.items()
        if wanted and major and major != wanted.partition(".")[0]
    ]


def _defined(header: Path) -> tuple[int, ...]:
    """Return the version numbers that a header of NCCL or CUDA defines, or none."""
    with suppress(OSError):
        return tuple(map(int, _DEFINED.findall(header.read_text(errors="replace"))))
    return ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
