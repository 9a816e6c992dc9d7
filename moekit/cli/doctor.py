"""``python -m moekit doctor``: is this machine fit for what is installed, and if not, why not?

Unlike `plugins` and `explain` it tries things: it loads every backend that could serve this device,
compiles a kernel and writes to the caches. Nothing is left behind. Each plugin is loaded in a
process of its own, so that one that hangs, crashes or exits is a finding like any other.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import platform
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from moekit_bench.bench.environment import installed

import moekit
from moekit.discovery import entry_points as discovery
from moekit.discovery.specs import (
    CHECK_FAILED,
    BackendSpec,
    DispatcherSpec,
    ExpertsSpec,
    importable,
)
from moekit.errors import MoekitError
from moekit.problem import DTYPES, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.quant import SCHEMES
from moekit.selection.tuned import table
from moekit.untrusted import process as isolate
from moekit.untrusted.code import describe, message, printable

_NAME, _WIDTH = 30, 100
_FEW_BYTES = 1 << 30
_PREFIXES = ("MOEKIT_", "NCCL_", "NVSHMEM_", "GLOO_", "TRITON_", "CUDA_", "TORCH_NCCL_")


_Found = Iterator[tuple[str, str, str]]  # name, state, text of each finding of a group


@dataclass(frozen=True)
class Finding:
    """state: ok; no: it is not here or not for this machine, which is no fault; bad: a fault."""

    group: str
    name: str
    state: str
    text: str


def run(out: TextIO, *, as_json: bool = False, seconds: float = 120.0) -> int:
    """Print what was found to ``out``; return 0: no fault was found, or 1: some was.

    seconds: how long a plugin may take.
    """
    found: list[Finding] = []
    for finding in examine(seconds):
        if not as_json:  # at once: a library may take the process down
            if not found or found[-1].group != finding.group:
                print(f"{finding.group}:", file=out)
            print(_line(finding), file=out, flush=True)
        found.append(finding)
    faults = [finding for finding in found if finding.state == "bad"]
    if as_json:
        listed = [asdict(finding) for finding in found]
        print(json.dumps({"moekit": moekit.__version__, "findings": listed}, indent=2), file=out)
    else:
        print(f"{len(faults)} faults" if len(faults) != 1 else "1 fault", file=out)
    return int(bool(faults))


def _line(finding: Finding) -> str:
    text = f"  {finding.state:<3} {finding.name:<{_NAME}} {finding.text}".rstrip()
    indent = " " * (_NAME + 7)
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def examine(seconds: float) -> Iterator[Finding]:
    """Everything, in the order in which it is tried.

    Backends come before devices, as a process that has initialized CUDA cannot be forked.
    """
    for group, look in (
        ("versions", _versions),
        ("backends", lambda: _backends(seconds)),
        ("devices", _devices),
        ("triton", _triton),
        ("network", lambda: _network(os.environ)),
        ("caches", lambda: _caches(os.environ)),
    ):
        try:
            for name, state, text in look():
                yield Finding(group, name, state, printable(text))
        except Exception as error:  # the other groups may tell why
            yield Finding(group, "looking", "bad", describe(error))


def _versions() -> _Found:
    for name, version in (
        ("moekit", moekit.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("cuda of torch", torch.version.cuda or ""),
        ("triton", installed("triton")),
    ):
        yield name, "ok" if version else "no", str(version) or "none"
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path=_cuda_path())
    text = compiler or "none; libraries that compile at first use need it (PATH, CUDA_HOME)"
    yield "nvcc", "ok" if compiler else "no", text


def _devices() -> _Found:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        text = f"{platform.machine()}, {torch.get_num_threads()} threads; torch sees no accelerator"
        yield "cpu", "ok", text
        return
    count = torch.accelerator.device_count()
    for index in range(count):
        device = torch.device(accelerator.type, index)
        try:
            spec = DeviceSpec.of(device)
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
            works = bool((ones @ ones == 64).all())
            memory = ""
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info(device)
                memory = f", {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            text = f"{spec.name}, {spec}{memory}" if works else f"{spec.name}: 1 * 1 is not 1"
        except Exception as error:  # a driver fails in every imaginable way
            works, text = False, f"{type(error).__name__}: {error}"
        yield str(device), "ok" if works else "bad", text
    if accelerator.type == "cuda" and count > 1:
        pairs = itertools.permutations(range(count), 2)
        apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        text = "none between " + ", ".join(apart) if apart else "between all"
        yield "peer access", "no" if apart else "ok", text
        yield from _links([torch.device("cuda", i) for i in range(count)])


def _links(devices: Sequence[torch.device], nbytes: int = 1 << 27) -> _Found:
    """How fast a copy from each device to each other one is, and whether it arrives."""
    rates = {}
    for source, target in itertools.permutations(devices, 2):
        pair = f"{source.index}-{target.index}"
        try:
            rate = _copy_rate(source, target, nbytes)
        except Exception as error:  # no memory is left there, say
            yield f"link {pair}", "no", f"not timed: {type(error).__name__}: {error}"
            continue
        if rate is None:
            yield f"link {pair}", "bad", "a copy arrived changed: peer access does not work"
        else:
            rates[pair] = rate
    if rates:
        slowest, fastest = (choose(rates, key=lambda pair: rates[pair]) for choose in (min, max))
        least = f"{rates[slowest]:.0f} ({slowest})"
        most = f"{rates[fastest]:.0f} GB/s ({fastest})"
        yield "links", "ok", f"copies of {nbytes >> 20} MiB at {least} to {most}"


def _copy_rate(source: torch.device, target: torch.device, nbytes: int) -> float | None:
    """GB/s; None where what arrives is not what was sent."""
    here = torch.arange(nbytes // 4, dtype=torch.int32, device=source)
    there = torch.zeros_like(here, device=target)
    there.copy_(here)  # the first sets up the way
    if not torch.equal(there, torch.arange(nbytes // 4, dtype=torch.int32, device=target)):
        return None
    seconds = []
    for _ in range(3):
        _wait_for(source, target)
        start = time.perf_counter()
        there.copy_(here)
        _wait_for(source, target)
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


def _wait_for(*devices: torch.device) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def _backends(seconds: float) -> _Found:
    """The findings of each plugin, told by a process of its own, and whose names clash."""
    device, fault = _device(seconds)
    if fault:
        yield "device", "bad", f"asking torch for this machine's device: {fault}"
    found, unknown = discovery.sources(os.environ)
    offers: list[tuple[str, list[discovery.Offer]]] = []
    for source, blocked in found:
        owner = f"{source.distribution} {source.version}"
        offers.append((owner, []))
        if blocked:
            yield source.name, "no", f"blocked: {blocked}"
            continue
        outcome = isolate.run(partial(_examine_plugin, source, device), seconds)
        step = "it was loaded"
        for kind, *texts in outcome.answers:
            if kind == "step" and len(texts) == 1:
                step = texts[0]
            elif kind == "broken" and len(texts) == 1:
                yield source.name, "bad", f"broken: {texts[0]}"
            elif kind == "offer" and len(texts) == 2:
                offers[-1][1].append((texts[0], texts[1]))
            elif kind == "finding" and len(texts) == 3 and texts[1] in ("ok", "no", "bad"):
                yield texts[0], texts[1], f"{texts[2]} ({owner})"
        if outcome.fault:
            yield source.name, "bad", f"while {step}: {outcome.fault} ({owner})"
    for (source, _), (reason, _) in zip(found, discovery.clashes(offers), strict=True):
        if reason:
            yield source.name, "bad", f"clash: {reason}"
    for state in unknown:
        yield state.name, "bad", f"{state.state}: {state.reason}"


def _examine_plugin(source: discovery.Source, device: DeviceSpec, tell: isolate.Tell) -> None:
    """Tell what `_backends` reads."""
    state = discovery.probe(source)
    if state.state != "ok":
        tell("broken", state.reason)
    for spec in state.backends:
        tell("offer", spec.kind, spec.name)
    for spec in state.backends:
        tell("step", f"{spec.kind} {spec.name!r} was tried")
        tell("finding", spec.name, *_try_backend(spec, device))


def _device(seconds: float) -> tuple[DeviceSpec, str]:
    """This machine's device, asked for in another process: this one is to be forked again."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return DeviceSpec.detect(), ""
    outcome = isolate.run(_tell_device, seconds)
    for answer in outcome.answers:
        with suppress(ValueError):
            kind, capability, name, arch = answer
            major, minor = map(int, capability.split(".")) if capability else (0, 0)
            return DeviceSpec(kind, (major, minor) if capability else None, name, arch), ""
    return DeviceSpec("cpu"), outcome.fault


