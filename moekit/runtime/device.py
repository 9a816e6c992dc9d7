"""The device that this thread launches kernels on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_HERE = nullcontext()


def is_elsewhere(x: object) -> bool:
    """Return whether x is a tensor on another device than the thread's current one."""
    device = getattr(x, "device", None)
    if not isinstance(device, torch.device) or device.type in ("cpu", "meta"):
        return False
    return device.index not in (None, torch.accelerator.current_device_index())


def on_device(x: object) -> AbstractContextManager[object]:
    """Make the device of tensor x the thread's current one, whose stream kernels are launched on.

    Operators of torch do so by themselves, kernels of Triton and of libraries do not. A new
    thread's current device is the first one, and a model may be spread over devices.
    """
    return torch.accelerator.device_index(x.device.index) if is_elsewhere(x) else _HERE  # type: ignore[attr-defined]
