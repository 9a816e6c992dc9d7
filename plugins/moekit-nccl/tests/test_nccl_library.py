"""The plugin gives reasons against an installed library before the first call."""

from __future__ import annotations

import pytest
import torch
from moekit_nccl import library


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with the library, NCCL 2.30.7 and its headers, and CUDA 13 with nvcc."""
    include = tmp_path / "nccl" / "include"
    cuda = tmp_path / "cuda"
    for folder in (include, cuda / "bin", cuda / "include"):
        folder.mkdir(parents=True)
    headers(include, (2, 30, 7))
    (cuda / "include" / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    (cuda / "bin" / "nvcc").touch()
    for name in ("NCCL_EP_JIT_BUILD_INCLUDE_DIR", "NCCL_EP_JIT_NVCC", "NVCC", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_HOME", str(include.parent))
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    monkeypatch.setattr(library, "importable", lambda name: True)
    monkeypatch.setattr(library, "loaded_nccl", lambda: (2, 30, 7))
    versions(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def versions(monkeypatch, **changes):
    of = {"nccl_extensions": "0.1.0", "cuda_bindings": "13.0.3", **changes}
    kind = type(library.LIBRARY)
    monkeypatch.setattr(kind, "version", lambda self: of[self.distribution.replace("-", "_")])


def headers(folder, version):
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [f"#define NCCL_{n} {v}" for n, v in zip(names, version, strict=True)]
    (folder / "nccl.h").write_text("\n".join([*lines, '#define NCCL_SUFFIX ""', ""]))


def said() -> str:
    (reason,) = library.unsupported()
    return reason


def test_the_loaded_nccl_is_asked(monkeypatch):
    """The version is of the loaded library, and not of the one that torch was built for."""

    class Nccl:
        def ncclGetVersion(self, found):
            found._obj.value = 23007
            return 0

    monkeypatch.setattr(library.ctypes, "CDLL", lambda name, mode: Nccl())
    assert library.loaded_nccl() == (2, 30, 7)

    def missing(name, mode):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(library.ctypes, "CDLL", missing)
    assert library.loaded_nccl() is None


def test_all_there(machine):
    assert library.unsupported() == []


def test_a_missing_library_has_no_reasons(machine, monkeypatch):
    """The spec's `requires` reports it."""
    monkeypatch.setattr(library, "importable", lambda name: name != "nccl.ep")
    monkeypatch.setattr(library, "loaded_nccl", lambda: (2, 28, 9))
    assert library.unsupported() == []


def test_another_version_of_the_library(machine, monkeypatch):
    versions(monkeypatch, nccl_extensions="0.2.0")
    assert "nccl-extensions 0.2.0 is installed" in said()


def test_an_old_nccl(machine, monkeypatch):
    headers(machine / "nccl" / "include", (2, 28, 9))
    monkeypatch.setattr(library, "loaded_nccl", lambda: (2, 28, 9))
    assert "NCCL 2.28.9 is loaded, and 2.30.7 or later is required" in said()


def test_headers_of_another_nccl(machine):
    headers(machine / "nccl" / "include", (2, 28, 9))
    assert "headers of NCCL 2.28.9" in said() and "NCCL 2.30.7 is loaded: set NCCL_HOME" in said()


def test_no_headers(machine, monkeypatch):
    monkeypatch.setenv("NCCL_EP_JIT_BUILD_INCLUDE_DIR", str(machine / "nowhere"))
    assert "NCCL's headers are not in" in said()


def test_no_nvcc(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(machine))
    monkeypatch.setenv("PATH", str(machine))
    assert "nvcc is not found" in said()


@pytest.mark.parametrize("what", ["nvcc", "cuda-bindings"])
def test_mixed_cuda_majors(machine, monkeypatch, what):
    if what == "nvcc":
        (machine / "cuda" / "include" / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    else:
        versions(monkeypatch, cuda_bindings="12.9.1")
    assert what in said() and "is of CUDA 12: all must have one major version" in said()