def _tell_device(tell: isolate.Tell) -> None:
    device = DeviceSpec.detect()
    capability = ".".join(map(str, device.capability or ()))
    tell(device.type, capability, device.name, device.arch)


def _try_backend(spec: BackendSpec, device: DeviceSpec) -> tuple[str, str]:
    """Loads a backend if it could serve some problem here: ok, no or bad; what it serves, or why
    not."""
    served, reasons = [], dict[str, None]()
    for problem in _problems(spec, device):
        why_not = spec.unsupported(problem)
        reasons.update(dict.fromkeys(why_not))
        if not why_not:
            served.append(problem.quant.name)
    if failed := [reason for reason in reasons if reason.startswith(CHECK_FAILED)]:
        return "bad", "; ".join(failed)
    if not served:
        return "no", "; ".join(reasons)
    assert isinstance(spec, DispatcherSpec | ExpertsSpec)
    try:
        spec.load()
    except MoekitError as error:
        return "bad", message(error)
    if isinstance(spec, DispatcherSpec):
        return "ok", "loads"
    if len(served) == len(SCHEMES):
        return "ok", "serves every scheme"
    refused = ", ".join(sorted(spec.schemes - set(served)))
    detail = f"serves schemes: {', '.join(served)}"
    return "ok", detail + (f"; refuses {refused}" if refused else "")


