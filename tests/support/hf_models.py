"""Tiny MoE models of transformers with random weights, and a description of their files.

    path = save(MIXTRAL, directory, torch.float32)      # the safetensors file
    model = load(directory)                             # transformers' own model, all eager
    logits_BSV, captures = forward(MIXTRAL, model, token_ids())
    logits_BSV = forward_with(MIXTRAL, model, token_ids(), my_layer)

`HFModel` describes one model: tensor names, shapes and layout in the file, routing, activation.
Importing this module does not import transformers. Shape suffixes: T K H I E as in moekit, B batch,
S sequence (in weights: the shared experts' intermediate size), V vocabulary; T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 96

RoutedFn = Callable[[int, Tensor], Tensor]
"""(layer, x_TH) -> out_TH, in the model's dtype: the whole MoE block but its shared experts."""
ExpertsFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x_TH, topk_ids_TK int64, topk_weights_TK) -> out_TH, in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Safetensors keys of one MoE layer, templates for `.format(layer=, expert=)`.

    Either every expert has gate, up and down as in nn.Linear, (I, H), (I, H), (H, I); or gate_up
    and down hold all experts and are transposed for x @ w, (E, H, 2I), (E, I, H).
    """

    down: str
    router: str  # (E, H)
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    interleaved: bool = False  # True: gate_up[..., 0::2] is gate, False: gate_up[..., :I] is gate
    gate_up_bias: str | None = None  # (E, 2I), interleaved as gate_up
    down_bias: str | None = None  # (E, H), inside the router weight: weight * (h @ w + bias)
    router_bias: str | None = None  # (E,), added to the logits
    correction_bias: str | None = None  # (E,), for the choice of experts only; fp32 on disk, always
    shared_gate: str | None = None  # (S, H)
    shared_up: str | None = None  # (S, H)
    shared_down: str | None = None  # (H, S)


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """The steps from logits_TE to topk_ids_TK and topk_weights_TK, and the dtype of each."""

    scoring: Literal["softmax", "sigmoid"]
    topk_first: bool = False  # top-k of the logits, then score those K (softmax: over K alone)
    renormalize: bool = False  # divide by (the sum over K + renormalize_eps)
    renormalize_eps: float = 0.0
    num_groups: int = 1  # a group's score is the sum of its two best (score + correction bias)
    topk_groups: int = 1
    scaling_factor: float = 1.0  # after renormalizing
    weight_on_input: bool = False  # weight * x goes into GEMM 1, the output is not weighted
    logits_dtype: Literal["model", "float32"] = "model"  # of the router's GEMM
    score_dtype: Literal["model", "float32"] = "float32"  # of softmax or sigmoid, and renormalizing
    weights_dtype: Literal["model", "float32"] = "model"  # of the weights handed to the experts


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """silu: silu(gate) * up; swigluoai: g * sigmoid(alpha * g) * (u + 1), where
    g = min(gate, limit) and u = clamp(up, -limit, limit)."""

    kind: Literal["silu", "swigluoai"] = "silu"
    alpha: float | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """One tiny model: how to build it, where its parts are in memory, and its file."""

    name: str  # the config's model_type
    config: Mapping[str, Any] = field(hash=False)
    moe_layers: tuple[int, ...] = (0, 1)
    num_experts: int = 8
    top_k: int
    hidden_size: int
    intermediate_size: int  # of one routed expert
    shared_intermediate_size: int = 0
    names: Names
    routing: RoutingSpec
    activation: ActivationSpec = ActivationSpec()
    gate_up_gain: float = 1.5  # std of gate and up at unit input
    block: str = "model.layers.{layer}.mlp"  # module path in memory; the next two are inside it
    router: str = "gate"
    shared: str | None = None
    returns_pair: bool = False  # the block's forward returns (out, something)

    def keys(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return every key of this MoE layer in the file, with its shape."""
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        s, n = self.shared_intermediate_size, self.names
        table = [(n.router, (e, h)), (n.router_bias, (e,)), (n.correction_bias, (e,))]
        table += [(n.shared_gate, (s, h)), (n.shared_up, (s, h)), (n.shared_down, (h, s))]
        table += [(n.gate_up, (e, h, 2 * i)), (n.gate_up_bias, (e, 2 * i)), (n.down_bias, (e, h))]
        table += [(n.gate, (i, h)), (n.up, (i, h)), (n.down, (e, i, h) if n.gate_up else (h, i))]
        rows = [(key, shape, x) for key, shape in table if key for x in range(e)]
        return {key.format(layer=layer, expert=x): shape for key, shape, x in rows}


def _names(block: str, shared: str = "", **roles: str) -> Names:
    """Return names under model.layers.N.<block>, with a shared MLP's."""
    if shared:
        roles |= {f"shared_{p}": f"{shared}.{p}_proj.weight" for p in ("gate", "up", "down")}
    prefix = "model.layers.{layer}." + block + "."
    return Names(**{role: prefix + name for role, name in roles.items()})  # type: ignore[arg-type]


