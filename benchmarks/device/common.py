"""Helpers that the scripts of this folder share: output, problems, and times.

The scripts need a GPU and the packages that they measure, installed (`pip install -e`).
`python -m moekit check NAME` compares whole backends with the oracle, and `python -m moekit bench`
times them; these scripts look at what lies below: a vendor's operators, tiles, single kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from moekit_bench import Prepared, Result, Timer, shape, take_turns
from torch import Tensor

import moekit

DEVICE = torch.device("cuda")
SHAPES = ("mixtral", "qwen3-30b", "dsv3-ep8")
NAN = float("nan")

Call = Callable[[], object]

failures: list[str] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def verdict(what: str, error: float, limit: float) -> str:
    """Return "ok" or "WRONG" for an error (NaN is wrong), and remember what is wrong."""
    if error <= limit:
        return "ok"
    failures.append(f"{what}: {error:.3g} > {limit:.3g}")
    return "WRONG"


@contextmanager
def part(title: str) -> Iterator[None]:
    """Print an exception with its traceback, remember it, and go on."""
    start = time.monotonic()
    try:
        yield
    except Exception:
        failures.append(title)
        say(f"FAILED {title}")
        traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()
    if (seconds := time.monotonic() - start) > 20:
        say(f"  ({title}: {seconds:.0f} s)")


def run_parts(
    doc: str | None,
    parts: Mapping[str, Callable[[argparse.Namespace], None]],
    tokens: Sequence[int] = (1, 16, 64, 256, 1024, 4096, 16384),
    shapes: Sequence[str] = SHAPES,
    usual: Sequence[str] = (),
    **options: Sequence[str],
) -> None:
    """Run the named parts of a script, and exit with 1 if one failed.

    ``usual`` are the parts that run by default; all if there is none.

    Every part gets the arguments ``shapes``, ``tokens`` and ``options``, which have these defaults.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(parts)}; default: "
                        f"{', '.join(usual) or 'all'}")  # fmt: skip
    parser.add_argument("--shapes", nargs="+", default=list(shapes))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(tokens))
    for name, words in options.items():
        parser.add_argument(f"--{name}", nargs="+", default=list(words))
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in parts]:
        parser.error(f"unknown parts {unknown}; choose from {', '.join(parts)}")
    torch.manual_seed(0)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.parts or usual or parts:
        say(f"\n== {name}")
        with part(name):
            parts[name](args)
        torch.cuda.empty_cache()
    say(f"\n{len(failures)} failures", *failures[:40])
    raise SystemExit(bool(failures))


def problem_of(name: str, quant: str = "none", **changes: Any) -> moekit.MoEProblem:
    """Return the problem of a shape of `moekit_bench`: a name, or sizes ``E:K:H:I``."""
    return shape(name).problem(quant=quant, device="cuda", **changes)


def routings_of(problem: moekit.MoEProblem, tokens: int, count: int = 3) -> list[moekit.Routing]:
    """Return uniform routings; weights have to come from memory if there are several."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    sizes = (tokens, problem.num_experts, problem.top_k)
    return [
        moekit.simulate_routing("uniform", *sizes, device=DEVICE, generator=generator, index=i)
        for i in range(count)
    ]


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    return torch.randn(sizes, device=DEVICE).mul(std).to(dtype)


def prepared(calls: Sequence[Call], timer: Timer | None = None) -> Prepared:
    """Return a CUDA graph of all calls, one after another, for `take_turns` to time."""
    made = Prepared(lambda call: call(), [(call,) for call in calls], DEVICE, timer=timer)
    assert made.graph is not None, made.note
    return made


def in_turns(
    calls: Mapping[str, Sequence[Call]], replays: int = 10, timer: Timer | None = None
) -> dict[str, Result]:
    """Time several lists of calls in turns; each list is one CUDA graph."""
    ready = {name: prepared(each, timer) for name, each in calls.items()}
    times = take_turns(ready, replays)
    for name, result in times.items():
        if result.us is None:
            raise RuntimeError(f"{name}: {result.reason}")
    return times


def us_of(calls: Sequence[Call], replays: int = 10) -> float:
    """Return the microseconds of one of the calls, in a CUDA graph over all of them."""
    return in_turns({"": calls}, replays)[""].us or 0.0


def tflops(problem: moekit.MoEProblem, tokens: int, us: float) -> float:
    """Return the rate of a whole block's products."""
    columns = problem.w13_rows + problem.local_intermediate_size
    return 2e-6 * tokens * problem.top_k * problem.hidden_size * columns / us
