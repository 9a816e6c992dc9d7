"""The doctor's checks of devices and of the links between them."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Iterator, Sequence

import torch

from moekit.problem import DeviceSpec

_Found = Iterator[tuple[str, str, str]]  # name, state and text of each finding


def examine() -> _Found:
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


def _links(devices: Sequence[torch.device], nbytes: int = 1 << 27) -> _Found:
    """Yield how fast copies between devices are, and those that do not arrive."""
    rates = {}
    for source, target in itertools.permutations(devices, 2):
        link = f"{source.index}-{target.index}"
        try:
            rate = _copy_rate(source, target, nbytes)
        except Exception as error:  # for example, no memory is left there
            yield f"link {link}", "no", f"not timed: {type(error).__name__}: {error}"
            continue
        if rate is None:
            yield f"link {link}", "bad", "a copy arrived changed: peer access does not work"
        else:
            rates[link] = rate
    if rates:
        slowest, fastest = (choose(rates, key=lambda link: rates[link]) for choose in (min, max))
        least = f"{rates[slowest]:.0f} ({slowest})"
        most = f"{rates[fastest]:.0f} GB/s ({fastest})"
        yield "links", "ok", f"copies of {nbytes >> 20} MiB at {least} to {most}"


def _copy_rate(source: torch.device, target: torch.device, nbytes: int) -> float | None:
    """Return GB/s; None if what arrives differs from what was sent."""
    here = torch.arange(nbytes // 4, dtype=torch.int32, device=source)
    there = torch.zeros_like(here, device=target)
    there.copy_(here)  # the first copy sets up the connection
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
        torch.get_device_module(device).synchronize(device)
