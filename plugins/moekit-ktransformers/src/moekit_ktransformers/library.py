"""Find kt-kernel, say why it cannot be used, and load the build for this CPU.

`unsupported` reads files and imports nothing. Only `load` loads the extension, and only on a CPU
that has every instruction set that the build uses: a missing instruction would kill the process.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moekit.plugin import VendorLibrary

# kt-kernel's metadata pins an old torch, so it is installed without its dependencies.
KT_KERNEL = VendorLibrary(
    distribution="kt-kernel",
    versions=">=0.7.2,<0.8",
    install_hint="pip install --no-deps 'kt-kernel>=0.7.2,<0.8'",
)

VARIANT_VARIABLE = "MOEKIT_KT_VARIANT"
THREADS_VARIABLE = "MOEKIT_KT_THREADS"

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_VNNI = _AVX512 | {"avx512_vnni"}
_VBMI = _VNNI | {"avx512vbmi"}
_BF16 = _VBMI | {"avx512_bf16"}
# The wheel's builds and the CPU flags (as /proc/cpuinfo spells them) that each needs, the best
# first. "amx" is loaded on request only: no machine with AMX has run the conformance kit yet.
VARIANTS: dict[str, frozenset[str]] = {
    "amx": _BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
    "avx512_bf16": _BF16,
    "avx512_vbmi": _VBMI,
    "avx512_vnni": _VNNI,
    "avx512_base": _AVX512,
    "avx2": _AVX2,
}

_MODULE = "kt_kernel_ext"
_extension: Any = None


def load() -> Any:
    """Return the library's extension module; the first call loads it.

    Raises ImportError with the reasons where there is none that this machine can run.
    """
    global _extension
    if _extension is None:
        path = build()
        if (reasons := unsupported()) or path is None:
            raise ImportError("; ".join(reasons) or "kt_kernel is not installed")
        loaded = sys.modules.get(_MODULE)  # kt_kernel itself was imported before
        if loaded is None:
            spec = importlib.util.spec_from_file_location(_MODULE, path)
            assert spec is not None and spec.loader is not None
            with _denormals_kept():
                loaded = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(loaded)
            sys.modules[_MODULE] = loaded
        _extension = loaded
    return _extension


@contextmanager
def _denormals_kept() -> Iterator[None]:
    """Undo what the library's start-up code does to the loading thread: it flushes denormals."""
    tiny = torch.tensor(1e-39, device="cpu")
    flushed = not tiny * 1.0
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def unsupported() -> list[str]:
    """Return why the installed library cannot be used here.

    The spec's ``requires`` reports a library that is not installed; a CPU for which there is no
    build is reported here.
    """
    folder, asked, found = KT_KERNEL.folder(), os.environ.get(VARIANT_VARIABLE), []
    threads = os.environ.get(THREADS_VARIABLE)
    if threads and not (threads.isascii() and threads.isdigit() and int(threads)):
        found.append(
            f"{THREADS_VARIABLE}={threads!r} is not a positive integer: correct or unset it"
        )
    if folder is not None:
        found += KT_KERNEL.unsupported()
    if variant() is None:
        lacks = _lacking("avx2")
        found.append(f"kt-kernel needs an x86 CPU with AVX2, and this CPU lacks {lacks}")
    elif asked and asked not in VARIANTS:
        known = ", ".join(VARIANTS)
        found.append(f"{VARIANT_VARIABLE}={asked!r} is unknown; choose one of: {known}")
    elif asked and _lacking(asked):
        found.append(f"{VARIANT_VARIABLE}={asked}, but this CPU lacks {_lacking(asked)}")
    elif folder is not None and build() is None:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        has = sorted(p.name for p in folder.glob(f"_{_MODULE}_{variant()}.*")) or ["none"]
        found.append(
            f"{folder} has no {variant()} build for Python {python} (found: {', '.join(has)}); "
            "install the wheel for this Python"
        )
    return found


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that this CPU and its kernel offer; empty where unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def _lacking(variant: str) -> str:
    """Return the CPU flags that a build needs and this CPU lacks, or an empty string."""
    return ", ".join(sorted(VARIANTS[variant] - cpu_flags()))


def variant() -> str | None:
    """Return the build to load: the one asked for, else the best that this CPU can run."""
    if asked := os.environ.get(VARIANT_VARIABLE):
        return asked
    return next((each for each in VARIANTS if each != "amx" and not _lacking(each)), None)


def build() -> Path | None:
    """Return the extension module's file of `variant` for this Python."""
    folder = KT_KERNEL.folder()
    if folder is None:
        return None
    names = (f"_{_MODULE}_{variant()}{s}" for s in importlib.machinery.EXTENSION_SUFFIXES)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def threads(torch_threads: int) -> int:
    """Return the number of threads of the pool: MOEKIT_KT_THREADS, or torch's.

    The calling thread spins until the pool is done, so without the variable one core is left to
    it: a pool with a thread on every core is slower than one with a thread less.
    """
    asked = os.environ.get(THREADS_VARIABLE)
    return int(asked) if asked else max(1, min(torch_threads, cores() - 1))


def cores() -> int:
    """Return how many cores this process may use; the library runs on Linux alone."""
    return len(os.sched_getaffinity(0))
