"""Calls that read or write memory, with random arguments of valid and of wrong types and values.

    python tests/support/fuzz_surface.py --cases 1000000 [--seed N] [--seconds N] [--memory-gb N]

Each case must return or raise an ordinary exception within a time limit, and leave nothing behind:
the kernel and the layer that all cases share give the same bits afterwards. The process runs under
a memory limit (RLIMIT_AS). A broken invariant, an exit, exhausted memory, a hang or other bits are
faults: the call is printed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import decimal
import fractions
import inspect
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch

import moekit
from moekit import eplb

CASE_SECONDS = 300.0  # a guard against hangs
E, K, H, I, T = 4, 2, 8, 4, 3


class Late(BaseException):
    """A case ran longer than CASE_SECONDS."""


class OtherBits(BaseException):
    """A case changed what a right call of the kernel or the layer returns."""


class Hostile:
    """Raises wherever it is looked at."""

    def _raise(self, *args: object) -> Any:
        raise ZeroDivisionError("hostile")

    __repr__ = __eq__ = __bool__ = __len__ = __index__ = __float__ = __iter__ = _raise
    __lt__ = __gt__ = __le__ = __ge__ = __int__ = __contains__ = _raise
    __hash__ = object.__hash__


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(T, H)


JUNK: tuple[Callable[[], Any], ...] = tuple(
    (lambda value=value: value)
    for value in (
        None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**40, 2**63, 2**200, -(2**70), 10**5000,
        0.0, 1.5, -0.5, float("nan"), float("inf"), -float("inf"), 1e308, 1 + 2j,
        "", "x", "8", "silu", "none", "cpu", "cuda", "cuda:99", "meta", "sm90", "\ud800", "a\0b",
        b"x", (), (1,), (9, 0), (9.0, 0), range(3), Ellipsis, int, torch, len,
        fractions.Fraction(3, 2), decimal.Decimal(2), np.int64(2), np.float32(1.5), np.bool_(True),
        np.str_("silu"), np.float64("nan"), torch.float32, torch.int8, torch.strided,
        torch.device("cpu"), torch.device("meta"), torch.device("cuda"), torch.device("xpu"),
        torch.device("hpu"), torch.device("mps"), torch.Size([2]),
    )
) + (
    lambda: [], lambda: [1], lambda: [[0]], lambda: [[0, 1], [1]], dict, lambda: {"a": 1}, set,
    lambda: iter(()), object, Hostile, lambda: [Hostile()], lambda: Hostile, lambda: np.arange(3),
    lambda: torch.tensor(2), lambda: torch.tensor(True), lambda: torch.tensor(1.5),
    lambda: torch.ones(0), lambda: torch.ones(T, H), lambda: torch.ones(T, E),
    lambda: torch.ones(T, H).double(), lambda: torch.ones(T, K, dtype=torch.int64),
    lambda: torch.ones(T, H, dtype=torch.complex64), lambda: torch.ones(T, H).to_sparse(),
    lambda: torch.ones(T, H).to_sparse_csr(), lambda: torch.ones(1, H).expand(T, H),
    lambda: torch.ones(T, H, device="meta"), lambda: torch.ones(T, H, requires_grad=True),
    lambda: torch.nested.nested_tensor([torch.ones(2, H), torch.ones(1, H)]),
    lambda: torch.full((T, E), float("nan")), lambda: torch.full((T, K), 2**62),
    lambda: torch.ones(T, E, dtype=torch.float8_e4m3fn), lambda: torch.ones(T, dtype=torch.bool),
    lambda: torch.quantize_per_tensor(torch.ones(T, H), 0.1, 0, torch.quint8),
    lambda: torch.ones(T, H).to_mkldnn(), _inference_tensor, lambda: moekit.SCHEMES["fp8_block"],
    lambda: moekit.Activation("gelu"), lambda: moekit.ParallelConfig(ep_size=2, dp_size=1),
    lambda: moekit.QuantScheme(name="fp8_block"), lambda: moekit.DeviceSpec("cuda", (9, 0)),
    lambda: torch.nn.Linear(2, 2), lambda: moekit.Routing(None, None),
)  # fmt: skip


# -- valid arguments ----------------------------------------------------------------------------

PROBLEM = moekit.MoEProblem(
    num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype=torch.float32, device="cpu"
)


def weights() -> moekit.ExpertWeights:
    return moekit.ExpertWeights(torch.ones(E, 2 * I, H), torch.ones(E, H, I))


def routing() -> moekit.Routing:
    return moekit.Routing(torch.ones(T, K), torch.tensor([[0, 1], [2, 3], [1, -1]]))


def layer(**changes: Any) -> moekit.FusedMoE:
    made = moekit.FusedMoE(E, K, H, I, params_dtype=torch.float32, device="cpu", **changes)
    made.load_weights(weights())
    return made


def x() -> torch.Tensor:
    return torch.ones(T, H)


def logits() -> torch.Tensor:
    return torch.arange(T * E).view(T, E).float()


def custom(*given: Any) -> Any:
    return torch.ones(T, K), routing().topk_ids


KERNEL = moekit.compose(PROBLEM, experts="torch", checked=True)
PACKED, LAYER = KERNEL.pack(weights()), layer()
PLACEMENT = eplb.Placement(tuple(range(E)), E, 2)


def bits() -> list[bytes]:
    """Return what the shared kernel and layer give for valid arguments."""
    outs = KERNEL(x(), PACKED, routing()), LAYER(x(), logits())
    return [out.detach().numpy().tobytes() for out in outs]


RIGHT = bits()
# Valid values of parameters by their names; a function makes one. Others get junk only.
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("has_bias", "apply_router_weight_on_input", "batch_invariant", "renormalize",
         "interleaved"), (True, False),
    ),
    **dict.fromkeys(
        ("dispatcher", "experts"), (None, "torch", "reference", "local", "torch:1|reference")
    ),
    **dict.fromkeys(("replicas", "table"), (lambda: torch.arange(E)[:, None],)),
    **dict.fromkeys(
        ("w13_bias", "w2_bias", "w13_scale", "w2_scale", "w13_input_scale", "w2_input_scale",
         "w13_zero_points", "w2_zero_points", "w13_g_idx", "w2_g_idx"),
        (None, None, lambda: torch.ones(E, 1, 1)),
    ),
    "num_experts": (E,), "top_k": (K, 1), "hidden_size": (H,), "intermediate_size": (I, 128),
    "params_dtype": (torch.float32, torch.bfloat16),
    "activation": ("silu", "relu2", moekit.Activation("silu", limit=2.0)),
    "quant": ("none", "fp8_block", moekit.SCHEMES["int8_w8a16"]),
    "max_num_tokens": (None, 2, 64), "max_tokens": (None, 3, 10),
    "device": ("cpu", torch.device("cpu"), moekit.DeviceSpec("cpu")), "group": (None,),
    "logits": (logits,), "router_logits": (logits,), "scoring": ("softmax", "sigmoid"),
    "correction_bias": (None, lambda: torch.ones(E)), "num_expert_group": (None, 2),
    "topk_group": (None, 1, 2), "routed_scaling_factor": (1.0, 2.5),
    "custom": (None, lambda: custom), "checked": (None, True, False),
    "is_padding": (None, lambda: torch.zeros(T, dtype=torch.bool)), "routing": (routing,),
    "peer_timeout": (60.0, 5), "x": (x,), "weights": (PACKED, PACKED, weights), "out": (None, x),
    "shared": (None, lambda: torch.neg), "meanwhile": (None,), "num_tokens": (0, 1, 3),
    "w13": (lambda: torch.ones(E, 2 * I, H),), "w2": (lambda: torch.ones(E, H, I),),
    "topk_weights": (None, lambda: torch.ones(T, K)), "topk_ids": (None, lambda: custom()[1]),
    "offset": (0, 5), "steps": (1, 3), "packed": (PACKED,), "old": (PLACEMENT,),
    "new": (PLACEMENT,), "layers": (1,), "staging_bytes": (1, 2**20),
}  # fmt: skip
# Numbers that may be large only at the price of memory or time, which is no fault.
_COUNTS = ("num_tokens", "steps")


def used(made: moekit.FusedMoE) -> object:
    if made.problem.num_physical_experts > 64:
        return None  # its weights are large, which is no fault
    made.load_weights(weights())
    return made(x(), torch.arange(T * made.router.width).view(T, -1).float())


# What is called, its share of the cases, and what is done with the result.
SURFACE: dict[str, tuple[Callable[..., Any], int, Callable[[Any], object]]] = {
    "route": (moekit.route, 20, repr),
    "to_physical": (moekit.to_physical, 10, repr),
    "kernel": (KERNEL.__call__, 30, repr),
    "start": (KERNEL.start, 10, lambda flying: flying.result()),
    "memory": (KERNEL.memory, 5, repr),
    "warmup": (KERNEL.warmup, 5, repr),
    "ExpertWeights": (moekit.ExpertWeights, 15, KERNEL.pack),
    "select": (weights().select, 5, repr),
    "FusedMoE": (moekit.FusedMoE, 5, used),
    "layer": (LAYER.forward, 15, repr),
    "set_replicas": (lambda table: layer().set_replicas(table), 5, repr),
    "migrate": (eplb.migrate, 5, repr),
    "LoadWindow": (eplb.LoadWindow, 5, lambda made: made.record(routing().topk_ids, 0)),
}


class Case:
    """A call that is the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._junk = self._draw.choice((0.0, 0.1, 0.3, 0.6))
        torch.manual_seed(seed)
        shares = [share for _, share, _ in SURFACE.values()]
        self.name = self._draw.choices(list(SURFACE), shares)[0]
        self._function, _, self._then = SURFACE[self.name]
        parameters = inspect.signature(self._function).parameters.values()
        self.given: dict[str, Any] = {
            p.name: self._value(p.name)
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and (p.default is p.empty or self._draw.random() < 0.4)
        }

    def _value(self, name: str) -> Any:
        if name not in VALUES or self._draw.random() < self._junk:
            value = self._draw.choice(JUNK)()
        else:
            value = self._draw.choice(VALUES[name])
            value = value() if isinstance(value, (FunctionType, type)) else value
        large = type(value) is int and 10**3 < value < 2**63
        return 3 if name in _COUNTS and large else value

    def __call__(self) -> object:
        return self._then(self._function(**self.given))

    def __str__(self) -> str:
        def shown(value: Any) -> str:
            try:
                return repr(value)[:200]
            except Exception:
                return f"a {type(value).__name__}"

        return f"{self.name}({', '.join(f'{n}={shown(v)}' for n, v in self.given.items())})"


def fault_of(call: Callable[[], object], seconds: float = CASE_SECONDS) -> BaseException | None:
    """Return what is wrong with a call: it hangs, exits, breaks an invariant or leaves traces."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.suppress(Exception) as _:
            try:
                call()
            except (AssertionError, MemoryError, RecursionError) as fault:
                if "Torch not compiled" not in str(fault):  # torch's words for an absent device
                    return fault
            except moekit.errors.MoekitError as error:
                str(error)
        if bits() != RIGHT:
            raise OtherBits
    except BaseException as fault:
        return fault
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


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
    begin, faults, done = time.monotonic(), 0, 0
    while done < args.cases and time.monotonic() - begin < args.seconds:
        seed = args.seed * 10**9 + done
        case, done = Case(seed), done + 1
        print(f"case {seed}", file=sys.stderr)  # the last one, if it ends the process
        if (fault := fault_of(case)) is not None:
            faults += 1
            where = "".join(traceback.format_tb(fault.__traceback__)[-2:])
            print(f"case {seed}: {case}\n    {type(fault).__name__}\n{where}", flush=True)
    print(f"{done} cases, {faults} faults, {time.monotonic() - begin:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