_PER_EXPERT = {p: "experts.{expert}." + p + "_proj.weight" for p in ("gate", "up", "down")}
_FUSED = dict(gate_up="experts.gate_up_proj", down="experts.down_proj", router="router.weight")
# fmt: off
MIXTRAL = HFModel(
    name="mixtral", top_k=2, hidden_size=64, intermediate_size=128,
    config=dict(intermediate_size=128, num_local_experts=8),
    names=_names("block_sparse_moe", router="gate.weight", gate="experts.{expert}.w1.weight",
                 up="experts.{expert}.w3.weight", down="experts.{expert}.w2.weight"),
    routing=RoutingSpec(scoring="softmax", renormalize=True, weights_dtype="float32"),
)
QWEN3_MOE = HFModel(
    name="qwen3_moe", top_k=3, hidden_size=96, intermediate_size=64,
    config=dict(moe_intermediate_size=64, num_experts=8, norm_topk_prob=True, head_dim=16),
    names=_names("mlp", router="gate.weight", **_PER_EXPERT),
    routing=RoutingSpec(scoring="softmax", renormalize=True),
)
DEEPSEEK_V3 = HFModel(
    name="deepseek_v3", num_experts=16, top_k=4, hidden_size=96, intermediate_size=64,
    shared_intermediate_size=128, moe_layers=(1, 2), shared="shared_experts",
    config=dict(
        num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=128,
        moe_intermediate_size=64, n_routed_experts=16, n_shared_experts=2, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, num_key_value_heads=4, kv_lora_rank=32,
        q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
    names=_names("mlp", "shared_experts", router="gate.weight", **_PER_EXPERT,
                 correction_bias="gate.e_score_correction_bias"),
    routing=RoutingSpec(
        scoring="sigmoid", renormalize=True, renormalize_eps=1e-20, num_groups=4, topk_groups=2,
        scaling_factor=2.5, logits_dtype="float32", weights_dtype="float32",
    ),
)
GPT_OSS = HFModel(
    name="gpt_oss", top_k=4, hidden_size=96, intermediate_size=64, gate_up_gain=4.0,
    router="router", returns_pair=True,
    config=dict(
        intermediate_size=64, num_local_experts=8, swiglu_alpha=1.702, swiglu_limit=7.0,
        head_dim=16, sliding_window=8, rope_parameters=dict(rope_type="default", rope_theta=1e5),
    ),
    names=replace(_names("mlp", **_FUSED, gate_up_bias="experts.gate_up_proj_bias",
                         down_bias="experts.down_proj_bias", router_bias="router.bias"),
                  interleaved=True),
    routing=RoutingSpec(scoring="softmax", topk_first=True, score_dtype="model"),
    activation=ActivationSpec(kind="swigluoai", alpha=1.702, limit=7.0),
)
LLAMA4 = HFModel(
    name="llama4_text", top_k=1, hidden_size=64, intermediate_size=128,
    shared_intermediate_size=128, block="model.layers.{layer}.feed_forward", router="router",
    shared="shared_expert", returns_pair=True,
    config=dict(intermediate_size=128, num_local_experts=8, intermediate_size_mlp=128, head_dim=16),
    names=_names("feed_forward", "shared_expert", **_FUSED),
    routing=RoutingSpec(scoring="sigmoid", topk_first=True, weight_on_input=True),
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
            fan_in = tensor.shape[-2 if tensor.ndim == 3 and hf.names.gate_up else -1]
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
    logits_TE: Tensor
    topk_ids_TK: Tensor  # int64; the order over K is transformers'
    topk_weights_TK: Tensor
    shared_TH: Tensor | None  # of the shared experts alone
    out_TH: Tensor  # of the block: routed + shared


Captures = dict[int, Capture]


def _read_router(hf: HFModel, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits_TE, topk_ids_TK, topk_weights_TK) of the router module's result."""
    if not hf.routing.weight_on_input:
        logits_TE, weights_TK, ids_TK = output
        return logits_TE, ids_TK, weights_TK
    scores_TE, logits_TE = output  # Llama 4: 0 where not chosen
    ids_TK = logits_TE.topk(hf.top_k, dim=-1).indices
    return logits_TE, ids_TK, scores_TE.gather(1, ids_TK)


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
            for part in filter(None, (".", hf.router, hf.shared)):
                module = block.get_submodule(part.strip("."))
                hooks.enter_context(module.register_forward_hook(partial(hook, (layer, part))))
        logits_BSV = model(ids_BS, use_cache=False).logits
    captures: Captures = {}
    for layer in hf.moe_layers:
        x_TH, out_TH = (t.reshape(-1, hf.hidden_size) for t in seen[layer, "."][:2])
        logits_TE, ids_TK, weights_TK = _read_router(hf, seen[layer, hf.router][1:])
        shared_TH = seen[layer, hf.shared][1].view_as(x_TH) if hf.shared else None
        captures[layer] = Capture(x_TH, logits_TE, ids_TK, weights_TK, shared_TH, out_TH)
    return logits_BSV, captures


def after_own_router(hf: HFModel, model: PreTrainedModel, experts: ExpertsFn) -> RoutedFn:
    """Return a `RoutedFn` that uses the model's own router module and then `experts`."""

    def routed(layer: int, x_TH: Tensor) -> Tensor:
        router = model.get_submodule(f"{hf.block.format(layer=layer)}.{hf.router}")
        return experts(layer, x_TH, *_read_router(hf, router(x_TH))[1:])

    return routed


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
