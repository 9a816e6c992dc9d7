"""The roofline: what a block must at least compute and read, and how fast a device can do that.
docs/bench.md says what counts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from moekit.plugin import ExpertWeights, MoEProblem

from .records import Ceilings
from .shapes import Inputs

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}


# By the start of torch's device name, from benchmarks/device/ceilings.py. int8 is taken to be what
# fp8 is, as the tensor cores' rates are equal.
CEILINGS = {
    "NVIDIA H200": Ceilings(
        {"bf16": 791e12, "fp16": 791e12, "fp8": 1424e12, "int8": 1424e12}, 4.49e12
    ),
    "NVIDIA H100 80GB HBM3": Ceilings(
        {"bf16": 788e12, "fp16": 788e12, "fp8": 1433e12, "int8": 1433e12}, 3.11e12
    ),
}


def known_ceilings(device_name: str) -> Ceilings | None:
    return next((c for name, c in CEILINGS.items() if device_name.startswith(name)), None)


def arithmetic(problem: MoEProblem) -> str:
    """Return the arithmetic whose FLOP rate bounds the GEMMs: the type of the activations, as
    weights can be widened to it."""
    activation = problem.quant.activation
    name = problem.dtype_name if activation is None else activation.dtype
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class Work:
    """The work of one call, averaged over its inputs. rows: the (token, expert) assignments to
    local experts."""

    flop: float
    bytes: float
    active_experts: float
    rows: float


def work(problem: MoEProblem, weights: ExpertWeights, inputs: Inputs) -> Work:
    """Count the work in the ids themselves (synchronizes with the device)."""
    local = problem.local_experts
    ids = [routing.topk_ids for _, routing in inputs]
    held = [each[(each >= local.start) & (each < local.stop)] for each in ids]
    active = statistics.fmean(len(set(each.tolist())) for each in held)
    rows = statistics.fmean(each.numel() for each in held)
    matrices = problem.w13_rows + problem.local_intermediate_size
    tokens = inputs[0][0].shape[0]
    activations = 2 * tokens * problem.hidden_size * problem.dtype.itemsize
    return Work(
        flop=2.0 * rows * problem.hidden_size * matrices,
        bytes=active * bytes_per_expert(weights) + activations,
        active_experts=active,
        rows=rows,
    )


def bytes_per_expert(weights: ExpertWeights) -> float:
    """Return the bytes of one expert's matrices, scales, zero points, g_idx and biases."""
    L = weights.num_experts
    own = (t for t in weights.tensors().values() if t.dim() > 1 and t.shape[0] == L)
    return sum(t.nbytes for t in own) / L


def limit_us(done: Work, problem: MoEProblem, ceilings: Ceilings | None) -> float | None:
    """Return the microseconds that no implementation should beat; None without a known ceiling."""
    if ceilings is None or arithmetic(problem) not in ceilings.flops:
        return None
    return 1e6 * max(done.flop / ceilings.flops[arithmetic(problem)], done.bytes / ceilings.read)
