"""``python -m moekit bench``: time experts, dispatchers (--dispatch) or whole layers (--layers)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES, DeviceSpec, check_writable, registry, replace_file

from . import options
from .dispatch import measure_dispatch
from .environment import command
from .experts import ExpertsSweep
from .implementations import Implementation, backends, baselines, beside, unnamed
from .layers import measure_layers
from .limits import known_ceilings, measure_ceilings
from .options import names, names_if_given, numbers, positive
from .ranks import RanksSweep
from .report import markdown
from .shapes import ROUTINGS, SHAPES, Shape, shape
from .sweep import Sweep

_IN_MODE = "also time each backend in batch-invariant mode"
_LAYER_EXPERTS = "torch,triton,triton_batched,deepgemm,deepgemm_batched"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0: every cell has a right result (with --dispatch and --layers: all results are right),
        1: not so.

    Raises:
        MoekitError: An argument is wrong, or a file cannot be written.
    """
    program = "python -m moekit bench"
    modes = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    which = modes.add_mutually_exclusive_group()
    for option, mode in list(_MODES.items())[1:]:
        text = f"{mode.text} `{option} --help` has the options."
        which.add_argument(option, dest="mode", action="store_const", const=option, help=text)
    found, rest = modes.parse_known_args(argv)
    words, mode = ["bench", *filter(None, [found.mode])], _MODES[found.mode or ""]
    parser = argparse.ArgumentParser(
        prog=" ".join(["python -m moekit", *words]),
        description=f"{mode.text} See docs/bench.md.",
        parents=[] if found.mode else [modes],
    )
    mode.add_options(parser)
    args = parser.parse_args(rest)
    if getattr(args, "list_shapes", False):
        print(_shape_list())
        return 0
    return _run(mode, args, command(*words, *rest))


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
    if sweep.leader:
        keep()
        if args.markdown is None:
            print(markdown(sweep.run), end="")
    return int(not (sweep.complete and sweep.succeeded))


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that all modes have: routings, and where a run goes."""
    add = parser.add_argument
    routings = f"of {', '.join(ROUTINGS)}; default: %(default)s"
    add("--routing", default="uniform", metavar="LIST", help=routings)
    add("--markdown", type=Path, metavar="FILE", help="the report; default: standard output")
    add("--json", type=Path, metavar="FILE", help="everything, rewritten after every cell")


# -- experts ----------------------------------------------------------------------------------


def add_experts_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options that `bench` and `tune` share."""
    add = parser.add_argument
    add(
        "--shapes", default="mixtral,qwen3-30b,dsv3-ep8", metavar="LIST",
        help="names (`bench --list-shapes`) or sizes E:K:H:I; default: %(default)s",
    )  # fmt: skip
    tokens = "1,16,64,256,1024,4096,16384"
    options.add_sweep(parser, tokens=tokens, quant="none", inputs=3, replays=10)
    add(
        "--experts", metavar="LIST",
        help="backends; default: every installed one that supports the problem; none: ''",
    )  # fmt: skip
    add("--dispatcher", default="local", metavar="NAME", help="default: %(default)s")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    add_experts_sweep(parser)
    _add_run(parser)
    add = parser.add_argument
    add(
        "--ep", type=positive, default=1, metavar="N",
        help="the experts of one of N ranks, for tokens most of whose choices are other ranks'; "
        "--shapes are whole layers",
    )  # fmt: skip
    add(
        "--baselines", action="append", default=[], metavar="PATH",
        help="adapter file or folder of them (benchmarks/baselines); may be repeated",
    )  # fmt: skip
    add("--only-baselines", metavar="LIST", help="of --baselines, these names only")
    add(
        "--measure-ceilings", action="store_true",
        help="measure the roofline's rates; default: what is known for the device",
    )  # fmt: skip
    add("--batch-invariant", action="store_true", help=_IN_MODE)
    add("--list-shapes", action="store_true", help="print the named shapes, and stop")


def _experts(args: argparse.Namespace, command: str) -> ExpertsSweep:
    asked = unnamed() if args.experts is None else names(args.experts)
    found = backends(beside(asked) if args.batch_invariant else asked, args.dispatcher)
    found += baselines(args.baselines, names_if_given(args.only_baselines))
    return experts_sweep(args, found, command)


