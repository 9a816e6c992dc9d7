"""Options of the commands: what they have in common, and how their texts are read."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES

from .internals import DTYPES, SIMULATED
from .records import Settings


def positive(text: str) -> int:
    """Return a whole number above 0: the type of options that count."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def end(args: argparse.Namespace) -> float | None:
    """Return when --seconds are over by `time.monotonic`, if they were given."""
    return None if args.seconds is None else time.monotonic() + args.seconds


LAYER_EXPERTS = ("torch", "triton", "triton_batched", "deepgemm", "deepgemm_batched")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "shapes": {"metavar": "LIST", "help": "names (`bench --list-shapes`) or sizes E:K:H:I"},
    "sizes": {"metavar": "E:K:H", "help": "experts, top-k and hidden size"},
    "layer": {
        "metavar": "NAME",
        "help": "all experts of a layer: a name (`bench --list-shapes`) or sizes E:K:H:I",
    },
    "tokens": {"metavar": "LIST", "help": "in a call"},
    "quant": {"metavar": "LIST", "help": f"of {', '.join(SCHEMES)}"},
    "routing": {"metavar": "LIST", "help": f"of {', '.join(SIMULATED)}"},
    "dtype": {"choices": DTYPES, "help": "of x"},
    "device": {"help": "a torch device; default: this machine's accelerator, else its CPU"},
    "inputs": {
        "type": positive, "metavar": "N",
        "help": "different inputs and routings that a graph covers; more where their weights fit "
        "the L2 cache",
    },
    "replays": {"type": positive, "metavar": "N", "help": "turns"},
    "seed": {"type": int, "metavar": "N", "help": "of inputs and weights"},
    "experts": {
        "metavar": "LIST",
        "help": "backends; default: every installed one (with --layers of "
        f"{', '.join(LAYER_EXPERTS)}); none: ''",
    },
    "dispatcher": {"metavar": "NAME", "help": "what the experts run behind"},
    "baselines": {
        "action": "append", "metavar": "PATH",
        "help": "adapter file or folder of them (benchmarks/baselines); may be repeated",
    },
    "only-baselines": {"metavar": "LIST", "help": "of --baselines, these names only"},
    "measure-ceilings": {
        "action": "store_true",
        "help": "measure the roofline's rates; default: what is known for the device",
    },
    "batch-invariant": {
        "action": "store_true", "help": "also time each backend in batch-invariant mode"
    },
    "list-shapes": {"action": "store_true", "help": "print the named shapes, and stop"},
    "ep": {
        "type": positive, "metavar": "N",
        "help": "the experts of one of N ranks, for tokens most of whose choices are other ranks'; "
        "--shapes are whole layers",
    },
    "dispatchers": {"metavar": "LIST", "help": "default: every installed one that moves tokens"},
    "ranks": {
        "type": positive, "metavar": "N", "help": "default: one per GPU; without GPUs 2"
    },
    "capacity": {
        "type": positive, "metavar": "N",
        "help": "tokens of a rank that kernels are composed for, if no --tokens are more",
    },
    "seconds": {
        "type": float, "metavar": "S",
        "help": "begin no cell after S seconds; `tune` continues with the same command",
    },
    "markdown": {
        "type": Path, "metavar": "FILE", "help": "the report; default: standard output"
    },
    "json": {
        "type": Path, "metavar": "FILE", "help": "everything, rewritten after every cell"
    },
    "select": {"action": "store_true", "help": "run no tuners: measure, and fill the table"},
    "output": {
        "type": Path, "metavar": "FILE",
        "help": "the table; default: by device, in MOEKIT_TUNED or the user's cache",
    },
}  # fmt: skip
_ALL = {"dtype": "bfloat16", "device": None, "seed": 0}
EXPERTS: Mapping[str, Any] = {
    "shapes": "mixtral,qwen3-30b,dsv3-ep8", "tokens": "1,16,64,256,1024,4096,16384",
    "quant": "none", "inputs": 3, "replays": 10, "experts": None, "dispatcher": "local", **_ALL,
}  # fmt: skip
"""What `bench` and `tune` have in common: options, and their defaults."""
RUN: Mapping[str, Any] = {"routing": "uniform", "markdown": None, "json": None}
"""What all kinds of `bench` have."""
RANKS: Mapping[str, Any] = {"dispatchers": None, "ranks": None, "capacity": 8192, **RUN, **_ALL}


def add(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add these options with their defaults."""
    for name, default in defaults.items():
        given = dict(_OPTIONS[name])
        if default:
            given["help"] += "; default: %(default)s"
        parser.add_argument(f"--{name}", default=default, **given)


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
