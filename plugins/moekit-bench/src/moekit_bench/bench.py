"""``python -m moekit bench``: time experts, dispatchers (--dispatch) or whole layers (--layers)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from moekit.errors import MoekitError
from moekit.plugin import SCHEMES, DeviceSpec, registry

from . import dispatch_report, experts, experts_report, layers_report, options
from .codec import from_json, read_recording
from .dispatch import DispatchWorkload
from .environment import command
from .experts import ExpertsWorkload
from .implementations import Implementation, backends, baselines, beside
from .layers import LayersWorkload
from .limits import Ceilings, known_ceilings, measure_ceilings, parse_ceilings
from .options import names, numbers, settings_of, whole
from .ranks import fewer_devices, moving_dispatchers, number_of_ranks, open_ranks
from .records import (
    DispatchRun,
    DispatchSettings,
    ExpertsRun,
    ExpertsSettings,
    LayerSettings,
    LayersRun,
    Run,
    all_right,
)
from .shapes import ROUTINGS, SHAPES, shape
from .sweep import Files, Sweep

R = TypeVar("R", bound=Run)
_Command = Callable[[argparse.Namespace, str], int]

_IN_MODE = "also time each backend in batch-invariant mode, beside its default"
_LAYER_EXPERTS = "torch,triton,triton_batched,deepgemm,deepgemm_batched"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0: every cell has a right result (with --dispatch and --layers: all results are right),
        1: not so, 2: the arguments are wrong.
    """
    modes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which = modes.add_mutually_exclusive_group()
    for option, (*_, text) in list(_MODES.items())[1:]:
        text = f"{text} `{option} --help` has the options."
        which.add_argument(option, dest="mode", action="store_const", const=option, help=text)
    found, rest = modes.parse_known_args(argv)
    words = ["bench", *filter(None, [found.mode])]
    add_options, run, text = _MODES[found.mode or ""]
    parser = argparse.ArgumentParser(
        prog=" ".join(["python -m moekit", *words]),
        description=f"{text} See docs/bench.md.",
        parents=[] if found.mode else [modes],
    )
    add_options(parser)
    args = parser.parse_args(rest)
    return options.answered(lambda: run(args, command(*words, *rest)))


def recorded(cls: type[R], file: Path) -> R:
    """Return the run in ``file``; MoekitError if that is no recording of such a run."""
    return from_json(cls, read_recording(file), str(file))


# -- experts ----------------------------------------------------------------------------------