def experts_sweep(
    args: argparse.Namespace, implementations: Sequence[Implementation], command: str
) -> ExpertsSweep:
    """Return the sweep that the options of `add_experts_sweep`, --routing, --ep and
    --measure-ceilings describe."""
    registry().dispatcher(args.dispatcher)  # raises an error that lists the names
    device = options.torch_device(args.device)
    ceilings = known_ceilings(DeviceSpec.of(device).name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    shapes = [shape(text) for text in names(args.shapes)]
    if not shapes:
        raise MoekitError("--shapes must name at least one shape")
    return ExpertsSweep(
        shapes=shapes,
        implementations=implementations,
        device=device,
        ceilings=measure_ceilings(device) if args.measure_ceilings else ceilings,
        **_swept(args, command),
    )


def _shape_list() -> str:
    return "\n".join(
        f"{s.name:<14} E {s.num_experts:<4} K {s.top_k:<2} H {s.hidden_size:<5} "
        f"I {s.intermediate_size:<6} {s.activation:<10} {s.source}"
        for s in SHAPES.values()
    )


# -- over ranks -------------------------------------------------------------------------------


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dispatchers", metavar="LIST", help="default: every installed one that moves tokens")
    add("--ranks", type=positive, metavar="N", help="default: one per GPU; without GPUs 2")
    add(
        "--capacity", type=positive, default=8192, metavar="N",
        help="tokens of a rank that kernels are composed for, if no --tokens are more; default: "
        "%(default)s",
    )  # fmt: skip
    _add_run(parser)


def _add_dispatch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", default="256:8:7168", metavar="E:K:H", help="default: %(default)s"
    )
    tokens = "1,4,16,64,128,256,512,1024,2048,4096,8192"
    options.add_sweep(parser, tokens=tokens, quant="none", inputs=3, replays=10)
    _add_ranks(parser)


def _dispatch(args: argparse.Namespace, command: str) -> RanksSweep:
    sizes = numbers(args.sizes.replace(":", ","), "--sizes")
    if len(sizes) != 3:
        raise MoekitError(
            f"--sizes must be EXPERTS:TOP_K:HIDDEN, as in 256:8:7168 (got {args.sizes})"
        )
    layer = Shape(sizes[0], sizes[1], sizes[2], sizes[2], args.sizes)
    return RanksSweep(
        mode="dispatch", measure_on_rank=measure_dispatch, shape=layer, **_over_ranks(args, command)
    )


def _add_layers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--layer", default="dsv3", metavar="NAME",
        help="all experts of a layer: a name (`bench --list-shapes`) or sizes E:K:H:I",
    )  # fmt: skip
    add("--experts", metavar="LIST", help=f"default: those installed of {_LAYER_EXPERTS}")
    tokens = "1,16,128,1024,4096"
    options.add_sweep(parser, tokens=tokens, quant="none,fp8_block", inputs=2, replays=5)
    add("--batch-invariant", action="store_true", help=_IN_MODE)
    add("--seconds", type=float, metavar="S", help="begin no cell after this")
    _add_ranks(parser)


def layers_sweep(args: argparse.Namespace, command: str = "") -> RanksSweep:
    """Return the sweep that the options of `bench --layers` describe."""
    default = [name for name in names(_LAYER_EXPERTS) if name in registry().experts]
    experts = default if args.experts is None else names(args.experts)
    if not experts:
        raise MoekitError("nothing to measure: name --experts")
    backends(experts)  # raises for a name that means nothing
    return RanksSweep(
        mode="layers",
        measure_on_rank=measure_layers,
        shape=shape(args.layer),
        experts=beside(experts) if args.batch_invariant else experts,
        end=options.end(args),
        **_over_ranks(args, command),
    )


def _over_ranks(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the fields of `RanksSweep` that options hold for all kinds."""
    known, asked = registry(), names_if_given(args.dispatchers)
    dispatchers = [spec for spec in known.dispatchers.values() if spec.moves_tokens]
    if asked is not None:
        dispatchers = [known.dispatcher(name) for name in asked]
    if not dispatchers:
        raise MoekitError("no dispatcher to measure: name --dispatchers")
    return {
        "dispatchers": dispatchers,
        "device": DeviceSpec.of(options.torch_device(args.device)),
        "asked": args.ranks,
        "capacity": args.capacity,
        **_swept(args, command),
    }


def _swept(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the fields of `Sweep` that options hold for all kinds."""
    return {
        "schemes": options.choices(args.quant, SCHEMES, "--quant"),
        "routings": options.choices(args.routing, ROUTINGS, "--routing"),
        "tokens": numbers(args.tokens, "--tokens"),
        "settings": options.settings(args),
        "command": command,
    }


@dataclass(frozen=True)
class _Mode:
    """A kind of measurement: its options and its sweep."""

    text: str
    add_options: Callable[[argparse.ArgumentParser], None]
    sweep: Callable[[argparse.Namespace, str], Sweep]


_MODES = {
    "": _Mode(
        "Time experts backends and baselines on the whole routed-experts block, each checked "
        "against the fp32 oracle.",
        _add_experts,
        _experts,
    ),
    "--dispatch": _Mode(
        "Time dispatchers without experts, over tokens on each rank; each is checked.",
        _add_dispatch,
        _dispatch,
    ),
    "--layers": _Mode(
        "Time whole layers over ranks, every dispatcher with every experts backend, each checked "
        "against the fp32 oracle.",
        _add_layers,
        layers_sweep,
    ),
}
