"""sonic-moe's experts with gradients (0.1.2.post1; CuTe DSL and Triton, over quack-kernels).

Its pins exclude torch 2.10 and later, so install it without them: `pip install --no-deps
sonic-moe==0.1.2.post1 quack-kernels==0.6.5`, beside `nvidia-cutlass-dsl[cu13]==4.7.1`. As sonic-moe
asks for it, quack tunes each product at its first call, which is not timed. MOEKIT_QUACK_TUNED=0
takes quack's default tiles instead.
"""

from __future__ import annotations

import functools
import os
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import torch
from moekit_bench import Unavailable

name, trains = "sonic", True


def version() -> str:
    try:
        return f"sonic-moe {installed('sonic-moe')}"
    except PackageNotFoundError:
        return ""


def make(problem, weights, device):
    if not problem.training or problem.activation.name != "silu" or problem.has_bias:
        raise Unavailable("only training, plain silu without biases")
    try:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import backward, forward, moe_general_routing_inputs
    except ImportError as error:
        raise Unavailable(f"sonicmoe does not import: {error}") from error
    if os.environ.get("MOEKIT_QUACK_TUNED") == "0":
        names = ((forward, "gemm"), (forward, "gemm_gated"), (backward, "gemm"))
        for module, gemm in (*names, (backward, "gemm_dgated")):
            setattr(module, gemm, functools.partial(getattr(module, gemm), tuned=False))
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    w13, w2 = weights.w13.permute(1, 2, 0), weights.w2.permute(1, 2, 0)  # the experts last

    @functools.cache
    def tokens_of(tokens, top_k):
        return torch.arange(tokens, dtype=torch.int32, device=device).repeat_interleave(top_k)

    def call(x, routing):
        out, _ = moe_general_routing_inputs(
            x, routing.topk_weights.reshape(-1), tokens_of(*routing.topk_ids.shape),
            routing.topk_ids.reshape(-1).int(), w13, None, w2, None, problem.num_experts, stream,
            ActivationType.SWIGLU, concat_layout=True,
        )  # fmt: skip
        return out

    return call
