"""moekit's part of the comparison with transformers: problems, routing and layers by file.

Module-level functions, so that ranks of a RankPool can run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import hf_models as hfm
import torch
from torch import Tensor

import moekit
from moekit import Activation, MoEProblem, ParallelConfig, Routing
from moekit.checkpoint import Checkpoint, load_experts

MODELS = {hf.name: hf for hf in hfm.MODELS}


def relative_rms(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def problem_of(
    hf: hfm.HFModel, dtype: torch.dtype, parallel: ParallelConfig | None = None
) -> MoEProblem:
    """Return the problem of a tiny model's routed experts, on the CPU."""
    activation = Activation(hf.activation.kind)
    if hf.activation.kind == "swigluoai":
        activation = Activation("swigluoai", alpha=hf.activation.alpha, limit=hf.activation.limit)
    return MoEProblem(
        num_experts=hf.num_experts,
        top_k=hf.top_k,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        dtype=dtype,
        activation=activation,
        has_bias=hf.names.down_bias is not None,
        apply_router_weight_on_input=hf.routing.weight_on_input,
        parallel=parallel,
        device="cpu",
    )


@dataclass(frozen=True)
class Router:
    """The router of one layer: its tensors from the file, and its rule."""

    hf: hfm.HFModel
    weight: Tensor
    bias: Tensor | None
    correction_bias: Tensor | None

    @classmethod
    def read(cls, hf: hfm.HFModel, path: Path, layer: int) -> Router:
        with Checkpoint(path) as file:

            def tensor(template: str | None) -> Tensor | None:
                return None if template is None else file.read(template.format(layer=layer))

            weight = tensor(hf.names.router)
            assert weight is not None
            return cls(hf, weight, tensor(hf.names.router_bias), tensor(hf.names.correction_bias))

    def __call__(self, x_TH: Tensor) -> Routing:
        rule, dtype = self.hf.routing, x_TH.dtype
        if rule.logits_dtype == "float32":
            dtype = torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = torch.nn.functional.linear(x_TH.to(dtype), self.weight.to(dtype), bias)
        grouped = rule.num_groups > 1
        return moekit.route(
            logits,
            self.hf.top_k,
            scoring=rule.scoring,
            # softmax over the K chosen logits is softmax over all, renormalized
            renormalize=rule.renormalize or (rule.topk_first and rule.scoring == "softmax"),
            correction_bias=self.correction_bias,
            num_expert_group=rule.num_groups if grouped else None,
            topk_group=rule.topk_groups if grouped else None,
            routed_scaling_factor=rule.scaling_factor,
        )


def routed_layer(
    model: str | hfm.HFModel,
    path: str,
    layer: int,
    x_TH: Tensor,
    parallel: ParallelConfig | None = None,
    dispatcher: str | None = None,
    experts: str | None = None,
) -> Tensor:
    """Compute the routed part of one MoE layer with moekit, from the file: (T, H)."""
    hf = MODELS[model] if isinstance(model, str) else model
    problem = problem_of(hf, x_TH.dtype, parallel)
    kernel = moekit.compose(problem, dispatcher, experts)
    weights = kernel.pack(load_experts(path, hf.name, layer, problem))
    routing = Router.read(hf, Path(path), layer)(x_TH)
    out = kernel(x_TH, weights, routing)
    kernel.destroy()
    return out


def expert_parallel_rank(
    rank: int, world: int, name: str, path: str, layer: int, xs: list[Tensor], experts: str | None
) -> Tensor:
    """Run one rank of expert parallelism, with its tokens xs[rank] and its experts."""
    parallel = ParallelConfig(ep_size=world, ep_rank=rank)
    return routed_layer(name, path, layer, xs[rank], parallel, "naive", experts)


def tensor_parallel_rank(
    rank: int, world: int, name: str, path: str, layer: int, x_TH: Tensor
) -> Tensor:
    """Run one rank of tensor parallelism: all tokens, a slice of every expert, all-reduced."""
    parallel = ParallelConfig(tp_size=world, tp_rank=rank)
    out = routed_layer(name, path, layer, x_TH, parallel, "local")
    torch.distributed.all_reduce(out)
    return out
