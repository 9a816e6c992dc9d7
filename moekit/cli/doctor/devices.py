"""The doctor's checks of devices and of the links between them."""

from __future__ import annotations

import itertools
import platform
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


def _links(devices: Sequence[torch.device], count: int = 1 << 20) -> _Found:
    """Yield the copies between devices that do not arrive, or that all of them do."""
    wrong = 0
    for source, target in itertools.permutations(devices, 2):
        here = torch.arange(count, dtype=torch.int32, device=source)
        if not torch.equal(here.to(target).cpu(), here.cpu()):
            wrong += 1
            name = f"link {source.index}-{target.index}"
            yield name, "bad", "a copy arrived changed: peer access does not work"
    if not wrong:
        yield "links", "ok", "copies between all devices arrive"