def _problems(spec: BackendSpec, device: DeviceSpec) -> Iterator[MoEProblem]:
    """A harmless one for each scheme (a dispatcher: one), of sizes that suit everybody's tiles."""
    moves = isinstance(spec, DispatcherSpec) and spec.moves_tokens
    parallel = ParallelConfig(ep_size=2) if moves else ParallelConfig()
    dtype = next(d for name, d in DTYPES.items() if name in spec.dtypes)
    for scheme in sorted(spec.schemes) if isinstance(spec, ExpertsSpec) else ["none"]:
        yield MoEProblem(
            num_experts=8, top_k=2, hidden_size=2048, intermediate_size=1024, dtype=dtype,
            quant=scheme, max_num_tokens=64, parallel=parallel, device=device,
        )  # fmt: skip


def _triton() -> _Found:
    yield "kernel", *_try_triton()


def _try_triton() -> tuple[str, str]:
    """Compiles and runs a kernel, as the first call of every Triton backend does."""
    if not importable("triton"):
        return "no", "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        return "no", "no GPU to compile for (TRITON_INTERPRET=1 runs kernels on the CPU, slowly)"
    begin = time.monotonic()
    try:
        right = _add_one("cpu" if interpreted else "cuda")
    except Exception as error:  # a missing C compiler, a wrong driver, an unwritable cache
        return "bad", f"{type(error).__name__}: {error}"
    if not right:
        return "bad", "x + 1 came out wrong"
    return "ok", "interpreted" if interpreted else f"compiled in {time.monotonic() - begin:.1f} s"


def _add_one(device: str) -> bool:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = x_ptr + tl.arange(0, BLOCK)
        tl.store(place, tl.load(place) + 1)

    x = torch.arange(64, dtype=torch.float32, device=device)
    kernel[(1,)](x, BLOCK=64)
    return torch.equal(x.cpu(), torch.arange(1, 65, dtype=torch.float32))


def _network(environ: Mapping[str, str]) -> _Found:
    """What ranks talk over. Hints: a machine of one GPU needs nothing of it."""
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        nccl = ".".join(map(str, version())) if torch.cuda.is_available() else ""
        yield "NCCL", "ok", nccl or "in torch"
    else:
        yield "NCCL", "no", "not in this torch: ranks use gloo"
    distributions = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
    nvshmem = [f"{name} {installed(name)}" for name in distributions if installed(name)]
    yield "NVSHMEM", "ok" if nvshmem else "no", ", ".join(nvshmem) or "none"
    yield from _cards(Path("/sys/class/infiniband"), Path("/proc/modules"))
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
        yield name, *(("bad", f"{value} is not there") if lost else ("ok", value or "(empty)"))


def _cards(folder: Path, modules: Path) -> _Found:
    """RDMA network cards: what ranks on several hosts want."""
    cards = sorted(folder.iterdir()) if folder.is_dir() else []
    if not cards:
        text = "none: ranks of several hosts would talk over TCP"
        yield "RDMA cards", "no", text
        return
    states = {}
    for card in cards:
        ports = sorted(card.glob("ports/*/state"))
        states[card.name] = ", ".join(port.read_text().split(":")[-1].strip() for port in ports)
    active = any("ACTIVE" in state for state in states.values())
    text = "; ".join(f"{name} {state}" for name, state in states.items())
    yield "RDMA cards", "ok" if active else "no", text
    loaded = modules.read_text() if modules.is_file() else ""
    peer = [name for name in ("nvidia_peermem", "gdrdrv") if name in loaded]
    text = ", ".join(peer) or "neither nvidia_peermem nor gdrdrv: cards cannot read GPU memory"
    yield "GPUDirect", "ok" if peer else "no", text


def _caches(environ: Mapping[str, str]) -> _Found:
    """Where kernels and tables are kept. A folder that is named by a variable, or a default."""
    home = Path.home()
    folders = {
        "tuned tables": table.user_path(environ),
        "cache": Path(environ.get("XDG_CACHE_HOME") or home / ".cache"),
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_HOME") or home) / ".triton" / "cache",
        "temporary files": Path(tempfile.gettempdir()),
    }
    named = {n: Path(v) for n, v in environ.items() if n.endswith("_CACHE_DIR") and v}
    for name, path in {**folders, **named}.items():
        yield name, *_try_folder(path)


def _try_folder(path: Path) -> tuple[str, str]:
    """Writes to it, or where it would be made: ok or bad; where, or why not."""
    place = path.parent if path.is_file() else path.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"moekit")
        free = shutil.disk_usage(place).free
    except OSError as error:
        return "bad", f"{path}: {error.strerror or error}; kernels would be compiled at every start"
    if free < _FEW_BYTES:
        return "bad", f"{path}: {free / 2**20:.0f} MiB free, want {_FEW_BYTES >> 20}"
    return "ok", str(path)


def _cuda_path() -> str:
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return os.pathsep.join(str(Path(home) / "bin") for home in homes if home)