def add_experts_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options that `moekit tune` has, too."""
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
    options.add_run(parser)
    add = parser.add_argument
    add(
        "--ep", type=whole(1), default=1, metavar="N",
        help="the experts of one of N ranks, for tokens most of whose choices are other ranks'; "
        "--shapes are whole layers",
    )  # fmt: skip
    add(
        "--baselines", "--peers", dest="baselines", action="append", default=[], metavar="PATH",
        help="adapter file or folder of them (benchmarks/baselines); may be repeated",
    )  # fmt: skip
    add(
        "--only-baselines", "--only-peers", dest="only_baselines", metavar="LIST",
        help="of --baselines, these names only",
    )  # fmt: skip
    add(
        "--ceilings", metavar="WHAT",
        help="bf16=791,fp8=1424,read=4490 (TFLOP/s, GB/s), or `measure`; default: what is known "
        "for the device",
    )  # fmt: skip
    add("--batch-invariant", action="store_true", help=_IN_MODE)
    add("--plot", type=Path, metavar="DIR", help="a PNG per shape and scheme (needs matplotlib)")
    add("--list-shapes", action="store_true", help="print the named shapes, and stop")


def _experts(args: argparse.Namespace, command: str) -> int:
    if args.list_shapes:
        print(_shape_list())
        return 0
    files = Files(experts_report.markdown, args.json, args.markdown)
    ok = True
    if args.recorded is not None:
        run = recorded(ExpertsRun, args.recorded)
    else:
        asked = None if args.experts is None else names(args.experts)
        found = backends(asked, args.dispatcher)
        if args.batch_invariant:
            found = backends(
                beside([each.name for each in found if not each.left_out]), args.dispatcher
            ) + [each for each in found if each.left_out]
        only = None if args.only_baselines is None else names(args.only_baselines)
        found += baselines(args.baselines, only)
        workload = experts_workload(args, found, command, args.routing, args.ep, args.ceilings)
        sweep = Sweep(workload, lambda run: files.keep(experts_report.summarized(run)))
        run = sweep.measure()
        ok = sweep.complete and experts.succeeded(run)
    run = experts_report.summarized(run)
    files.finish(run)
    if args.plot is not None:
        try:
            for file in experts_report.plot(run, args.plot):
                print(f"plot: {file}", file=sys.stderr)
        except MoekitError as error:  # the measurements are worth more than the picture
            print(f"no plots: {error}", file=sys.stderr)
    return int(not ok)


def experts_workload(
    args: argparse.Namespace,
    implementations: Sequence[Implementation],
    command: str,
    routings: str = "uniform",
    ep: int = 1,
    ceilings: str | None = None,
) -> ExpertsWorkload:
    """Return the workload that the options of `add_experts_sweep` describe."""
    registry().dispatcher(args.dispatcher)  # raises with the names that there are
    device = options.torch_device(args.device)
    shapes = [shape(text) for text in names(args.shapes)]
    if not shapes:
        raise MoekitError("--shapes must name at least one shape")
    return ExpertsWorkload(
        shapes,
        options.choices(args.quant, SCHEMES, "--quant"),
        options.choices(routings, ROUTINGS, "--routing"),
        numbers(args.tokens, "--tokens"),
        experts.without_duplicates(implementations),
        device,
        ExpertsSettings(**settings_of(args, dispatcher=args.dispatcher, ep=ep)),
        ceilings=_ceilings(ceilings, device),
        command=command,
    )


def _ceilings(text: str | None, device: torch.device) -> Ceilings | None:
    if text is None:
        return known_ceilings(DeviceSpec.of(device).name)
    return measure_ceilings(device) if text == "measure" else parse_ceilings(text)


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
    add("--ranks", type=whole(1), metavar="N", help="default: one per GPU; without GPUs 2")
    options.add_run(parser)


def _add_dispatch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", default="256:8:7168", metavar="E:K:H", help="default: %(default)s"
    )
    tokens = "1,4,16,64,128,256,512,1024,2048,4096,8192"
    options.add_sweep(parser, tokens=tokens, quant="none", inputs=3, replays=10)
    _add_ranks(parser)


def _dispatch(args: argparse.Namespace, command: str) -> int:
    files = Files(dispatch_report.markdown, args.json, args.markdown)
    if args.recorded is not None:
        files.finish(recorded(DispatchRun, args.recorded))
        return 0
    device = options.device_spec(args.device)
    sizes = numbers(args.sizes.replace(":", ","), "--sizes")
    if len(sizes) != 3:
        raise MoekitError(
            f"--sizes must be EXPERTS:TOP_K:HIDDEN, as in 256:8:7168 (got {args.sizes})"
        )
    workload = DispatchWorkload(
        sizes,
        moving_dispatchers(None if args.dispatchers is None else names(args.dispatchers)),
        options.choices(args.quant, SCHEMES, "--quant"),
        options.choices(args.routing, ROUTINGS, "--routing"),
        numbers(args.tokens, "--tokens"),
        device,
        number_of_ranks(args.ranks, device),
        DispatchSettings(**settings_of(args, sizes=args.sizes)),
        command,
    )
    run, complete = sweep_on_ranks(workload, args.ranks, files)
    return int(not (complete and all_right(run)))


def _add_layers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--layer", default="dsv3", metavar="NAME",
        help="all experts of a layer: a name (`bench --list-shapes`) or sizes E:K:H:I",
    )  # fmt: skip
    add("--experts", metavar="LIST", help=f"default: those installed of {_LAYER_EXPERTS}")
    tokens = "1,16,128,1024,4096"
    options.add_sweep(parser, tokens=tokens, quant="none,fp8_block", inputs=2, replays=5)
    add("--share-devices", action="store_true", help="more ranks than GPUs: for the errors alone")
    add("--batch-invariant", action="store_true", help=_IN_MODE)
    add("--overlap", action="store_true", help="also what calls in flight and shared experts save")
    add("--seconds", type=options.seconds, metavar="S", help="begin no measurement after this")
    _add_ranks(parser)


def _layers(args: argparse.Namespace, command: str) -> int:
    files = Files(layers_report.markdown, args.json, args.markdown)
    if args.recorded is not None:
        files.finish(recorded(LayersRun, args.recorded))
        return 0
    default = [name for name in names(_LAYER_EXPERTS) if name in registry().experts]
    experts = default if args.experts is None else names(args.experts)
    workload = layers_workload(
        args,
        args.layer,
        beside(experts) if args.batch_invariant else experts,
        None if args.dispatchers is None else names(args.dispatchers),
        command,
        share=args.share_devices,
        overlap=args.overlap,
        seconds=args.seconds,
    )
    run, complete = sweep_on_ranks(workload, args.ranks, files)
    return int(not (complete and all_right(run)))


def layers_workload(
    args: argparse.Namespace,
    layer: str,
    experts: Sequence[str],
    dispatchers: list[str] | None,
    command: str,
    *,
    share: bool = False,
    overlap: bool = False,
    seconds: float | None = None,
) -> LayersWorkload:
    """Return the workload of a layer over ``args.ranks`` ranks."""
    device = options.device_spec(args.device)
    count = number_of_ranks(args.ranks, device)
    routing, *_ = options.choices(args.routing, ROUTINGS, "--routing")
    share = share and fewer_devices(count, device)
    return LayersWorkload(
        shape(layer),
        moving_dispatchers(dispatchers),
        experts,
        options.choices(args.quant, SCHEMES, "--quant"),
        numbers(args.tokens, "--tokens"),
        device,
        count,
        LayerSettings(**settings_of(args, layer=layer, routing=routing, share_devices=share)),
        command,
        overlap,
        seconds,
    )


def sweep_on_ranks(
    workload: DispatchWorkload | LayersWorkload,
    asked: int | None,
    files: Files | None = None,
    keep: Callable[[Any], None] | None = None,
) -> tuple[Any, bool]:
    """Measure a workload on ranks; return the run, and whether no cell is missing.

    Args:
        files: Where the leader writes the run and its report.
        keep: Called instead after every cell, without ``files``.
    """
    device, count = workload.device, workload.header.ranks
    share = getattr(workload.settings, "share_devices", False)
    with open_ranks(count, device, asked, share=share) as ranks:
        workload.ranks = ranks
        sweep = Sweep(workload, files.keep if files is not None else keep, leader=ranks.leader)
        run = sweep.measure()
        if ranks.leader and files is not None:
            files.finish(run)
        return run, sweep.complete


# Option -> (how it adds its options, what runs it, what it is).
_MODES: dict[str, tuple[Callable[[argparse.ArgumentParser], None], _Command, str]] = {
    "": (
        _add_experts,
        _experts,
        "Time experts backends and baselines on the whole routed-experts block, each checked "
        "against the fp32 oracle.",
    ),
    "--dispatch": (
        _add_dispatch,
        _dispatch,
        "Time dispatchers without experts, over tokens on each rank; each is checked.",
    ),
    "--layers": (
        _add_layers,
        _layers,
        "Time whole layers over ranks, every dispatcher with every experts backend, each checked "
        "against the fp32 oracle.",
    ),
}
