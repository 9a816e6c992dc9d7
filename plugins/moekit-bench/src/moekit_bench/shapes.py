"""The sizes of real models, routings, inputs and weights to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moekit import simulate_routing
from moekit.errors import InvalidProblem
from moekit.plugin import Adapters, ExpertWeights, MoEProblem, ParallelConfig, Routing

from .internals import shapes as adapter_shapes

Inputs = Sequence[tuple[Tensor, Routing]]


@dataclass(frozen=True)
class Shape:
    """The sizes of an experts block.

    A shape that is named after one rank of expert parallelism stands for that rank alone:
    ``num_experts`` are its local experts, and all ``top_k`` choices of a token are among them.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    name: str = ""
    source: str = "given"
    activation: str = "silu"
    has_bias: bool = False

    def problem(self, *, ep: int = 1, **changes: Any) -> MoEProblem:
        """Return the problem that this shape poses.

        Args:
            ep: Describe the first of this many ranks. All of them have the same tokens, so no token
                moves.
            changes: Further arguments of MoEProblem, such as quant, dtype and device.
        """
        given = vars(self) | {"parallel": ParallelConfig(ep_size=ep, dp_size=1)} | changes
        del given["name"], given["source"]
        return MoEProblem(**given)


_GPT_OSS: Mapping[str, Any] = {"activation": "swigluoai", "has_bias": True}

# The sizes come from each model's config.json on the Hugging Face hub: num_local_experts,
# num_experts or n_routed_experts, num_experts_per_tok, hidden_size, and moe_intermediate_size or
# intermediate_size.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(8, 2, 4096, 14336, "mixtral", "mistralai/Mixtral-8x7B-v0.1"),
        Shape(8, 2, 6144, 16384, "mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1"),
        Shape(128, 8, 2048, 768, "qwen3-30b", "Qwen/Qwen3-30B-A3B"),
        Shape(128, 8, 4096, 1536, "qwen3-235b", "Qwen/Qwen3-235B-A22B"),
        Shape(256, 8, 7168, 2048, "dsv3", "deepseek-ai/DeepSeek-V3"),
        Shape(32, 8, 7168, 2048, "dsv3-ep8", "deepseek-ai/DeepSeek-V3, one rank of EP 8"),
        Shape(256, 8, 7168, 256, "dsv3-tp8", "deepseek-ai/DeepSeek-V3, one rank of TP 8"),
        Shape(32, 4, 2880, 2880, "gpt-oss-20b", "openai/gpt-oss-20b", **_GPT_OSS),
        Shape(128, 4, 2880, 2880, "gpt-oss-120b", "openai/gpt-oss-120b", **_GPT_OSS),
        Shape(48, 8, 7168, 2048, "kimi-k2-ep", "moonshotai/Kimi-K2-Instruct, one rank of EP 8"),
        Shape(160, 8, 5120, 1536, "glm-4.5", "zai-org/GLM-4.5"),
        Shape(64, 8, 2048, 1024, "olmoe", "allenai/OLMoE-1B-7B-0924"),
    )
}


def shape(text: str) -> Shape:
    """Return the shape of a name in `SHAPES`, or of sizes ``E:K:H:I``.

    Raises:
        InvalidProblem: The text is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(":")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        experts, top_k, hidden, inner = map(int, parts)
        return Shape(experts, top_k, hidden, inner, text)
    raise InvalidProblem(
        f"shape {text!r} is unknown; choose from {', '.join(SHAPES)}, or give sizes as "
        "EXPERTS:TOP_K:HIDDEN:INTERMEDIATE, for example 8:2:4096:14336"
    )


def inputs(
    kind: str, tokens: int, count: int, problem: MoEProblem, device: torch.device, seed: int = 0
) -> Inputs:
    """Return ``count`` different inputs: x (T, H), standard normal in the problem's dtype, and its
    routing."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + tokens)
    made, sizes = [], (tokens, problem.num_experts, problem.top_k)
    for index in range(count):
        shape = (tokens, problem.hidden_size)
        x = torch.randn(shape, device=device, dtype=problem.dtype, generator=generator)
        routed = simulate_routing(kind, *sizes, device=device, generator=generator, index=index)
        made.append((x, routed))
    return made


def random_weights(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Return canonical random weights of the local experts in the problem's scheme.

    Experts are made and quantized one at a time, so that little more memory is used than the result
    takes. The act-order is random.
    """
    generator = torch.Generator(device).manual_seed(seed)
    L, H, inner = problem.num_local_experts, problem.hidden_size, problem.local_intermediate_size
    rows = problem.w13_rows

    def normal(*size: int, std: float) -> Tensor:
        value = torch.randn(size, device=device, dtype=torch.float32, generator=generator)
        return value.mul_(std).to(problem.dtype)

    whole: dict[str, Tensor] = {}
    for expert in range(L):
        one = ExpertWeights(normal(1, rows, H, std=H**-0.5), normal(1, H, inner, std=inner**-0.5))
        for name, part in one.quantize(problem.quant).tensors().items():
            if name not in whole:
                whole[name] = torch.empty((L, *part.shape[1:]), dtype=part.dtype, device=device)
            whole[name][expert].copy_(part[0])
    if problem.has_bias:
        whole["w13_bias"] = normal(L, rows, std=0.1)
        whole["w2_bias"] = normal(L, H, std=0.1)
    operand, activation = problem.quant.weight, problem.quant.activation
    if operand is not None and operand.act_order:
        for name, columns in (("w13", H), ("w2", inner)):
            order_LK = torch.rand((L, columns), device=device, generator=generator).argsort(dim=1)
            whole[f"{name}_g_idx"] = (order_LK // operand.group[1]).int()
    if activation is not None and activation.static:
        # Just above the largest of many standard normal values, and of silu(gate) * up of those.
        for name, largest in (("w13_input_scale", 6.0), ("w2_input_scale", 16.0)):
            whole[name] = torch.full((1, 1), largest / activation.qmax, device=device)
    values: dict[str, Any] = whole
    return ExpertWeights(**values).canonical(problem)


def random_adapters(problem: MoEProblem, device: torch.device, seed: int = 0) -> Adapters:
    """Return random adapters whose deltas are as large as the base's products; they require a
    gradient if the problem trains."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {
        name: torch.randn(size, device=device, generator=generator)
        .mul_(size[-1] ** -0.5)
        .to(problem.dtype)
        .requires_grad_(problem.training)
        for name, size in adapter_shapes(problem).items()
    }
    count = made["w13_a"].shape[0]
    return Adapters(torch.rand(count, device=device, generator=generator) + 0.5, **made)
