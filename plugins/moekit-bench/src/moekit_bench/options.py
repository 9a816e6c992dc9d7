"""Options of the commands: what they have in common, and how their texts are read."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection
from dataclasses import fields

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES

from .internals import DTYPES
from .records import Settings


def positive(text: str) -> int:
    """Return a whole number above 0: the type of options that count."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def end(args: argparse.Namespace) -> float | None:
    """Return when --seconds are over by `time.monotonic`, if they were given."""
    return None if args.seconds is None else time.monotonic() + args.seconds


def add_sweep(
    parser: argparse.ArgumentParser, *, tokens: str, quant: str, inputs: int, replays: int
) -> None:
    """Add the options of every command: over what it sweeps, and how it measures."""
    add = parser.add_argument
    schemes = f"of {', '.join(SCHEMES)}; default: %(default)s"
    add("--tokens", default=tokens, metavar="LIST", help="in a call; default: %(default)s")
    add("--quant", default=quant, metavar="LIST", help=schemes)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--device", help="a torch device; default: this machine's accelerator, else its CPU")
    add(
        "--inputs", type=positive, default=inputs, metavar="N",
        help="different inputs and routings that a graph covers; more where their weights fit the "
        "L2 cache; default: %(default)s",
    )  # fmt: skip
    turns = "turns; default: %(default)s"
    add("--replays", type=positive, default=replays, metavar="N", help=turns)
    add("--seed", type=int, default=0, metavar="N")


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def names_if_given(text: str | None) -> list[str] | None:
    """Return the parts of a list; None if the option was not given."""
    return None if text is None else names(text)


def choices(text: str, known: Collection[str], option: str) -> list[str]:
    """Return the parts of a list, all of which must be ``known``."""
    found = names(text)
    if not found or (unknown := [name for name in found if name not in known]):
        wrong = f"{', '.join(unknown)} is unknown" if found else "nothing is named"
        raise MoekitError(f"{option} {text!r}: {wrong}; choose from {', '.join(known)}")
    return found


def numbers(text: str, option: str) -> list[int]:
    """Return the parts of a list of positive whole numbers."""
    parts = names(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise MoekitError(
            f"{option} must be positive whole numbers, such as 1,16,64 (got {text!r})"
        )
    return [int(part) for part in parts]


def torch_device(name: str | None) -> torch.device:
    """Return the device of that name, or this machine's accelerator or CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name is None:
        return here
    instead = f"; leave out --device to use {here.type!r}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MoekitError(
            f"--device must be a device of torch on this machine (got {name!r}){instead}"
        ) from error
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count() if device.type == here.type else 0
    if (device.index or 0) >= count:
        raise MoekitError(
            f"device {name!r} was asked for, but torch sees {count or 'no'} {device.type.upper()} "
            f"device{'s' * (count > 1)} here{instead}"
        )
    return device


def settings(args: argparse.Namespace) -> Settings:
    """Return the settings that have their names from options."""
    given = vars(args)
    return Settings(**{f.name: given[f.name] for f in fields(Settings) if f.name in given})
