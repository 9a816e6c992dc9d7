"""The arguments of `FusedMoE`: keywords become records, and a device gets its index."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch

from moekit.errors import InvalidProblem
from moekit.layer.parallelism import LayerParallelism
from moekit.layer.router import RoutingConfig
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import first_line

Record = TypeVar("Record", RoutingConfig, LayerParallelism)


def take_record(
    kind: type[Record], argument: str, given: Record | None, keywords: dict[str, Any]
) -> Record:
    """Return the record that is given, or one made of its fields, which leave ``keywords``."""
    names = [field.name for field in fields(kind) if field.name in keywords]
    if given is None:
        return kind(**{name: keywords.pop(name) for name in names})
    if names:
        raise InvalidProblem(
            f"{argument} and {', '.join(names)} are both given: set them in the {kind.__name__}, "
            f"or leave {argument} out"
        )
    return given


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; None means this machine's accelerator, else the CPU."""
    default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.device(default if device is None else device)
        if found.type == "cpu":
            return found
        module = torch.get_device_module(found)
        if not module.is_available():
            raise RuntimeError(f"torch sees no {found.type} device here")
        index = module.current_device() if found.index is None else found.index
        return torch.device(found.type, index)
    except Exception as error:  # each device type raises its own
        raise InvalidProblem(
            f"device={shown(device)}: {first_line(error)}; name a device of this machine, or leave "
            f"device out for {default}"
        ) from error
