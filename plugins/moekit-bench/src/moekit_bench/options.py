"""Options of the commands: what they have in common, and how their texts are read."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES

from .internals import DTYPES
from .records import Settings
from .shapes import ROUTINGS

S = TypeVar("S", bound=Settings)
N = TypeVar("N", int, float)


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return the type of an option that is a whole number within these bounds."""
    expected = f"a whole number from {least} to {most}"
    return lambda text: _number(text, int, expected, lambda found: least <= found <= most)


def seconds(text: str) -> float:
    return _number(text, float, "a number of seconds above 0", lambda found: 0 < found < math.inf)


def end(args: argparse.Namespace) -> float | None:
    """Return when --seconds are over by `time.monotonic`, if they were given."""
    return None if args.seconds is None else time.monotonic() + args.seconds


def percent(text: str) -> float:
    return _number(text, float, "a percentage of at least 0", lambda found: 0 <= found < math.inf)


def _number(text: str, read: Callable[[str], N], expected: str, fits: Callable[[N], bool]) -> N:
    with suppress(ValueError):
        if fits(found := read(text)):  # NaN fits nothing
            return found
    raise argparse.ArgumentTypeError(f"expected {expected} (got {text!r})")


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
        "--inputs", type=whole(1), default=inputs, metavar="N",
        help="different inputs and routings that a graph covers; more where their weights fit the "
        "L2 cache; default: %(default)s",
    )  # fmt: skip
    turns = "turns; default: %(default)s"
    add("--replays", type=whole(1), default=replays, metavar="N", help=turns)
    add("--seed", type=whole(-(2**31)), default=0, metavar="N")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that all modes of `bench` have: routings, and where a run goes."""
    add = parser.add_argument
    routings = f"of {', '.join(ROUTINGS)}; default: %(default)s"
    add("--routing", default="uniform", metavar="LIST", help=routings)
    add("--no-graph", action="store_true", help="no CUDA graphs: eager times only")
    add("--markdown", type=Path, metavar="FILE", help="the report; default: standard output")
    add("--json", type=Path, metavar="FILE", help="everything, rewritten after every cell")
    again = "measure nothing: render a recorded --json again"
    add("--from", dest="recorded", type=Path, metavar="FILE", help=again)


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


def settings(cls: type[S], args: argparse.Namespace, **more: Any) -> S:
    """Return the settings that have their names from options; ``more`` replaces some."""
    return cls(**{f.name: getattr(args, f.name) for f in fields(cls)} | more)
