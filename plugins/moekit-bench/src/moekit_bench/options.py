"""Options of the commands: what they have in common, and how their texts are read."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES, reason_of

from .internals import DTYPES, SIMULATED
from .records import Settings


def positive(text: str) -> int:
    """Return a whole number above 0: the type of options that count."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _listed(name: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of option ``name``: a list of names, all of which must be ``known``."""

    def choices(text: str) -> list[str]:
        found = names(text)
        if not found or (unknown := [each for each in found if each not in known]):
            wrong = f"{', '.join(unknown)} is unknown" if found else "nothing is named"
            raise MoekitError(f"--{name} {text!r}: {wrong}; choose from {', '.join(known)}")
        return found

    return choices


def numbers(text: str) -> list[int]:
    """Return the parts of a list of positive whole numbers."""
    parts = names(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise MoekitError(
            f"--tokens must be positive whole numbers, such as 1,16,64 (got {text!r})"
        )
    return [int(part) for part in parts]


def _rooms(text: str) -> list[str]:
    """Return the parts of a list of N:RANK."""
    parts = names(text)
    if not all(part.count(":") == 1 and part.replace(":", "").isdecimal() for part in parts):
        raise MoekitError(f"--adapters must be N:RANK, such as 1:8,8:32 (got {text!r})")
    return parts


def end(args: argparse.Namespace) -> float | None:
    """Return when --seconds are over by `time.monotonic`, if they were given."""
    return None if args.seconds is None else time.monotonic() + args.seconds


LAYER_EXPERTS = ("torch", "triton", "triton_batched", "deepgemm", "deepgemm_batched")
# (type, metavar, help); bool: a flag; list: may be repeated.
_OPTIONS: Mapping[str, tuple[Any, str, str]] = {
    "shapes": (names, "LIST", "names (`bench --list-shapes`) or sizes E:K:H:I"),
    "layer": (
        str, "NAME", "all experts of a layer: a name (`bench --list-shapes`) or sizes E:K:H:I"
    ),
    "tokens": (numbers, "LIST", "in a call"),
    "quant": (_listed("quant", SCHEMES), "LIST", f"of {', '.join(SCHEMES)}"),
    "routing": (_listed("routing", SIMULATED), "LIST", f"of {', '.join(SIMULATED)}"),
    "dtype": (str, "NAME", f"of x: {', '.join(DTYPES)}"),
    "device": (str, "NAME", "of torch; default: this machine's accelerator, else its CPU"),
    "inputs": (
        positive, "N", "different inputs and routings that a graph covers; more where their "
        "weights fit the L2 cache"
    ),
    "replays": (positive, "N", "turns"),
    "seed": (int, "N", "of inputs and weights; default: 0"),
    "experts": (
        names, "LIST", "backends; default: every installed one (with --layers, of "
        f"{', '.join(LAYER_EXPERTS)}); none: ''"
    ),
    "baselines": (
        list, "PATH", "adapter file or folder of them (benchmarks/baselines); may be repeated"
    ),
    "only-baselines": (names, "LIST", "of --baselines, these names only"),
    "batch-invariant": (bool, "", "also time each backend in batch-invariant mode"),
    "adapters": (
        _rooms, "N:RANK", "also time each backend with N adapters (LoRA) of that rank, in turn for "
        "the tokens; a list, such as 1:8,8:32"
    ),
    "list-shapes": (bool, "", "print the named shapes, and stop"),
    "ep": (
        positive, "N", "the experts of one of N ranks, for tokens most of whose choices are other "
        "ranks'; --shapes are whole layers"
    ),
    "dispatchers": (names, "LIST", "default: every installed one that moves tokens"),
    "ranks": (positive, "N", "default: one per GPU; without GPUs 2"),
    "capacity": (
        positive, "N", "tokens of a rank that kernels are composed for, if no --tokens are more"
    ),
    "seconds": (float, "S", "begin no cell after S seconds; the same `tune` command continues"),
    "markdown": (Path, "FILE", "the report; default: standard output"),
    "json": (Path, "FILE", "everything, rewritten after every cell"),
    "select": (bool, "", "run no tuners: measure, and fill the table"),
    "output": (
        Path, "FILE", "the table; default: by device, in MOEKIT_TUNED or the user's cache"
    ),
}  # fmt: skip
_ALL = {"dtype": "bfloat16", "device": None, "seed": 0}
EXPERTS: Mapping[str, Any] = {
    "shapes": "mixtral,qwen3-30b,dsv3-ep8", "tokens": "1,16,64,256,1024,4096,16384",
    "quant": "none", "inputs": 3, "replays": 10, "experts": None, **_ALL,
}  # fmt: skip
"""Options of both `bench` and `tune`, and their defaults."""
RUN: Mapping[str, Any] = {"routing": "uniform", "markdown": None, "json": None}
"""Options of all kinds of `bench`."""
BASELINES: Mapping[str, Any] = {
    "baselines": [], "only-baselines": None, "adapters": [], "list-shapes": False,
}  # fmt: skip
"""Options of `bench` on one device."""
RANKS: Mapping[str, Any] = {
    "layer": "dsv3", "dispatchers": None, "ranks": None, "capacity": 8192, **RUN, **_ALL,
}  # fmt: skip


def add(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add these options with their defaults."""
    for name, default in defaults.items():
        kind, metavar, text = _OPTIONS[name]
        given: dict[str, Any] = {"type": kind, "metavar": metavar, "default": default}
        if kind is bool:
            given = {"action": "store_true"}
        elif kind is list:
            given |= {"type": str, "action": "append"}
        text += "; default: %(default)s" if default else ""
        parser.add_argument(f"--{name}", help=text, **given)


def torch_device(name: str | None) -> torch.device:
    """Return the device of that name, or this machine's accelerator or CPU."""
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name is None:
        return here
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MoekitError(
            f"--device must be a device of torch on this machine (got {name!r}: "
            f"{reason_of(error)}); leave out --device to use {here.type!r}"
        ) from error
    return device


def settings(args: argparse.Namespace) -> Settings:
    """Return the settings that have their names from options."""
    given = vars(args)
    if args.dtype not in DTYPES:
        raise MoekitError(f"--dtype must be one of {', '.join(DTYPES)} (got {args.dtype!r})")
    return Settings(**{f.name: given[f.name] for f in fields(Settings) if f.name in given})
