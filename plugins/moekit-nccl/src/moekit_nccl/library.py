"""Find `nccl.ep` and judge what it needs, without importing it: NCCL, its headers, and nvcc."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

import torch

from moekit.plugin import VendorLibrary, importable

REQUIRES = ("nccl.ep", "nccl.core", "cuda.bindings")
INSTALL_HINT = "pip install 'nccl-extensions[cu13]>=0.1,<0.2', for CUDA 12 with [cu12]"
LIBRARY = VendorLibrary(
    distribution="nccl-extensions",
    versions=">=0.1,<0.2",
    module="nccl.ep",
    install_hint=INSTALL_HINT,
)
_OLDEST = (2, 30, 7)
_DEFINED = re.compile(r"^#define (?:NCCL_(?:MAJOR|MINOR|PATCH)|CUDA_VERSION) +(\d+)", re.MULTILINE)


def unsupported() -> list[str]:
    """Return why the installed library cannot be used; empty if it can, or is missing."""
    if not all(map(importable, REQUIRES)):
        return []
    return [*LIBRARY.unsupported(), *_nccl_reasons(), *_compiler_reasons()]


def _nccl_reasons() -> list[str]:
    """Return what is wrong with the NCCL of this process, or with its headers.

    The library compiles its kernels with headers whose structures NCCL fills in on the host, so
    headers of another version end in illegal memory accesses on the device.
    """
    loaded, folder = loaded_nccl(), _headers()
    reasons = []
    if loaded is not None and loaded < _OLDEST:
        reasons.append(
            f"NCCL {_text(loaded)} is loaded, and {_text(_OLDEST)} or later is required: install "
            "nvidia-nccl-cu13==2.30.7 over torch's, or put its libnccl.so.2 into LD_PRELOAD"
        )
    found = _numbers(folder / "nccl.h") if folder is not None else ()
    if len(found) != 3:
        reasons.append("NCCL's headers are not found: set NCCL_HOME to the folder of the NCCL used")
    elif loaded is not None and found != loaded:
        reasons.append(
            f"kernels would be compiled with the headers of NCCL {_text(found)} in {folder}, and "
            f"NCCL {_text(loaded)} is loaded: set NCCL_HOME to the folder of the NCCL used"
        )
    return reasons


def loaded_nccl() -> tuple[int, ...] | None:
    """Return the version of the NCCL that torch has loaded, or None if torch has none."""
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version[:3])


def _headers() -> Path | None:
    """Return the folder of NCCL's headers as the library finds it."""
    if named := os.environ.get("NCCL_EP_JIT_BUILD_INCLUDE_DIR"):
        return Path(named)
    home = (
        os.environ.get("NCCL_HOME")
        or VendorLibrary(
            distribution="nvidia-nccl-cu13", versions=">=2", module="nvidia.nccl"
        ).folder()
    )
    return Path(home) / "include" if home else None


def _compiler_reasons() -> list[str]:
    """Return what is wrong with nvcc, which compiles kernels at their first use."""
    nvcc, wanted = _nvcc(), torch.version.cuda
    if nvcc is None:
        return [
            "nvcc is not found, and the library compiles kernels at their first use: put nvcc on "
            "the PATH, or set CUDA_HOME or NCCL_EP_JIT_NVCC"
        ]
    if wanted is None:
        return []
    toolkit = _numbers(nvcc.resolve().parent.parent / "include" / "cuda.h")
    majors = {
        f"nvcc ({nvcc})": str(toolkit[0] // 1000) if toolkit else "",
        "the package cuda-bindings": _installed("cuda-bindings").partition(".")[0],
    }
    return [
        f"torch is built for CUDA {wanted}, and {what} is of CUDA {major}: all must have one "
        "major version"
        for what, major in majors.items()
        if major and major != wanted.partition(".")[0]
    ]


def _nvcc() -> Path | None:
    named = os.environ.get("NCCL_EP_JIT_NVCC") or os.environ.get("NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not named and home and (inside := Path(home) / "bin" / "nvcc").exists():
        return inside
    found = shutil.which(named or "nvcc")
    return Path(found) if found else None


def _numbers(header: Path) -> tuple[int, ...]:
    """Return the version numbers that a header of NCCL or CUDA defines."""
    try:
        return tuple(map(int, _DEFINED.findall(header.read_text(errors="replace"))))
    except OSError:
        return ()


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
