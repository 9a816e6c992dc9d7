"""Calls of the public surface with random arguments, of valid and of wrong types and values.

    python tests/support/fuzz_surface.py --cases 1000000 [--seed N] [--seconds N] [--memory-gb N]

Each case must return, or raise one of ALLOWED (the command line: exit with a documented code),
within a time limit; the process runs under a memory limit (RLIMIT_AS). A kernel that returns must
be right. Anything else is a fault: the call is printed with its seed, and the exit code is 1.
test_fuzz_surface.py runs some cases.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from fuzz_junk import JUNK, E, H, I, K, T

import moekit
from moekit import eplb
from moekit.backends.reference import oracle
from moekit.cli.main import main as command_line
from moekit.errors import MoekitError
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import first_line

CASE_SECONDS = 300.0  # a guard against hangs
# Python's own errors are for values of a wrong type.
ALLOWED = (MoekitError, TypeError, ValueError, AttributeError)


class Late(BaseException):
    """A case ran longer than CASE_SECONDS."""


_FUNCTIONS = (
    "custom",
    "shared",
    "meanwhile",
    "shared_experts",
    "custom_routing_function",
    "policy",
)


class Draw:
    """Random arguments. Half of the draws of an argument are valid alone, half are junk."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.junk_share = 0.0

    def __call__(self, *valid: Any) -> Any:
        """One of ``valid`` values (a function makes one), or junk."""
        if self.random.random() < self.junk_share:
            return self.random.choice(JUNK)()
        value = self.random.choice(valid)
        return value() if isinstance(value, FunctionType) else value

    def some(self, **arguments: Any) -> dict[str, Any]:
        """Some of these keyword arguments."""
        draw = {n: self.function if n in _FUNCTIONS else self for n in arguments}
        return {n: draw[n](*v) for n, v in arguments.items() if self.random.random() < 0.4}

    def function(self, *valid: Any) -> Any:
        """As a draw, but for an argument that moekit calls: what such a function raises is its
        owner's, so that no other functions are drawn."""
        while True:
            value = self(*valid)
            if not callable(value) or any(value is f for f in (custom, ignore, torch.neg)):
                return value
            if isinstance(value, eplb.Balanced):
                return value


# -- parts that calls need ----------------------------------------------------------------------

PROBLEM = moekit.MoEProblem(
    num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype=torch.float32, device="cpu"
)


def weights() -> moekit.ExpertWeights:
    return moekit.ExpertWeights(torch.ones(E, 2 * I, H), torch.ones(E, H, I))


def routing() -> moekit.Routing:
    return moekit.Routing(torch.ones(T, K), torch.tensor([[0, 1], [2, 3], [1, -1]]))


KERNEL = moekit.compose(PROBLEM, experts="torch", checked=True)
PACKED = KERNEL.pack(weights())
PLACEMENT = eplb.Placement(tuple(range(E)), E, 2)
REBALANCER = eplb.Rebalancer(KERNEL, [PACKED], window=2)


def loaded_layer() -> moekit.FusedMoE:
    made = moekit.FusedMoE(E, K, H, I, params_dtype=torch.float32, device="cpu")
    made.load_weights(weights())
    return made


LAYER = loaded_layer()


def x() -> torch.Tensor:
    return torch.ones(T, H)


def logits() -> torch.Tensor:
    return torch.arange(T * E).view(T, E).float()


def ids() -> torch.Tensor:
    return routing().topk_ids


def table() -> torch.Tensor:
    return torch.arange(E)[:, None]


def ignore(*given: Any) -> None:
    """A function for arguments whose answer is not read."""


def custom(*given: Any) -> Any:
    return torch.ones(T, K), ids()


# -- the surface: a function that draws arguments and returns a call -----------------------------

Call = Callable[[], object]
_FLAG = (True, False)
_NAMES = (None, "torch", "reference", "local", "torch:1|reference")
_ROUTING: dict[str, Any] = dict(
    renormalize=_FLAG,
    scoring_func=("softmax", "sigmoid"),
    e_score_correction_bias=(None, lambda: torch.ones(E)),
    num_expert_group=(None, 2),
    topk_group=(None, 1, 2),
    routed_scaling_factor=(1.0, 2.0),
    custom_routing_function=(None, lambda: custom),
    zero_expert_num=(0, 1),
)
_PARALLELISM: dict[str, Any] = dict(
    tp_size=(None, 1),
    dp_size=(1,),
    enable_expert_parallel=_FLAG,
    parallel=(None, moekit.ParallelConfig()),
    is_sequence_parallel=_FLAG,
    expert_placement_strategy=("linear", "round_robin"),
    num_redundant_experts=(0, 2),
    reduce_results=_FLAG,
)


