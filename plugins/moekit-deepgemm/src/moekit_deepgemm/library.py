"""Find DeepGEMM on this machine, say why it cannot be used, and load it.

Finding imports nothing. The first folder with a supported version is used, in this order: the
folder that MOEKIT_DEEPGEMM_PATH names, an installed ``deep_gemm`` (sglang's fork, or upstream built
from source), the copy inside vLLM's wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from moekit.errors import BackendBroken
from moekit.plugin import VendorLibrary, importable

PATH_VARIABLE = "MOEKIT_DEEPGEMM_PATH"
OLDEST_NVCC = "12.9"

# sglang pins 0.1.4 for torch 2.11; later versions are built for later torch.
INSTALL_HINT = "pip install 'sgl-deep-gemm==0.1.4', for torch 2.11"

# These versions take group ends as a layout on Hopper, and have this Python interface.
_INSTALLED = VendorLibrary(distribution="deep_gemm", versions=">=2.6,<3", install_hint=INSTALL_HINT)
_NAMED = replace(_INSTALLED, path_variable=PATH_VARIABLE)
# The wheel of sglang's fork has version numbers that upstream's never had.
_OF_SGLANG = replace(
    _INSTALLED, distribution="sgl-deep-gemm", versions=">=0.1.4,<0.3", module="deep_gemm"
)
_IN_VLLM = replace(_INSTALLED, module="vllm", inside="third_party/deep_gemm")

_PRIVATE_NAME = "_moekit_deep_gemm"
_lock = threading.Lock()


def candidates() -> list[VendorLibrary]:
    """Return every DeepGEMM of this machine, of any version, the preferred one first."""
    named = [_fork_or(_NAMED)] if _NAMED.named_folder is not None else []
    return named + [place for place in (_fork_or(_INSTALLED), _IN_VLLM) if _has_package(place)]


def unsupported() -> list[str]:
    """Return why no DeepGEMM of this machine can be used; empty if one can, or none is there."""
    found = candidates()
    faults = [_fault(place) for place in found]
    if found and all(faults):
        return faults
    if found and nvcc() is None:
        return [
            "DeepGEMM compiles its kernels at first use, but there is no nvcc: install CUDA's "
            f"compiler ({OLDEST_NVCC} or later) and set CUDA_HOME or DG_JIT_NVCC_COMPILER"
        ]
    return []


def unsupported_mega() -> list[str]:
    """Return why no DeepGEMM of this machine has a whole layer for Hopper."""
    place = _place()
    if place is not None and place.distribution != _OF_SGLANG.distribution:
        return [f"{used()} has no layer for Hopper, and sglang's fork has one ({INSTALL_HINT})"]
    return unsupported()


def nvcc() -> str | None:
    """Return the compiler that DeepGEMM will run, looked up where DeepGEMM does."""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return named
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        if (path := Path(home, "bin", "nvcc")).is_file():
            return str(path)
    return shutil.which("nvcc")


def load() -> ModuleType:
    """Import the library and return its module. Raises BackendBroken if there is no supported
    library, or it does not load."""
    place = _place()
    if place is None:
        why = "; ".join(unsupported()) or "deep_gemm is not installed"
        raise BackendBroken(f"{why} ({INSTALL_HINT}, or set {PATH_VARIABLE} to its folder)")
    folder = place.folder()
    assert folder is not None
    with _lock:
        try:
            public = not place.path_variable and not place.inside
            name = "deep_gemm" if public else _PRIVATE_NAME
            return _loaded(folder) or _import(folder, name)
        except (Exception, SystemExit) as error:  # a vendor's library may fail in any way
            raise BackendBroken(
                f"DeepGEMM {place.version()} in {folder} does not load: "
                f"{type(error).__name__}: {error}; {INSTALL_HINT}"
            ) from error


def used() -> str:
    """Return the version and folder of the DeepGEMM that `load` takes, or an empty string."""
    place = _place()
    return "" if place is None else place.describe()


def failed(error: RuntimeError) -> BackendBroken:
    """Return the error to raise for one of the library, which compiles kernels in its calls."""
    return BackendBroken(
        f"{used() or 'DeepGEMM'} failed: {error}; it compiles its kernels with CUDA's nvcc "
        f"({OLDEST_NVCC} or later, found: {nvcc() or 'none'}): set CUDA_HOME or "
        "DG_JIT_NVCC_COMPILER, and DG_JIT_CACHE_DIR to a folder that can be written"
    )


def check(module: ModuleType, calls: Mapping[str, str]) -> None:
    """Raise BackendBroken unless the loaded module offers ``calls``: wheels of one version differ.

    calls: as in `VendorLibrary.check`.
    """
    (_place() or _INSTALLED).check(module, calls)


def _place() -> VendorLibrary | None:
    return next((place for place in candidates() if not _fault(place)), None)


def _fork_or(place: VendorLibrary) -> VendorLibrary:
    """Return the candidate as a copy of sglang's fork, if the fork has its version."""
    fork = replace(_OF_SGLANG, path_variable=place.path_variable)
    return fork if fork.version() and not fork.unsupported() else place


def _has_package(place: VendorLibrary) -> bool:
    folder = place.folder()
    return folder is not None and (folder / "__init__.py").is_file()


def _fault(place: VendorLibrary) -> str:
    """Return why a candidate cannot be used, or an empty string."""
    folder = place.folder() or place.named_folder
    if not _has_package(place):
        return f"{PATH_VARIABLE} names {folder}, which is not a deep_gemm folder"
    if not place.version():
        return f"the DeepGEMM in {folder} does not tell its version"
    if place.version().startswith("0.1.") and not importable("tvm_ffi"):
        return f"the DeepGEMM in {folder} needs tvm_ffi: pip install apache-tvm-ffi==0.1.11"
    return next((f"{reason} in {folder}" for reason in place.unsupported()), "")


def _loaded(folder: Path) -> ModuleType | None:
    """Return the module if this process has it: its operators can be registered only once."""
    for name in (_PRIVATE_NAME, "deep_gemm", "vllm.third_party.deep_gemm"):
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if module is not None and origin and Path(origin).parent.resolve() == folder.resolve():
            return module
    return None


def _import(folder: Path, name: str) -> ModuleType:
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(
        name, folder.resolve() / "__init__.py", submodule_search_locations=[str(folder.resolve())]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for added in set(sys.modules) - before:
            if f"{added}.".startswith(f"{name}."):
                del sys.modules[added]
        raise
    return module
