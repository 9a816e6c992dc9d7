"""``python -m moekit explain``: which backends can do a problem, and why not the others."""

from __future__ import annotations

import argparse
import json

import moekit
from moekit.cli.plugins import wrap
from moekit.discovery.registry import registry
from moekit.problem import DTYPES
from moekit.problem.activation import ACTIVATIONS, Activation
from moekit.problem.problem import summary
from moekit.problem.quant import SCHEMES
from moekit.selection import topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_problem(parser)
    parser.add_argument("--dispatcher", metavar="NAME", help="insist on this dispatcher")
    parser.add_argument("--experts", metavar="NAME", help="insist on this experts backend")
    parser.add_argument(
        "--all", action="store_true", help="every runner-up, and every reason against the others"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 1 if nothing can do the problem."""
    problem = _problem(args)
    explanation = moekit.explain(problem, args.dispatcher, args.experts)
    hosts = None if args.nodes is None else topology.on_hosts(problem, explanation)
    if args.json:
        answer = explanation.as_dict()
        if hosts is not None:
            answer["topology"] = topology.as_dict(problem, hosts)
        print(json.dumps(answer, indent=2), file=args.out)
    else:
        lines = [summary(problem), *explanation.text(every=args.all).splitlines()]
        every = args.all or explanation.chosen is None
        lines += [f"  note: {fault}" for fault in registry().faults(blocked=every)]
        lines += [] if hosts is None else topology.lines(problem, hosts)
        print("\n".join(wrap(line, 6) for line in lines), file=args.out)
    return 0 if explanation.chosen else 1


def _add_problem(parser: argparse.ArgumentParser) -> None:
    for name in ("num-experts", "top-k", "hidden-size", "intermediate-size"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quant", default="none", metavar="SCHEME", help=", ".join(SCHEMES))
    kinds = ", ".join(sorted(ACTIVATIONS))
    parser.add_argument("--activation", default="silu", metavar="KIND", help=kinds)
    parser.add_argument("--activation-limit", type=float, metavar="X", help="clamp gate and up")
    parser.add_argument("--has-bias", action="store_true")
    parser.add_argument(
        "--weight-on-input", action="store_true", help="the router weight scales the token"
    )
    parser.add_argument("--redundant-experts", type=int, default=0, metavar="N")
    parser.add_argument("--max-num-tokens", type=int, metavar="N", help="most tokens in one call")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits at every T, position and --ep"
    )
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert parallel ranks")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel ranks")
    parser.add_argument(
        "--dp", type=int, default=0, metavar="N", help="batches of tokens (default: as --ep)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="hosts that the ranks are spread over; also print what each rank would need",
    )
    parser.add_argument("--device", help="e.g. cpu, sm90 (default: this machine's)")


def _problem(args: argparse.Namespace) -> moekit.MoEProblem:
    return moekit.MoEProblem(
        num_experts=args.num_experts,
        top_k=args.top_k,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        dtype=DTYPES[args.dtype],
        activation=Activation(args.activation, limit=args.activation_limit),
        quant=args.quant,
        has_bias=args.has_bias,
        apply_router_weight_on_input=args.weight_on_input,
        num_redundant_experts=args.redundant_experts,
        max_num_tokens=args.max_num_tokens,
        batch_invariant=args.batch_invariant,
        parallel=moekit.ParallelConfig(
            ep_size=args.ep,
            tp_size=args.tp,
            dp_size=args.dp,
            nodes=1 if args.nodes is None else args.nodes,
        ),
        device=args.device,
    )
