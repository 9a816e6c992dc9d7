"""The doctor's checks of versions, devices, the network and caches."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import moekit
from moekit.errors import MoekitError
from moekit.problem import DeviceSpec
from moekit.selection.tuned import table, user_path
from moekit.untrusted.folders import cache_folder, home_folder

_FEW_BYTES = 1 << 30
_PREFIXES = ("MOEKIT_", "NCCL_", "NVSHMEM_", "GLOO_", "TRITON_", "CUDA_", "TORCH_NCCL_")

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


def network(environ: Mapping[str, str]) -> _Found:
    """Yield what ranks communicate with; a machine with one GPU needs none of it."""
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        nccl = ".".join(map(str, version())) if torch.cuda.is_available() else ""
        yield "NCCL", "ok", nccl or "in torch"
    else:
        yield "NCCL", "no", "not in this torch: ranks use gloo"
    distributions = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
    nvshmem = [f"{name} {_installed(name)}" for name in distributions if _installed(name)]
    yield "NVSHMEM", "ok" if nvshmem else "no", ", ".join(nvshmem) or "none"
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        text = f"{free / 2**30:.1f} GiB free"
        if free < _FEW_BYTES:
            text += "; NCCL may need more between ranks (docker: --shm-size=8g)"
        yield str(shared), "ok" if free >= _FEW_BYTES else "no", text
    for name in sorted(n for n in environ if n.startswith(_PREFIXES)):
        value = environ[name]
        lost = name.endswith("_PATH") and value and not Path(value).exists()
        yield name, *(("bad", f"{value} does not exist") if lost else ("ok", value or "(empty)"))


def caches(environ: Mapping[str, str]) -> _Found:
    """Yield the folders that keep kernels and tables: named by a variable, or a default."""
    home = home_folder()
    folders = {
        "tuned tables": user_path(),
        "cache": cache_folder(),
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_HOME") or home) / ".triton" / "cache",
        "temporary files": Path(tempfile.gettempdir()),
    }
    named = {n: Path(v) for n, v in environ.items() if n.endswith("_CACHE_DIR") and v}
    for name, path in {**folders, **named}.items():
        yield name, *_try_folder(path)
    tables = folders["tuned tables"]
    for file in sorted(tables.glob("[!.]*.json")) if tables.is_dir() else [tables]:
        try:
            if file.exists():
                table.read(file)
        except MoekitError as error:
            yield file.name, "bad", str(error)


def _try_folder(path: Path) -> tuple[str, str]:
    """Write to ``path``, or to the folder it would be made in; return ok or bad, and why."""
    place = path.parent if path.is_file() else path.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"moekit")
        free = shutil.disk_usage(place).free
    except OSError as error:
        why = error.strerror or error
        return "bad", (
            f"{path}: {why}; kernels would be compiled at every start: name a folder of yours by "
            "HOME, XDG_CACHE_HOME or the cache's own variable"
        )
    if free < _FEW_BYTES:
        return "bad", f"{path}: {free / 2**20:.0f} MiB free, at least {_FEW_BYTES >> 20} are needed"
    return "ok", str(path)


def _cuda_path() -> str:
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return os.pathsep.join(str(Path(home) / "bin") for home in homes if home)


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
