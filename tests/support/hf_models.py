"""Tiny MoE models of transformers with random weights.

    path = save(MIXTRAL, directory, torch.float32)      # the safetensors file
    model = load(directory)                             # transformers' own model, all eager
    logits_BSV, captures = forward(MIXTRAL, model, token_ids())
    logits_BSV = forward_with(MIXTRAL, model, token_ids(), my_layer)

Importing this module does not import transformers. Shape suffixes: T H as in moekit, B batch,
S sequence, V vocabulary; T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moekit import Activation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 96

RoutedFn = Callable[[int, Tensor], Tensor]
"""(layer, x_TH) -> out_TH, in the model's dtype: the whole MoE block but its shared experts."""


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """One tiny model: how to build it, where its parts are in memory, and facts of its experts."""

    name: str  # the config's model_type
    config: Mapping[str, Any] = field(hash=False)
    moe_layers: tuple[int, ...] = (0, 1)
    num_experts: int = 8
    top_k: int
    hidden_size: int
    intermediate_size: int  # of one routed expert
    fused: bool = False  # its file has one tensor for all experts
    has_bias: bool = False
    weight_on_input: bool = False
    activation: Activation = Activation("silu")
    gate_up_gain: float = 1.5  # std of gate and up at unit input
    block: str = "model.layers.{layer}.mlp"  # module path in memory; the next two are inside it
    router: str = "gate"
    shared: str | None = None
    stored: str = "model.layers.{layer}.mlp"  # what the file calls the block
    returns_pair: bool = False  # the block's forward returns (out, something)


# fmt: off
MIXTRAL = HFModel(
    name="mixtral", top_k=2, hidden_size=64, intermediate_size=128,
    stored="model.layers.{layer}.block_sparse_moe",
    config=dict(intermediate_size=128, num_local_experts=8),
)
QWEN3_MOE = HFModel(
    name="qwen3_moe", top_k=3, hidden_size=96, intermediate_size=64,
    config=dict(moe_intermediate_size=64, num_experts=8, norm_topk_prob=True, head_dim=16),
)
DEEPSEEK_V3 = HFModel(
    name="deepseek_v3", num_experts=16, top_k=4, hidden_size=96, intermediate_size=64,
    moe_layers=(1, 2), shared="shared_experts",
    config=dict(
        num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=128,
        moe_intermediate_size=64, n_routed_experts=16, n_shared_experts=2, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, num_key_value_heads=4, kv_lora_rank=32,
        q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
)
GPT_OSS = HFModel(
    name="gpt_oss", top_k=4, hidden_size=96, intermediate_size=64, gate_up_gain=4.0,
    router="router", returns_pair=True, fused=True, has_bias=True,
    activation=Activation("swigluoai", alpha=1.702, limit=7.0),
    config=dict(
        intermediate_size=64, num_local_experts=8, swiglu_alpha=1.702, swiglu_limit=7.0,
        head_dim=16, sliding_window=8, rope_parameters=dict(rope_type="default", rope_theta=1e5),
    ),
)
_LLAMA4 = "model.layers.{layer}.feed_forward"
LLAMA4 = HFModel(
    name="llama4_text", top_k=1, hidden_size=64, intermediate_size=128,
    block=_LLAMA4, stored=_LLAMA4, router="router", shared="shared_expert", returns_pair=True,
    fused=True, weight_on_input=True,
    config=dict(intermediate_size=128, num_local_experts=8, intermediate_size_mlp=128, head_dim=16),
)
# fmt: on
MODELS = (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, LLAMA4)


@torch.no_grad()
def save(hf: HFModel, directory: Path, dtype: torch.dtype, seed: int = 0) -> Path:
    """Build the model, fill all parameters at random, save it, and return the file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(vocab_size=VOCAB, hidden_size=hf.hidden_size, num_experts_per_tok=hf.top_k)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = AutoConfig.for_model(hf.name, **sizes | dict(hf.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.normal_(generator=generator)
        if "norm" in name:
            tensor.mul_(0.2).add_(1)
        elif "bias" in name or tensor.ndim == 1:  # experts' (E, ...); attention's, sinks, router's
            tensor *= 2 if tensor.ndim == 2 else 0.3
        elif "embed_tokens" not in name:
            fan_in = tensor.shape[-2 if tensor.ndim == 3 and hf.fused else -1]
            tensor *= (hf.gate_up_gain if name.endswith("gate_up_proj") else 1.5) / fan_in**0.5
    for name, owner in (*model.named_parameters(), *model.named_buffers()):
        if "e_score_correction_bias" not in name:
            owner.data = owner.data.to(dtype)
    model.save_pretrained(directory)
    return directory / "model.safetensors"


def load(directory: Path) -> PreTrainedModel:
    """Load transformers' own model from `save`'s directory, in the saved dtype, all eager."""
    from transformers import AutoModelForCausalLM

    how = dict(attn_implementation="eager", experts_implementation="eager", local_files_only=True)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **how).eval()


def token_ids(batch: int = 2, sequence: int = 19, seed: int = 1) -> Tensor:
    """Return random ids_BS, int64."""
    return torch.randint(VOCAB, (batch, sequence), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Capture:
    """Inputs and outputs of one MoE block, in the dtypes of transformers."""

    x_TH: Tensor
    shared_TH: Tensor | None  # of the shared experts alone
    out_TH: Tensor  # of the block: routed + shared


Captures = dict[int, Capture]


@torch.no_grad()
def forward(hf: HFModel, model: PreTrainedModel, ids_BS: Tensor) -> tuple[Tensor, Captures]:
    """Run transformers' own forward: (logits_BSV, {layer: its MoE block's capture})."""
    seen: dict[tuple[int, str | None], list[Tensor]] = {}

    def hook(key: tuple[int, str], _: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        seen[key] = [tensor.clone() for tensor in (*args, *outputs)]  # some change in place later

    with ExitStack() as hooks:
        for layer in hf.moe_layers:
            block = model.get_submodule(hf.block.format(layer=layer))
            for part in filter(None, (".", hf.shared)):
                module = block.get_submodule(part.strip("."))
                hooks.enter_context(module.register_forward_hook(partial(hook, (layer, part))))
        logits_BSV = model(ids_BS, use_cache=False).logits
    captures: Captures = {}
    for layer in hf.moe_layers:
        x_TH, out_TH = (t.reshape(-1, hf.hidden_size) for t in seen[layer, "."][:2])
        shared_TH = seen[layer, hf.shared][1].view_as(x_TH) if hf.shared else None
        captures[layer] = Capture(x_TH, shared_TH, out_TH)
    return logits_BSV, captures


@torch.no_grad()
def forward_with(hf: HFModel, model: PreTrainedModel, ids_BS: Tensor, routed: RoutedFn) -> Tensor:
    """Return logits_BSV when `routed` replaces every MoE block except its shared experts."""

    def replacement(block: nn.Module, layer: int, x: Tensor) -> Any:
        x_TH = x.reshape(-1, hf.hidden_size)
        out_TH = routed(layer, x_TH)
        assert out_TH.shape == x_TH.shape and out_TH.dtype == x_TH.dtype
        if hf.shared:
            out_TH = out_TH + block.get_submodule(hf.shared)(x_TH)
        return (out_TH.view_as(x), None) if hf.returns_pair else out_TH.view_as(x)

    with ExitStack() as undo:
        for layer in hf.moe_layers:
            block = model.get_submodule(hf.block.format(layer=layer))
            vars(block)["forward"] = partial(replacement, block, layer)  # hides the class's own
            undo.callback(vars(block).pop, "forward")
        return model(ids_BS, use_cache=False).logits
