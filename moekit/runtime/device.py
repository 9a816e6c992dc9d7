"""The device that this thread launches kernels on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_HERE = nullcontext()


def elsewhere(x: object) -> int | None:
    """Return the index of the device x, or of tensor x, unless it is the thread's current one.

    None also for CPUs, for devices without an index, and for what is no tensor and no device.
    """
    device = getattr(x, "device", x)
    if not isinstance(device, torch.device) or device.index is None or device.type == "cpu":
        return None
    return None if device.index == torch.accelerator.current_device_index() else device.index


def on_device(x: object) -> AbstractContextManager[object]:
    """Make the device x, or the device of tensor x, the thread's current one, for kernels.

    Operators of torch do so by themselves, kernels of Triton and of libraries do not. A new
    thread's current device is the first one, and a model may be spread over devices.
    """
    # Compiled code has no kernels but its own, which run on the device of their tensors.
    index = None if torch.compiler.is_compiling() else elsewhere(x)
    return _HERE if index is None else torch.accelerator.device_index(index)
