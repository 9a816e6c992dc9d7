"""``python -m moekit bench``: time experts, their training (--train), dispatchers (--dispatch) or
whole layers (--layers)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, check_writable, registry, replace_file

from . import options
from .dispatch import measure_dispatch
from .environment import command
from .experts import ExpertsSweep
from .implementations import Implementation, backends, baselines, beside, unnamed
from .internals import named
from .layers import measure_layers
from .limits import known_ceilings
from .ranks import RanksSweep
from .records import ADAPTERS, INVARIANT
from .report import markdown
from .shapes import SHAPES, shape
from .sweep import Sweep


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 if every cell has a right result, with --dispatch
    and --layers if all results are right, else 1. Raises MoekitError for a wrong argument."""
    mode = _MODES[next((word for word in argv if word in _MODES), "")]
    parser = argparse.ArgumentParser(
        "python -m moekit bench", description=f"{mode.text} See docs/bench.md.", allow_abbrev=False
    )
    kinds = parser.add_mutually_exclusive_group()
    for option, kind in list(_MODES.items())[1:]:
        text = f"{kind.text} `{option} --help` has the options."
        kinds.add_argument(option, action="store_true", help=text)
    options.add(parser, mode.options)
    parser.set_defaults(batch_invariant=False, adapters=())
    args = parser.parse_args(argv)
    if getattr(args, "list_shapes", False):
        print(_shape_list())
        return 0
    return _run(mode, args, command("bench", *argv))


def _run(mode: _Mode, args: argparse.Namespace, command: str) -> int:
    for file in filter(None, (args.json, args.markdown)):
        check_writable(file)
    sweep = mode.sweep(args, command)

    def keep(_: object = None) -> None:
        if args.json is not None:
            sweep.run.write(args.json)
        if args.markdown is not None:
            replace_file(args.markdown, markdown(sweep.run))

    sweep.keep = keep
    sweep.measure()
    keep()
    if args.markdown is None:
        print(markdown(sweep.run), end="")
    return int(not (sweep.complete and sweep.succeeded))


# -- experts ----------------------------------------------------------------------------------


def _experts(args: argparse.Namespace, command: str, training: bool = False) -> ExpertsSweep:
    asked = unnamed(training) if args.experts is None else args.experts
    modes = [*[INVARIANT] * args.batch_invariant, *(f"{ADAPTERS} {each}" for each in args.adapters)]
    found = backends(beside(asked, modes))
    found += baselines(args.baselines, args.only_baselines, modes)
    return experts_sweep(args, found, command, training)


def experts_sweep(
    args: argparse.Namespace,
    implementations: Sequence[Implementation],
    command: str,
    training: bool = False,
) -> ExpertsSweep:
    """Return the sweep that `options.EXPERTS`, --routing and --ep describe."""
    device = options.torch_device(args.device)
    ceilings = known_ceilings(DeviceSpec.of(device).name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if not args.shapes:
        raise MoekitError("--shapes must name at least one shape")
    return ExpertsSweep(
        shapes=[shape(text) for text in args.shapes],
        implementations=implementations,
        device=device,
        ceilings=ceilings,
        training=training,
        **_swept(args, command),
    )


def _shape_list() -> str:
    return "\n".join(
        f"{s.name:<14} E {s.num_experts:<4} K {s.top_k:<2} H {s.hidden_size:<5} "
        f"I {s.intermediate_size:<6} {s.activation:<10} {s.source}"
        for s in SHAPES.values()
    )


# -- over ranks -------------------------------------------------------------------------------


def _dispatch(args: argparse.Namespace, command: str) -> RanksSweep:
    over = _over_ranks(args, command)
    if args.dispatchers and (fused := [spec.name for spec in over["dispatchers"] if spec.fused]):
        raise MoekitError(f"{fused[0]} is a fused kernel: time it with --layers")
    over["dispatchers"] = [spec for spec in over["dispatchers"] if not spec.fused]
    return RanksSweep(mode="dispatch", measure_on_rank=measure_dispatch, **over)


def layers_sweep(args: argparse.Namespace, command: str = "") -> RanksSweep:
    """Return the sweep that the options of `bench --layers` describe."""
    default = [name for name in options.LAYER_EXPERTS if name in registry().experts]
    experts = default if args.experts is None else args.experts
    if not experts:
        raise MoekitError("nothing to measure: name --experts")
    backends(experts)  # raises for a name that means nothing
    return RanksSweep(
        mode="layers",
        measure_on_rank=measure_layers,
        experts=beside(experts) if args.batch_invariant else experts,
        end=options.end(args),
        **_over_ranks(args, command),
    )


def _over_ranks(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the fields of `RanksSweep` that options hold for all kinds."""
    dispatchers = [spec for spec in registry().dispatchers.values() if spec.moves_tokens]
    if args.dispatchers is not None:
        dispatchers = [named(name, registry().dispatcher) for name in args.dispatchers]
    if not dispatchers:
        raise MoekitError("no dispatcher to measure: name --dispatchers")
    return {
        "shape": shape(args.layer),
        "dispatchers": dispatchers,
        "device": DeviceSpec.of(options.torch_device(args.device)),
        "asked": args.ranks,
        "capacity": args.capacity,
        **_swept(args, command),
    }


def _swept(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the fields of `Sweep` that options hold for all kinds."""
    return {
        "schemes": args.quant,
        "routings": args.routing,
        "tokens": args.tokens,
        "settings": options.settings(args),
        "command": command,
    }


@dataclass(frozen=True)
class _Mode:
    """A kind of measurement: its options with their defaults, and its sweep."""

    text: str
    options: Mapping[str, Any]
    sweep: Callable[[argparse.Namespace, str], Sweep]


_MODES = {
    "": _Mode(
        "Time experts backends and baselines on the whole routed-experts block, each checked "
        "against the fp32 oracle.",
        {
            **options.EXPERTS, **options.RUN, **options.BASELINES, "batch-invariant": False, "ep": 1
        },
        _experts,
    ),
    "--train": _Mode(
        "Time forward and backward of the whole routed-experts block, each gradient checked "
        "against autograd of the fp32 oracle.",
        {
            **options.EXPERTS, **options.RUN, "shapes": "qwen3-30b,olmoe,mixtral,dsv3-ep8",
            "tokens": "4096,16384", **options.BASELINES,
        },
        partial(_experts, training=True),
    ),
    "--dispatch": _Mode(
        "Time dispatchers without experts, over tokens on each rank; each is checked.",
        {
            "tokens": "1,4,16,64,128,256,512,1024,2048,4096,8192",
            "quant": "none", "inputs": 3, "replays": 10, **options.RANKS,
        },
        _dispatch,
    ),
    "--layers": _Mode(
        "Time whole layers over ranks, every dispatcher with every experts backend, each checked "
        "against the fp32 oracle.",
        {
            "experts": None, "tokens": "1,16,128,1024,4096",
            "quant": "none,fp8_block", "inputs": 2, "replays": 5, "batch-invariant": False,
            "seconds": None, **options.RANKS,
        },
        layers_sweep,
    ),
}  # fmt: skip
