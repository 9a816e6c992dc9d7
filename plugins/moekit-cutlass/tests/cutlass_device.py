"""What device_check.py's parts share: paths, arguments, problems and data. Importing it sets up
sys.path, so it must come first.
"""

from __future__ import annotations

import argparse
import contextlib
import site
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

_PLUGINS = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(_PLUGINS.parent),
    *(str(_PLUGINS / f"moekit-{name}" / "src") for name in ("cutlass", "triton")),
]
_arguments = argparse.ArgumentParser()
_arguments.add_argument("--site")
_arguments.add_argument("--only", nargs="*", default=[])
_arguments.add_argument("--variants", nargs="*", default=[])
_arguments.add_argument("--schemes", nargs="*", default=[])
_arguments.add_argument("--shapes", nargs="*", default=[])
_arguments.add_argument("--tokens", nargs="*", type=int, default=[])
_arguments.add_argument("--budget", type=float, default=200.0)
ARGS = _arguments.parse_args()
if ARGS.site:
    sys.path.insert(0, ARGS.site)
    site.addsitedir(ARGS.site)  # runs nvidia_cutlass_dsl's .pth

import torch  # noqa: E402
from moekit_cutlass import library, moekit_experts, providers  # noqa: E402
from moekit_cutlass.kernels import Groups, sort_pairs  # noqa: E402
from moekit_cutlass.providers import QuackPlan  # noqa: E402
from moekit_kernels.align import align_scratch  # noqa: E402

import moekit  # noqa: E402
from moekit.runtime.workspace import Workspace  # noqa: E402

SHAPES = {  # E, K, H, I
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
}
TOKENS = [1, 16, 64, 256, 1024, 4096, 16384]
BF16_PEAK, FP8_PEAK, READ = 791e12, 1447e12, 4.49e12  # measured.md's ceilings of an H200
GATHER, COPY = QuackPlan(gather=True), QuackPlan(gather=False)

# name -> (provider, quack's plan, torch's fast accumulation)
VARIANTS = {
    "none": {
        "quack": ("quack", None, True),
        "quack-gather": ("quack", GATHER, True),
        "quack-copy": ("quack", COPY, True),
        "torch": ("torch", GATHER, True),
    },
    "fp8": {
        "torch": ("torch", GATHER, True),
        "torch-slow-accum": ("torch", GATHER, False),
        "vllm": ("vllm", GATHER, True),
    },
    "w4a8": {"vllm": ("vllm", GATHER, True)},
}
if ARGS.variants:
    VARIANTS = {
        kind: {name: v for name, v in variants.items() if name in ARGS.variants}
        for kind, variants in VARIANTS.items()
    }
SCHEMES = ("none", "fp8_channel_token", "fp8_tensor", "fp8_tensor_static", library.W4A8)
LIMIT = {"none": 8e-3, "fp8": 9e-2, "w4a8": 9e-2}
DEVICE = torch.device("cuda")


def say(*words: object, sep: str = " ") -> None:
    print(*words, sep=sep, flush=True)


FAILURES: list[str] = []


def bad(what: str) -> None:
    say(what)
    FAILURES.append(what.splitlines()[0])


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        bad(f"FAILED {name}\n{traceback.format_exc(limit=-6)}")
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()


def family(scheme: str) -> str:
    return {"none": "none", library.W4A8: "w4a8"}.get(scheme, "fp8")


def chosen_schemes(*default: str) -> tuple[str, ...]:
    return tuple(ARGS.schemes) or default


@contextlib.contextmanager
def only(scheme: str, variant: str) -> Iterator[None]:
    """That provider alone, as it is configured in VARIANTS."""
    name, plan, fast = VARIANTS[family(scheme)][variant]
    if why := library.missing(name):
        raise RuntimeError(why)
    bounds = tuple((low, (name,)) for low, _ in providers.PREFERRED[scheme])
    table = {**providers.PREFERRED, scheme: bounds}
    plans = providers.quack_plans if plan is None else lambda problem: ((0, plan),)
    with (
        mock.patch.object(providers, "PREFERRED", table),
        mock.patch.object(providers, "quack_plans", plans),
        mock.patch.object(providers.Torch, "fast_accum", fast),
    ):
        yield


def registry() -> moekit.Registry:
    backends = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    for spec in moekit_experts():
        backends.register(spec)
    return backends


def problem_of(shape: tuple[int, int, int, int], scheme: str, **changes) -> moekit.MoEProblem:
    E, K, H, inner = shape
    sizes = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=inner)
    return moekit.MoEProblem(**{**sizes, "quant": scheme, "device": "cuda", **changes})


def weights_of(problem: moekit.MoEProblem) -> moekit.ExpertWeights:
    """Made on the GPU, expert by expert."""
    L, H, inner = problem.num_local_experts, problem.hidden_size, problem.local_intermediate_size

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=problem.dtype) * scale

    bias = {}
    if problem.has_bias:
        bias = {"w13_bias": randn(L, problem.w13_rows), "w2_bias": randn(L, H)}
    one = [
        moekit.ExpertWeights(
            randn(1, problem.w13_rows, H, scale=H**-0.5), randn(1, H, inner, scale=inner**-0.5)
        ).quantize(problem.quant)
        for _ in range(L)
    ]
    names = one[0].tensors()
    whole = {name: torch.cat([getattr(w, name) for w in one]) for name in names}
    if problem.quant.name == "fp8_tensor_static":
        for name, value in (("w13_input_scale", 0.013), ("w2_input_scale", 0.1)):
            bias[name] = torch.tensor(value, device=DEVICE)
    return moekit.ExpertWeights(**whole, **bias)


def routing_of(
    problem: moekit.MoEProblem, tokens: int, holes: float = 0.0, crowded: bool = False
) -> moekit.Routing:
    """crowded: every token goes to the last top_k experts, and the others stay empty."""
    scores = torch.rand(tokens, problem.num_experts, device=DEVICE)
    if crowded:
        scores[:, -problem.top_k :] += 1
    ids = scores.topk(problem.top_k, dim=1).indices
    weights = torch.rand(ids.shape, device=DEVICE) + 0.3
    if holes and tokens:
        ids = torch.where(torch.rand(ids.shape, device=DEVICE) < holes, -1, ids)
        ids[-1] = -1
        weights[ids < 0] = float("nan")
    return moekit.Routing(weights, ids)


def tokens_of(problem: moekit.MoEProblem, routing: moekit.Routing) -> torch.Tensor:
    x = torch.randn(len(routing.topk_ids), problem.hidden_size, device=DEVICE).to(problem.dtype)
    x[(routing.topk_ids < 0).all(dim=1)] = float("nan")
    return x


class NaNWorkspace(Workspace):
    def take(self, specs, device):
        views = super().take(specs, device)
        for view in views:
            view.view(-1).view(torch.uint8).fill_(255)
        return views


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(out).all():
        return float("nan")
    return float((out.float() - want).norm() / want.norm().clamp(min=1e-30))


def sorted_groups(ids: torch.Tensor, L: int) -> Groups:
    n = ids.numel()
    sizes = (tuple(ids.shape), (L + 1,), (n,), (align_scratch(n, L),))
    *three, scratch = (torch.zeros(s, dtype=torch.int32, device=DEVICE) for s in sizes)
    groups = Groups(ids.contiguous(), *three)
    sort_pairs(groups, scratch)
    return groups


def microseconds(replay: Callable[[], object], calls: int, repeats: int = 10) -> float:
    for _ in range(2):
        replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def chosen_shapes() -> dict[str, tuple[int, int, int, int]]:
    return {name: SHAPES[name] for name in ARGS.shapes or SHAPES}
