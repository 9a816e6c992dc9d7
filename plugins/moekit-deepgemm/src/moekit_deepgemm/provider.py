"""Finds DeepGEMM on this machine, says what is wrong with it, and loads it.

Finding imports nothing: folders are looked up, the version is read as text. In order:
``MOEKIT_DEEPGEMM_PATH`` (the ``deep_gemm`` folder itself), an installed ``deep_gemm``, the one
inside an installed vLLM. The first with a version in range is taken.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PATH_VARIABLE = "MOEKIT_DEEPGEMM_PATH"
INSTALL_HINT = "pip install 'vllm>=0.33,<0.34'"  # its wheel carries DeepGEMM

OLDEST, BEFORE = (2, 6), (3, 0)
"""Versions with grouped layouts given as ends of groups on Hopper, and with this Python API."""

OLDEST_NVCC = "12.9"

_PRIVATE_NAME = "_moekit_deep_gemm"
_lock = threading.Lock()


@dataclass(frozen=True)
class Library:
    """A folder with DeepGEMM in it, not imported. fault: why it cannot be used, or empty."""

    folder: Path
    source: str
    version: str
    fault: str = ""


def candidates() -> list[Library]:
    """Every DeepGEMM of this machine, in order of preference."""
    named = os.environ.get(PATH_VARIABLE)
    places = [] if not named else [(Path(named), PATH_VARIABLE)]
    for package, inside in (("deep_gemm", ()), ("vllm", ("third_party", "deep_gemm"))):
        if (folder := _package_folder(package)) is not None:
            places.append((folder.joinpath(*inside), package))
    return [
        _inspect(folder, source)
        for folder, source in places
        if source == PATH_VARIABLE or (folder / "__init__.py").is_file()
    ]


def is_installed() -> bool:
    """Whether there is any, of whatever version."""
    return bool(candidates())


def find() -> Library | None:
    """The one to use."""
    return next((library for library in candidates() if not library.fault), None)


def faults() -> list[str]:
    """Why nothing that is installed can be used; empty if something can, or nothing is there."""
    found = candidates()
    if not found:
        return []
    if all(library.fault for library in found):
        return [library.fault for library in found]
    if nvcc() is None:
        return [
            f"DeepGEMM compiles its kernels at first use and finds no nvcc: install CUDA's "
            f"compiler ({OLDEST_NVCC} or later) and set CUDA_HOME, or DG_JIT_NVCC_COMPILER"
        ]
    return []


def nvcc() -> str | None:
    """The compiler DeepGEMM will run, looked for where it looks."""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return named
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        if (path := Path(home, "bin", "nvcc")).is_file():
            return str(path)
    return shutil.which("nvcc")


def load() -> ModuleType:
    """Imports the library; raises BackendBroken with the reason and what to do."""
    from moekit.errors import BackendBroken

    library = find()
    if library is None:
        why = "; ".join(faults()) or "deep_gemm is not installed"
        raise BackendBroken(f"{why} ({INSTALL_HINT}, or name its folder in {PATH_VARIABLE})")
    with _lock:
        try:
            return _loaded(library.folder) or _import(library)
        except (Exception, SystemExit) as error:  # a vendor library fails in every way
            raise BackendBroken(
                f"DeepGEMM {library.version} in {library.folder} does not load: "
                f"{type(error).__name__}: {error}; {INSTALL_HINT}"
            ) from error


def _package_folder(name: str) -> Path | None:
    """Where ``import name`` would find a package; does not import it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _inspect(folder: Path, source: str) -> Library:
    try:
        text = (folder / "__init__.py").read_text(errors="replace")
    except OSError as error:
        fault = f"{source} names {folder}, which is no deep_gemm folder ({error.strerror})"
        return Library(folder, source, "?", fault)
    match = re.search(r"^__version__\s*=\s*['\"]((\d+)\.(\d+)[^'\"]*)['\"]", text, re.MULTILINE)
    if match is None:
        return Library(folder, source, "?", f"the DeepGEMM in {folder} does not say its version")
    fault, version = "", match[1]
    if not OLDEST <= (int(match[2]), int(match[3])) < BEFORE:
        wanted = f">={OLDEST[0]}.{OLDEST[1]},<{BEFORE[0]}"
        fault = f"the DeepGEMM in {folder} has version {version}, this plugin wants {wanted}"
    return Library(folder, source, version, fault)


def _loaded(folder: Path) -> ModuleType | None:
    """The library if this process has it already: its operators can be registered only once."""
    for name in (_PRIVATE_NAME, "deep_gemm", "vllm.third_party.deep_gemm"):
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if module is not None and origin and Path(origin).parent.resolve() == folder.resolve():
            return module
    return None


def _import(library: Library) -> ModuleType:
    folder = library.folder.resolve()
    name = "deep_gemm" if library.source == "deep_gemm" else _PRIVATE_NAME
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for added in set(sys.modules) - before:
            if added == name or added.startswith(f"{name}."):
                del sys.modules[added]
        raise
    return module
