"""moekit trains the routed experts of an unmodified torchtitan::

    --override.imports moekit_torchtitan.routed_experts

The override takes the place of `RoutedExperts`, which dispatches, computes and combines.
Parameters, their names, initialization, sharding and checkpoints stay torchtitan's. A kernel is
composed at the first call, for bf16 as torchtitan's own experts, and for the ranks of the
expert-parallel mesh.

Shape suffixes are torchtitan's: B batch, L sequence, D model dimension, F hidden dimension, E
experts, K top-k, T tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

import moekit
from moekit.training import TrainableKernel

logger = logging.getLogger("moekit")


class MoekitRoutedExperts(RoutedExperts):  # type: ignore[misc]  # torchtitan is not typed
    """Routed experts whose tokens and products are a kernel of moekit."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """Further fields: names of backends, as in `moekit.compose`."""

        dispatcher: str | None = None
        experts: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._names = config.dispatcher, config.experts
        self._top_k = config.token_dispatcher.top_k
        self._mesh: Any = None
        self._kernel: TrainableKernel | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does, and remember the expert-parallel mesh."""
        super().parallelize(parallel_dims)
        self._mesh = parallel_dims.get_optional_mesh("ep")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        _num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Return the routed experts' output (B, L, D) in the dtype of x."""
        x_TD = x_BLD.flatten(0, 1).bfloat16()
        scores_TK = topk_scores_BLK.flatten(0, 1).float()
        routing = moekit.Routing(scores_TK, topk_expert_ids_BLK.flatten(0, 1))
        weights = _weights(self.inner_experts)
        if self._kernel is None:
            self._kernel = self._composed(weights)
        out_TD = self._kernel(x_TD, weights, routing)
        return out_TD.type_as(x_BLD).view(x_BLD.shape)

    def _composed(self, weights: moekit.ExpertWeights) -> TrainableKernel:
        """Compose for the local parameters. Collective over the expert-parallel mesh."""
        mesh, parallel = self._mesh, moekit.ParallelConfig()
        if mesh is not None:
            ranks, rank = mesh.size(), mesh.get_local_rank()
            parallel = moekit.ParallelConfig(ep_size=ranks, ep_rank=rank, dp_size=ranks)
        _, D, F = weights.w2.shape  # F is a slice where tensor parallelism cuts the experts
        problem = moekit.MoEProblem(
            num_experts=self.inner_experts.num_experts, top_k=self._top_k, hidden_size=D,
            intermediate_size=F, training=True, parallel=parallel, device=weights.w2.device,
        )  # fmt: skip
        group = None if mesh is None else mesh.get_group()
        kernel = moekit.compose(problem, *self._names, group=group)
        assert isinstance(kernel, TrainableKernel)
        return kernel


def _weights(experts: GroupedExperts) -> moekit.ExpertWeights:
    """Return this rank's parameters in bf16; gate and up are copied into one matrix."""

    def local(parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    gate_up = torch.cat([local(experts.w1_EFD), local(experts.w3_EFD)], dim=1)
    return moekit.ExpertWeights(gate_up.bfloat16(), local(experts.w2_EDF).bfloat16())


@cache
def _leave(config: str) -> None:
    logger.warning("moekit leaves %s to torchtitan: it computes GroupedExperts only", config)


@override(target=RoutedExperts.Config, description="moekit's dispatchers and expert kernels")  # type: ignore[untyped-decorator]
def routed_experts(
    cfg: RoutedExperts.Config, *, dispatcher: str | None = None, experts: str | None = None
) -> RoutedExperts.Config:
    """Return the config of moekit's experts. Experts of another class stay torchtitan's."""
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        _leave(type(cfg.inner_experts).__qualname__)
        return cfg
    return derive(cfg, MoekitRoutedExperts.Config, dispatcher=dispatcher, experts=experts)