def _problem(d: Draw) -> Call:
    given = d.some(
        dtype=(torch.float32, torch.bfloat16),
        activation=("silu", "relu2", moekit.Activation("silu", limit=2.0)),
        quant=("none", "fp8_block", moekit.SCHEMES["int8_w8a16"]),
        has_bias=_FLAG,
        apply_router_weight_on_input=_FLAG,
        num_redundant_experts=(0, 1, 5),
        max_num_tokens=(None, 1, 64),
        batch_invariant=_FLAG,
        parallel=(None, moekit.ParallelConfig(ep_size=2)),
        device=("cpu", "sm90", "gfx942", torch.device("cpu"), moekit.DeviceSpec("cpu")),
    )
    sizes = dict(num_experts=d(E), top_k=d(K, 1), hidden_size=d(H), intermediate_size=d(I, 128))
    return lambda: moekit.explain(moekit.MoEProblem(**sizes, **given))


def _route(d: Draw) -> Call:
    given = (d(logits), d(K, 1))
    more = d.some(
        scoring=("softmax", "sigmoid", "sqrtsoftplus"),
        renormalize=_FLAG,
        correction_bias=(None, lambda: torch.ones(E)),
        num_expert_group=(None, 2),
        topk_group=(None, 1, 2),
        routed_scaling_factor=(1.0, 2.5),
        batch_invariant=_FLAG,
        custom=(None, lambda: custom),
        is_padding=(None, lambda: torch.zeros(T, dtype=torch.bool)),
        checked=(None, True, False),
    )
    if "custom" in more and d.random.random() < 0.5:
        answer = d(custom), d(custom)
        more["custom"] = lambda *_: answer[0]
    return lambda: moekit.route(*given, **more)


def _to_physical(d: Draw) -> Call:
    given = (moekit.Routing(d(lambda: torch.ones(T, K)), d(ids)), d(table)) + (
        (d(0, 5),) * d.random.getrandbits(1)
    )
    first = d(given[0])
    return lambda: moekit.to_physical(first, *given[1:])


def _compose(d: Draw) -> Call:
    names, more = (d(*_NAMES), d(*_NAMES)), d.some(
        workspace=(None, lambda: moekit.Workspace()),
        group=(None,),
        checked=(None, True, False),
        peer_timeout=(60.0, 5),
        backends=(None, lambda: moekit.registry()),
    )  # fmt: skip
    problem = d(PROBLEM)
    if d.random.random() < 0.5:
        return lambda: moekit.compose(problem, *names, **more)
    return lambda: moekit.explain(problem, *names)


def _kernel(d: Draw) -> Call:
    given = dict(
        x=d(x),
        weights=d(PACKED),
        routing=d(lambda: moekit.Routing(d(lambda: torch.ones(T, K)), d(ids))),
    )
    more = d.some(out=(None, x))
    shared = d.some(shared=(None, lambda: torch.neg))
    after = d.some(meanwhile=(None, lambda: ignore))
    count = d(1, 4, None)
    few = d(0, 1, 3)
    if isinstance(few, int) and 10**4 < few < 2**31:
        few = 3
    right = partial(_right, given)
    return d.random.choice(
        (
            lambda: right(KERNEL(**given, **more)),
            lambda: KERNEL(**given, **more, **shared),
            lambda: right(KERNEL.start(**given, **more, **after).result()),
            lambda: KERNEL.memory(count),
            lambda: KERNEL.warmup(given["weights"], few),
            lambda: KERNEL.pack(given["weights"]),
        )
    )


def _right(given: dict[str, Any], out: torch.Tensor) -> None:
    expected = oracle(given["x"], weights(), given["routing"], PROBLEM)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4), "a wrong number"


def _weights(d: Draw) -> Call:
    optional = {
        name: (None, lambda: torch.ones(E, 1, 1))
        for name in ("w13_bias", "w2_bias", "w13_scale", "w2_scale", "w13_input_scale",
                     "w2_input_scale", "w13_zero_points", "w2_zero_points", "w13_g_idx", "w2_g_idx")
    }  # fmt: skip
    w13, w2 = d(lambda: torch.ones(E, 2 * I, H)), d(lambda: torch.ones(E, H, I))
    more = d.some(**optional, interleaved=_FLAG) if d.random.random() < 0.5 else {}
    scheme = d(*moekit.SCHEMES.values())
    experts, device, problem = d([0, 1], torch.tensor([3])), d("cpu", "meta"), d(PROBLEM)

    def call() -> object:
        made = moekit.ExpertWeights(w13, w2, **more)
        return d.random.choice(
            (
                lambda: made.quantize(scheme),
                lambda: made.select(experts),
                lambda: made.to(device),
                lambda: made.check(problem),
                lambda: KERNEL.pack(made),
            )
        )()

    return call


