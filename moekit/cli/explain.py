"""``python -m moekit explain``: which backends can do a problem, and why not the others.

The problem is given by its sizes, by a checkpoint (``--model DIR``), or by an option of another
package, which says what the problem is there: ``--vllm DIR`` of moekit-vllm, for example. Such a
package declares an entry point of group ``moekit.problems``. Its name is the option, its value a
function ``(folder, parallel, **fields) -> (MoEProblem, notes)`` as ``"package.module:function"``;
fields are `MoEProblem`'s, and notes are lines to print.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import moekit
from moekit.checkpoint import detect, problem_from_config
from moekit.cli.commands import installed, load
from moekit.cli.plugins import wrap
from moekit.discovery.entry_points import Source
from moekit.discovery.registry import registry
from moekit.errors import InvalidProblem, MoekitError
from moekit.problem import DTYPES, AdapterSlots
from moekit.problem.activation import ACTIVATIONS, Activation
from moekit.problem.problem import summary
from moekit.problem.quant import BUILTIN

_SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 1 if nothing can do the problem."""
    try:
        problem, notes = _problem(args)
        explanation = moekit.explain(problem, args.dispatcher, args.experts)
    except MoekitError as error:
        raise MoekitError(_for_shell(str(error))) from error
    if args.json:
        answer = explanation.as_dict()
        if notes:
            answer["model_notes"] = list(notes)
        print(json.dumps(answer, indent=2), file=args.out)
    else:
        lines = [summary(problem), *(f"  {note}" for note in notes)]
        text = explanation.text(every=args.all, how="pass --all for the reasons")
        lines += _for_shell(text).splitlines()
        every = args.all or explanation.chosen is None
        lines += [f"  note: {fault}" for fault in registry().faults(blocked=every)]
        print("\n".join(wrap(line, 6) for line in lines), file=args.out)
    return 0 if explanation.chosen else 1


# Fields of the problem that a message may name, and the options that set them.
_OPTIONS = {
    **{f: f"--{f.replace('_', '-')}" for f in (*_SIZES, "max_num_tokens", "has_bias")},
    "batch_invariant": "--batch-invariant",
    "training": "--training",
    "apply_router_weight_on_input": "--weight-on-input",
    "num_redundant_experts": "--redundant-experts",
    **{f"{kind}_size": f"--{kind}" for kind in ("ep", "tp", "dp")},
}


def _for_shell(text: str) -> str:
    """Return ``text`` with options for Python's names: ``--tp 2`` for ``tp_size=2``."""

    def option(found: re.Match[str]) -> str:
        value = found[2] if found[2] not in (None, "True") else ""
        return f"{_OPTIONS[found[1]]} {value}".strip()

    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b(?:=(\w+))?", option, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="read the sizes from this checkpoint")
    for name, added in _sources().items():
        text = f"the same, as {added.distribution} computes it"
        source.add_argument(f"--{name}", metavar="DIR", help=text)
    # Fields of the problem: what is not given is left to the model or to MoEProblem.
    field = partial(parser.add_argument, default=argparse.SUPPRESS)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    flag: dict[str, Any] = {"action": "store_true"}
    for size in _SIZES:
        field(_OPTIONS[size], **number)
    field("--dtype", choices=DTYPES, help="default: the model's, else bfloat16")
    # Not SCHEMES: other commands, which also come here, load no plugins.
    schemes = f"default: the model's, else none; {', '.join(BUILTIN)}, or a plugin's"
    field("--quant", metavar="SCHEME", help=schemes)
    kinds = ", ".join(sorted(ACTIVATIONS))
    field("--activation", metavar="KIND", help=f"default: silu; {kinds}")
    field("--has-bias", **flag)
    on_input = "the router weight scales the token"
    field("--weight-on-input", dest="apply_router_weight_on_input", help=on_input, **flag)
    field("--redundant-experts", dest="num_redundant_experts", **number)
    field("--max-num-tokens", help="most tokens in one call", **number)
    field("--batch-invariant", help="the same bits at every T, position and --ep", **flag)
    field("--training", help="calls can be differentiated", **flag)
    field("--adapters", type=_room, metavar="N:RANK", help="room for N adapters (LoRA)")
    devices = "cpu, cuda, sm90 (H100, H200), gfx942 and so on; default: this machine's"
    field("--device", help=devices)
    option = parser.add_argument
    option("--activation-limit", type=float, metavar="X", help="clamp gate and up to it")
    option("--ep", default=1, help="expert parallel ranks", **number)
    option("--tp", default=1, help="tensor parallel ranks", **number)
    option("--dp", default=0, help="batches of tokens (default: as --ep)", **number)
    option("--nodes", default=1, help="hosts that the ranks are on", **number)
    option("--dispatcher", metavar="NAME", help="use this dispatcher or none")
    option("--experts", metavar="NAME", help="use this experts backend or none")
    option("--all", help="every runner-up, and every reason against the others", **flag)
    option("--json", help="machine-readable output", **flag)


def _room(text: str) -> AdapterSlots:
    if not re.fullmatch(r"\d{1,9}:\d{1,9}", text):
        raise argparse.ArgumentTypeError("expected the number of adapters and their rank, as 8:32")
    try:
        count, rank = map(int, text.split(":"))
        return AdapterSlots(count, rank)
    except InvalidProblem as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _problem(args: argparse.Namespace) -> tuple[moekit.MoEProblem, Sequence[str]]:
    """Return the problem that is asked for, and notes of the package that described it."""
    sizes = dict(ep_size=args.ep, tp_size=args.tp, dp_size=args.dp, nodes=args.nodes)
    parallel = moekit.ParallelConfig(**sizes)
    fields = {n: v for n, v in vars(args).items() if n in moekit.MoEProblem.__dataclass_fields__}
    if "dtype" in fields:
        fields["dtype"] = DTYPES[fields["dtype"]]
    if args.activation_limit is not None:
        kind = fields.get("activation") or "silu"
        fields["activation"] = Activation(kind, limit=args.activation_limit)
    if args.model is not None:
        first, *others = detect(args.model).groups
        problem = problem_from_config(
            args.model, layer=first.layers[0], parallel=parallel, **fields
        )
        if not others:
            return problem, ()
        here = f"this is layer {first.layers[0]}; the model's layers differ:"
        return problem, (here, *map(str, (first, *others)))
    for name, source in _sources().items():
        if (folder := getattr(args, name.replace("-", "_"))) is not None:
            problem, notes = load(source, f"--{name}")(folder, parallel, **fields)
            return problem, notes
    if missing := [_OPTIONS[size] for size in _SIZES if size not in fields]:
        raise InvalidProblem(
            f"explain needs {', '.join(missing)}, or a model's folder: --model DIR reads the sizes "
            "of its experts"
        )
    return moekit.MoEProblem(**fields, parallel=parallel), ()


@cache
def _sources() -> Mapping[str, Source]:
    """Return the options that other packages add, without those whose name is no option's."""
    found = installed("moekit.problems").items()
    return {name: source for name, source in found if re.fullmatch("[a-z][a-z0-9-]{0,30}", name)}
