"""The doctor's checks of versions and devices."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import moekit
from moekit.problem import DeviceSpec

_Found = Iterator[tuple[str, str, str]]  # name, state and text of each finding


def versions() -> _Found:
    for name, version in (
        ("moekit", moekit.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("cuda of torch", torch.version.cuda or ""),
        ("triton", _installed("triton")),
    ):
        yield name, "ok" if version else "no", str(version) or "none"
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path=_cuda_path())
    text = compiler or "not found; libraries that compile at first use need it (PATH, CUDA_HOME)"
    yield "nvcc", "ok" if compiler else "no", text


def devices() -> _Found:
    """Yield every device that torch sees, whether it computes, and how devices are linked."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        text = f"{platform.machine()}, {torch.get_num_threads()} threads; torch sees no accelerator"
        yield "cpu", "ok", text
        return
    count = torch.accelerator.device_count()
    for index in range(count):
        device = torch.device(accelerator.type, index)
        try:
            found = _compute_on(device)
        except Exception as error:  # a driver fails in every imaginable way
            found = "bad", f"{type(error).__name__}: {error}"
        yield str(device), *found
    if accelerator.type == "cuda" and count > 1:
        both = itertools.permutations(range(count), 2)
        apart = [f"{a}-{b}" for a, b in both if not torch.cuda.can_device_access_peer(a, b)]
        text = "none between " + ", ".join(apart) if apart else "between all"
        yield "peer access", "no" if apart else "ok", text
        yield from _links([torch.device("cuda", i) for i in range(count)])


def _compute_on(device: torch.device) -> tuple[str, str]:
    """Return ok or bad, and what the device is."""
    spec = DeviceSpec.of(device)
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    if not bool((ones @ ones == 64).all()):
        return "bad", f"{spec.name}: a product of ones is wrong"
    memory = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = f", {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return "ok", f"{spec.name}, {spec}{memory}"


def _links(found: Sequence[torch.device], count: int = 1 << 20) -> _Found:
    """Yield the copies between devices that do not arrive, or that all of them do."""
    wrong = 0
    for source, target in itertools.permutations(found, 2):
        here = torch.arange(count, dtype=torch.int32, device=source)
        if not torch.equal(here.to(target).cpu(), here.cpu()):
            wrong += 1
            name = f"link {source.index}-{target.index}"
            yield name, "bad", "a copy arrived changed: peer access does not work"
    if not wrong:
        yield "links", "ok", "copies between all devices arrive"


def _cuda_path() -> str:
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return os.pathsep.join(str(Path(home) / "bin") for home in homes if home)


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