def _layer(d: Draw) -> Call:
    sizes = (d(E), d(K), d(H), d(I))
    more = d.some(
        params_dtype=(torch.float32, torch.bfloat16),
        quant=("none", "int8_w8a16"),
        activation=("silu", "gelu"),
        has_bias=_FLAG,
        shared_experts=(None, lambda: torch.neg),
        max_num_tokens=(None, 2),
        batch_invariant=_FLAG,
        dispatcher=_NAMES,
        experts=_NAMES,
        checked=(None, True, False),
        peer_timeout=(60.0,),
        prefix=(None, "a"),
    )
    more["device"] = d("cpu", torch.device("cpu"))
    routing, parallelism = d.some(**_ROUTING), d.some(**_PARALLELISM)
    records = d.random.random() < 0.5

    def call() -> object:
        if records:
            more["routing"] = moekit.RoutingConfig(**routing)
            more["parallelism"] = moekit.LayerParallelism(**parallelism)
        else:
            more.update(**routing, **parallelism)
        made = moekit.FusedMoE(*sizes, **more)
        if repr(made) and made.problem.num_physical_experts > 64:
            return None  # its weights are large, which is no fault
        made.load_weights(d(weights, weights))
        return made(x(), torch.arange(T * made.router.width).view(T, -1).float())

    return call


def _layer_calls(d: Draw) -> Call:
    given = d.some(
        topk_weights=(None, lambda: torch.ones(T, K)),
        topk_ids=(None, ids),
        is_padding=(None, lambda: torch.zeros(T, dtype=torch.bool)),
        max_tokens=(None, 3, 10),
    )
    if d.random.random() < 0.7:
        given["router_logits"] = d(logits)
    tokens, replicas, record, loaded, few = (
        d(x),
        d(table),
        d.function(None, lambda: ignore),
        d(weights),
        d(1, 3),
    )
    if isinstance(few, int) and 10**4 < few < 2**31:
        few = 3

    def change() -> None:
        made = loaded_layer()
        made.set_replicas(replicas, record)
        made(x(), logits())

    def load() -> None:
        made = loaded_layer()
        made.load_weights(loaded)
        made.warmup(few)

    calls = (lambda: LAYER(tokens, **given),) * 3 + (change, load)
    return d.random.choice(calls)


def _eplb(d: Draw) -> Call:
    load, policy = d(lambda: torch.ones(E)), d.function(lambda: eplb.Balanced(), lambda: custom)
    slots = d(tuple(range(E)), (0, 1, 2, 3, 0))
    ranks, layer = d(1, 2), d(0)
    window = dict(layers=d(1, 2), num_experts=d(E), steps=d(1, 3))
    for name, value in window.items():  # a large window takes memory, which is no fault
        window[name] = 3 if type(value) is int and 10**3 < value < 2**31 else value
    options = d.some(
        policy=(None, lambda: eplb.Balanced()),
        window=(1, 3),
        min_gain=(0.0, 0.5),
        staging_bytes=(1, 2**20),
        placements=(None, [PLACEMENT]),
        group=(None,),
    )
    if type(options.get("window")) is int and options["window"] > 10**6:
        options.pop("window")
    packed, old, new = d(PACKED), d(PLACEMENT), d(PLACEMENT)
    gain, logical, groups = d(0.0, -1.0), d(routing), (d(1, 2), d(1, 2))
    recorded, layers = d(ids), d([PACKED])
    kernel, of = d(KERNEL), d([LAYER])
    return d.random.choice(
        (
            lambda: eplb.Placement(slots, d(E), ranks).logical_to_physical(),
            lambda: eplb.Balanced(*groups)(torch.ones(E), PLACEMENT),
            lambda: eplb.improve(policy, load, old, gain),
            lambda: PLACEMENT.imbalance(load),
            lambda: eplb.LoadWindow(**window).record(recorded, layer),
            lambda: eplb.migrate(packed, old, new),
            lambda: eplb.Rebalancer(kernel, layers, **options),
            lambda: eplb.Rebalancer.of(of),
            lambda: REBALANCER.route(logical, layer),
        )
    )


