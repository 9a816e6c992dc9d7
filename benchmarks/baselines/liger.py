"""Liger's fused experts with gradients (liger-kernel 0.8.5, Triton): `pip install liger-kernel`.

Each call waits for the device once, to know how many tiles there are.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from moekit_bench import Unavailable

name, trains = "liger", True


def version() -> str:
    try:
        return f"liger-kernel {installed('liger-kernel')}"
    except PackageNotFoundError:
        return ""


def make(problem, weights, device):
    if not problem.training or problem.activation.name != "silu" or problem.has_bias:
        raise Unavailable("only training, plain silu without biases")
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction as fused
    except ImportError as error:
        raise Unavailable(f"liger-kernel does not import: {error}") from error

    def call(x, routing):
        ids = routing.topk_ids.to(x.device)
        return fused.apply(x, weights.w13, weights.w2, ids, routing.topk_weights.to(x.dtype))

    return call
