"""What the stand-ins for vendors' libraries share."""

from __future__ import annotations

import functools
from typing import Any

import torch


def on_cpu(function: Any) -> Any:
    """Put a library's tensors on its device, even where torch has another default device."""

    @functools.wraps(function)
    def without_default(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return without_default