def _cli(d: Draw) -> Call:
    def word(*valid: Any) -> str:
        return str(d(*valid)) if d.junk_share < 0.9 else d.random.choice(("", "x", "-1", "1e9"))

    def text(*valid: Any) -> str:
        with contextlib.suppress(Exception):
            return word(*valid).replace("\0", "")[:5000]
        return "?"

    explain = ["explain", "--device", text("cpu", "sm90", "gfx942")]
    sizes = {"num-experts": E, "top-k": K, "hidden-size": H, "intermediate-size": 128}
    for name, valid in sizes.items():
        explain += [f"--{name}", text(valid)]
    options = {
        "quant": ("none", "fp8_block"), "activation": ("silu",), "activation-limit": (7,),
        "redundant-experts": (0, 2), "max-num-tokens": (64,), "ep": (1, 2), "tp": (1, 2),
        "dp": (1, 2), "nodes": (1, 2), "dispatcher": ("local",), "experts": ("torch",),
    }  # fmt: skip
    for name, valid in options.items():
        if d.random.random() < 0.2:
            explain += [f"--{name}", text(*valid)]
    explain += ["--json"] * d.random.getrandbits(1) + ["--has-bias"] * d.random.getrandbits(1)
    junk = f"--no-such-{d.random.randrange(9)}"
    argv = d.random.choice(
        (explain, explain, explain, ["plugins", "--json"], ["check", "no" + text("torch")[:9]],
         ["bench", junk], ["tune", junk], ["doctor", junk], [text("plugins")[:5] + "x"])
    )  # fmt: skip

    def call() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                code = command_line(argv)
            except SystemExit as end:  # argparse
                code = end.code
        if code not in (0, 1, 2):
            raise AssertionError(f"{argv} exits with {code}")

    return call


# Each with its share of the cases.
SURFACE: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "MoEProblem, explain": (_problem, 5),
    "route": (_route, 15),
    "to_physical": (_to_physical, 10),
    "compose, explain": (_compose, 5),
    "ModularKernel's calls": (_kernel, 30),
    "ExpertWeights": (_weights, 15),
    "FusedMoE": (_layer, 4),
    "FusedMoE's calls": (_layer_calls, 15),
    "eplb": (_eplb, 15),
    "command line": (_cli, 3),
}


def fault_of(call: Call, seconds: float = CASE_SECONDS) -> BaseException | None:
    """Return what ``call`` raised, unless it is ALLOWED; Late if it took longer."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        call()
    except ALLOWED as error:
        try:
            str(error)
        except Exception as worse:
            return worse
    except Late as fault:
        return fault
    except BaseException as fault:
        return fault
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def case(seed: int) -> tuple[str, Call]:
    """The name and the call of a case; the same for the same seed."""
    draw = Draw(seed)
    draw.junk_share = draw.random.choice((0.0, 0.1, 0.3, 0.6))
    torch.manual_seed(seed)
    kinds = list(SURFACE)
    shares = [share for _, share in SURFACE.values()]
    name = draw.random.choices(kinds, shares)[0]
    return name, SURFACE[name][0](draw)


def describe(call: Call) -> str:
    """The arguments that a call closed over."""
    cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)  # type: ignore[attr-defined]
    said = []
    for name, cell in cells:
        value = cell.cell_contents
        if isinstance(value, dict):
            said += [f"{name}: " + ", ".join(f"{k}={shown(v)}" for k, v in value.items())]
        elif isinstance(value, tuple):
            said += [f"{name}: " + ", ".join(map(shown, value))]
        else:
            said.append(f"{name}={shown(value)}")
    return "; ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MOEKIT_TEST_SEED", "0")))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--memory-gb", type=float, default=8.0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    limit = int(args.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begin, faults, done, slowest = time.monotonic(), 0, 0, 0.0
    seen: set[str] = set()
    for number in range(args.cases):
        if time.monotonic() - begin > args.seconds:
            break
        seed = args.seed * 10**9 + number
        name, call = case(seed)
        start = time.monotonic()
        fault = fault_of(call)
        slowest, done = max(slowest, time.monotonic() - start), done + 1
        if fault is not None:
            faults += 1
            frames = traceback.extract_tb(fault.__traceback__)
            where = next((f for f in reversed(frames) if "moekit" in f.filename), frames[-1])
            line = f"{type(fault).__name__} at {where.filename}:{where.lineno}"
            if line not in seen:
                seen.add(line)
                print(
                    f"case {seed} ({name}): {line}: {first_line(fault)}\n    {describe(call)}",
                    flush=True,
                )
    print(f"{done} cases, {faults} faults, slowest {slowest:.2f} s, "
          f"{time.monotonic() - begin:.0f} s in all")  # fmt: skip
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
