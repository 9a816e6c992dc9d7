"""Adapters (LoRA) of vLLM's manager as adapters of moekit's experts.

`FusedMoEWithLoRA`, vLLM's wrapper of an MoE layer, asks the quantization method for its kernel, and
gives the kernel's experts a context: tensors for ``max_loras`` adapters, which vLLM fills and
clears, and the adapter of each token. `ServedAdapters.kernel_for` returns such a kernel. These
tensors then use moekit's memory and layout, so vLLM writes directly into moekit's adapters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moekit import MoEProblem
from moekit.engines.kernels import in_own_memory
from moekit.plugin import Adapters, AdapterSlots
from moekit_vllm import versions

_MOST_RANK = 256


def room(layer: Any) -> AdapterSlots | None:
    """Return the slots for adapters that a layer needs, or None."""
    config = layer.moe_config
    if not config.is_lora_enabled:
        return None
    versions.lora_classes()  # an ImportError here leaves the layer to vLLM
    lora = _settings(layer)
    return AdapterSlots(lora.max_loras, lora.max_lora_rank, separate=config.is_act_and_mul)


def _settings(layer: Any) -> Any:
    """Return the engine's settings. An update of the weights may know no engine."""
    if not hasattr(layer, "moekit_lora_settings"):
        layer.moekit_lora_settings = versions.lora_config()
    return layer.moekit_lora_settings


def refusals(layer: Any, exchanges_tokens: bool, interleaved: bool) -> dict[str, bool]:
    """Return the reasons not to take the adapters of a layer, and whether each one holds."""
    config = layer.moe_config
    if not config.is_lora_enabled:
        return {}
    lora, split = _settings(layer), config.moe_parallel_config
    return {
        "it has adapters (LoRA), and its ranks have different tokens, whose adapters vLLM and "
        "moekit do not exchange": exchanges_tokens,
        "it has adapters (LoRA) with alternating rows of gate and up": interleaved,
        "--fully-sharded-loras spreads ranks of adapters over GPUs": (
            bool(lora.fully_sharded_loras) and getattr(split, "tp_size", 1) > 1
        ),
        f"its adapters (LoRA) are {lora.lora_dtype}, and moekit's are {config.in_dtype}": (
            lora.lora_dtype != config.in_dtype
        ),
        f"its adapters (LoRA) have ranks up to {lora.max_lora_rank}, moekit's {_MOST_RANK}": (
            lora.max_lora_rank > _MOST_RANK
        ),
        "EPLB moves experts, and adapters (LoRA) do not move": (
            bool(getattr(split, "enable_eplb", False))
        ),
    }


class ServedAdapters:
    """The adapters of one layer.

    Attributes:
        stack: None until vLLM gives the layer its context.
    """

    def __init__(self, problem: MoEProblem) -> None:
        self.problem = problem
        self.stack: Adapters | None = None

    def take(self, context: Any) -> None:
        """Let a context's tensors use moekit's memory; vLLM multiplies B by the scaling itself."""
        # vLLM writes the slots here for each pass; rows that pad a batch keep their old slots.
        self._slots: Tensor = context.punica_wrapper._token_lora_indices.fill_(-1)
        w13_a, w13_b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
        (w2_a,), (w2_b,) = context.w2_lora_a_stacked, context.w2_lora_b_stacked
        p, new = self.problem, w2_a.new_zeros
        (count, experts, rank, _), slices = w2_a.shape, len(w13_a)
        first = w13_a[0].shape[1], w2_b.shape[1]  # 1 where the experts share a matrix
        made_a = new(count, first[0], slices, rank, p.hidden_size)
        made_b = new(count, experts, p.w13_rows, rank)
        made_2a = new(count, experts, rank, p.local_intermediate_size)
        made_2b = new(count, first[1], p.hidden_size, rank)
        step = p.local_intermediate_size
        parts = [(a, made_a[:, :, i]) for i, a in enumerate(w13_a)]
        parts += [(b, made_b[:, :, i * step :]) for i, b in enumerate(w13_b)]
        for given, own in (*parts, (w2_a, made_2a), (w2_b, made_2b)):
            _move(given, own)
        groups = 2 if p.adapters is not None and p.adapters.separate else 1
        self.stack = Adapters(
            # vLLM writes all the others when it loads an adapter, also after sleep of level 2.
            in_own_memory(lambda: torch.ones(count, device=w2_a.device)),
            made_a.expand(-1, experts, groups, -1, -1),
            made_b,
            made_2a,
            made_2b.expand(-1, experts, -1, -1),
        )

    def ids(self, tokens: int) -> Tensor | None:
        """Return the slot of each token (T,) int32, -1 for none; None before `take`."""
        if self.stack is None:
            return None
        ids: Tensor = self._slots[:tokens].int()
        return ids

    def kernel_for(self, layer: Any) -> Any:
        """Return a kernel for `FusedMoEWithLoRA`."""
        takes_lora, modular = versions.lora_classes()
        experts = type("Experts", (takes_lora,), {"set_lora_context": lambda _, c: self.take(c)})()
        return SimpleNamespace(
            impl=object.__new__(modular),
            fused_experts=experts,
            prepare_finalize=SimpleNamespace(topk_indices_dtype=lambda: None),
            moe_config=layer.moe_config,
            supports_lora=lambda: True,
            output_is_reduced=lambda: False,
            can_overlap_shared_experts=False,
        )


def _move(given: Tensor, own: Tensor) -> None:
    """Let ``given`` use ``own``'s memory and free its previous one; vLLM keeps views of it."""
    part = own[tuple(slice(size) for size in given.shape)]
    part.copy_(given)
    storage = given.untyped_storage()
    given.data = part
    storage.resize_(0)
