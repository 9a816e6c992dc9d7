"""The kind of device that a problem runs on."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import torch

from moekit.errors import InvalidProblem
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import first_line

# The devices that backends declare: see `DeviceSpec.meets`.
DEVICE_PATTERN = re.compile(
    r"any|(?P<arch>gfx[0-9a-f]+)|(?P<type>[a-z]+)((?P<op>>=|==)(?P<major>\d+)\.(?P<minor>\d+))?"
)


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device: torch's ``type`` and, if it has one, a compute capability.

    AMD's GPUs, which torch also calls "cuda", have an ``arch`` such as "gfx942" instead of a
    capability. An explicit spec asks about another machine's device.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""
    arch: str = ""

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Return the spec for a text.

        Examples: ``"cpu"``, ``"xpu"``, ``"sm90"`` (CUDA compute capability 9.0), ``"gfx942"``
        (AMD), ``"cuda"`` and ``"cuda:1"`` (this machine's).
        """
        if match := re.fullmatch(r"(gfx[0-9a-f]+)(:.*)?", text):
            return cls("cuda", arch=match[1])
        if match := re.fullmatch(r"sm_?(1?\d)(\d)a?", text):
            return cls("cuda", (int(match[1]), int(match[2])))
        if re.fullmatch(r"cuda(:\d+)?", text):
            return cls.of(torch.device(text))
        with suppress(RuntimeError):
            if torch.device(text).type == text:
                return cls(text)
        raise InvalidProblem(
            f"device {shown(text)} is not understood; expected a torch device ('cpu', 'cuda') or "
            "an architecture: 'sm90' for H100 and H200, 'sm100' for B200, 'gfx942' for MI300"
        )

    @classmethod
    def detect(cls) -> DeviceSpec:
        """Return this machine's accelerator if torch sees one, else its CPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return cls("cpu") if accelerator is None else cls.of(accelerator)

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpec:
        """Return the spec of a torch device of this machine. Raises InvalidProblem if absent."""
        if device.type == "cpu":
            return cls("cpu")
        try:
            module = torch.get_device_module(device)
            name = getattr(module, "get_device_name", lambda _: "")(device)
        except Exception as error:  # each device type has its own
            raise InvalidProblem(
                f"device {str(device)!r} was asked for, but torch sees none here "
                f"({type(error).__name__}: {first_line(error)}); name a device that is "
                "here, or ask about another machine by its architecture, as in 'sm90'"
            ) from error
        if device.type == "cuda" and torch.version.hip:
            arch = module.get_device_properties(device).gcnArchName.partition(":")[0]
            return cls(device.type, None, str(name), arch)
        capability = getattr(module, "get_device_capability", lambda _: None)(device)
        pair = tuple(capability) if isinstance(capability, tuple) else None
        return cls(device.type, pair, str(name))

    def meets(self, wanted: str) -> bool:
        """Return whether this device is ``wanted``.

        wanted: "any", a type, ``"cuda>=9.0"``, ``"cuda==9.0"`` or ``"gfx942"``.
        """
        match = DEVICE_PATTERN.fullmatch(wanted)
        assert match is not None, wanted  # specs are checked when they are made
        if match["arch"] or wanted == "any":
            return wanted in ("any", self.arch)
        if match["op"] is None:
            return self.type == wanted
        if self.type != match["type"] or self.capability is None:
            return False
        least = (int(match["major"]), int(match["minor"]))
        return self.capability == least or (match["op"] == ">=" and self.capability > least)

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.type} {self.arch}".strip()
        return f"{self.type} sm{self.capability[0]}{self.capability[1]}"
