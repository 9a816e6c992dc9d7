"""FusedMoE with vLLM's interface: its keywords, and quantization configs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_moe_cases import SIZES, loaded, make, push, stacks
from layer_cases import E, H, K, logits_for
from moekit_vllm import FusedMoE
from moekit_vllm.layer.keywords import resolve, set_ranks
from torch import nn

import moekit
from moekit import ParallelConfig
from moekit.errors import InvalidInput, InvalidProblem
from moekit.problem.quant import SCHEMES
from moekit.testing.cases import random_x

# -- the keywords -----------------------------------------------------------------------------


GROUPS = {"num_expert_group": 3, "topk_group": 2}
SIGMOID = {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
SIGMOID |= {"e_score_correction_bias": torch.linspace(0, 1, E)}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"renormalize": False}, {"renormalize": False}),
        (GROUPS, {}),  # ignored without use_grouped_topk
        (GROUPS | {"use_grouped_topk": True}, GROUPS),
        (SIGMOID, SIGMOID),
        ({"zero_expert_num": 2, "zero_expert_type": "identity"}, {"zero_expert_num": 2}),
        ({"activation": "gelu", "router_logits_dtype": torch.float32}, {"activation": "gelu"}),
        (dict.fromkeys(("gate", "bias_vl", "runner_args", "swiglu_limit", "router")), {}),
        ({"pcp_size": 1, "enable_eplb": True, "n_shared_experts": 2, "skip_padding": True}, {}),
    ],
)
def test_keywords_are_those_of_moekits_layer(theirs: dict, ours: dict) -> None:
    layer, tensors = loaded(**theirs)
    other = moekit.FusedMoE(**SIZES, params_dtype=torch.float32, device="cpu", **ours)
    w13 = torch.cat([tensors["w1"], tensors["w3"]], 1)
    other.load_weights(moekit.ExpertWeights(w13, tensors["w2"]))
    x, logits = random_x(other.problem, 9), logits_for(other, 9)
    assert torch.equal(layer(hidden_states=x, router_logits=logits), other(x, logits))


def swiglu(gate, up, limit=torch.inf, alpha=1.0, beta=0.0):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


def written_out(tensors: dict, x, weights, ids, activation=swiglu):
    """Return the sum over experts in fp64."""
    out, x = torch.zeros(x.shape, dtype=torch.float64), x.double()
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up, down = (tensors[shard][e].double() for shard in ("w1", "w3", "w2"))
            out[t] += weight * (down @ activation(gate @ x[t], up @ x[t]))
    return out


def same(out, want) -> bool:
    return bool((out - want).norm() < 1e-5 * want.norm())


def test_a_custom_routing_function_gets_vllms_keywords() -> None:
    weights, ids = torch.ones(5, K), torch.arange(K).expand(5, -1).int()

    def first(*, hidden_states, gating_output, topk, renormalize):
        assert hidden_states.shape == (5, H) and gating_output.shape == (5, E) and not renormalize
        return weights, ids

    layer, tensors = loaded(custom_routing_function=first, renormalize=False)
    x = torch.randn(5, H)
    assert same(layer(x, torch.randn(5, E)), written_out(tensors, x, weights, ids))


def test_experts_without_a_gate() -> None:
    tensors = stacks()
    del tensors["w3"]
    layer = make(activation="relu2", is_act_and_mul=False)
    mapping = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="up", ckpt_down_proj_name="down", ckpt_up_proj_name="", num_experts=E
    )
    assert len(mapping) == 2 * E and {shard for *_, shard in mapping} == {"w1", "w2"}
    push(layer, tensors)
    layer.process_weights_after_loading()
    assert torch.equal(layer.packed["w13"], tensors["w1"])


@pytest.mark.parametrize(
    ("theirs", "is_act_and_mul", "ours"),
    [
        ("silu", True, "silu"),
        ("silu", False, "silu_no_mul"),
        ("silu_no_mul", True, "silu_no_mul"),
        ("relu2", True, "relu2_and_mul"),
        ("relu2", False, "relu2"),
        ("relu2_no_mul", False, "relu2"),
        ("relu2_no_mul", True, "relu2"),
        ("swigluoai_uninterleave", True, "swigluoai"),
    ],
)
def test_activations_by_their_names_in_vllm(theirs: str, is_act_and_mul: bool, ours: str) -> None:
    layer = make(activation=theirs, is_act_and_mul=is_act_and_mul, experts="torch")
    assert layer.problem.activation.name == ours


@pytest.mark.parametrize("name", ["swigluoai", "swigluoai_uninterleave"])
def test_rows_of_gate_and_up_in_one_tensor(name: str) -> None:
    tensors, layer, other = stacks(), make(activation=name), make(activation=name)
    push(other, tensors)
    gate, up = tensors.pop("w1"), tensors.pop("w3")
    w13 = (
        torch.stack([gate, up], 2).flatten(1, 2)
        if name == "swigluoai"
        else torch.cat([gate, up], 1)
    )
    push(layer, tensors)
    layer.w13_weight.weight_loader(layer.w13_weight, w13, "w13_weight", "w13", 0)
    for each in (layer, other):
        each.process_weights_after_loading()
    assert torch.equal(layer.packed["w13"], other.packed["w13"])


@pytest.mark.parametrize("renormalize", [True, False])
def test_hash_routing(renormalize: bool) -> None:
    """vLLM's dsv4 router: the table's experts, weighed by sqrt(softplus(logits)) of their own."""
    vocabulary, T, scale = 40, 12, 1.5
    made = torch.full((vocabulary, K), 2**20, dtype=torch.int32)  # what a loader replaces
    table = nn.Parameter(made, requires_grad=False)
    bias = torch.linspace(0, 9, E)  # chooses nothing where there is a table
    options = dict(scoring_func="sqrtsoftplus", renormalize=renormalize)
    options |= dict(routed_scaling_factor=scale, e_score_correction_bias=bias)
    layer, tensors = loaded(hash_indices_table=table, **options)
    table.data.copy_(torch.rand(vocabulary, E).topk(K).indices)
    x, logits = torch.randn(T, H), 3 * torch.randn(T, E)
    input_ids = torch.randint(vocabulary, (T,), dtype=torch.int32 if renormalize else torch.int64)
    ids = table[input_ids].long()
    weights = nn.functional.softplus(logits.double()).sqrt().gather(1, ids)
    weights = scale * (weights / weights.sum(1, keepdim=True) if renormalize else weights)
    want = written_out(tensors, x, weights, ids)
    assert same(layer(x, logits, input_ids), want)
    assert not same(layer(x, logits, input_ids.flip(0)), want)
    with pytest.raises(InvalidInput, match="token_ids .* go together"):
        layer(x, logits)
    plain, _ = loaded()
    assert torch.equal(plain(x, logits, input_ids), plain(x, logits))  # as in vLLM


@pytest.mark.parametrize(
    ("name", "numbers", "formula"),
    [
        ("silu", dict(limit=1.0), lambda g, u: swiglu(g, u, 1.0, 1.0, 0.0)),
        ("swigluoai", dict(limit=7.0, alpha=1.702), lambda g, u: swiglu(g, u, 7.0, 1.702, 1.0)),
        (
            "swigluoai_uninterleave",
            dict(limit=1.0, alpha=0.5, beta=1.0),
            lambda g, u: swiglu(g, u, 1.0, 0.5, 1.0),
        ),
        ("swigluoai_uninterleave", dict(limit=0.5), lambda g, u: swiglu(g, u, 0.5, 1.0, 0.0)),
        (
            "situ",
            dict(situ_beta=2.0, situ_linear_beta=1.5),
            lambda g, u: 2 * (g / 2).tanh() * g.sigmoid() * 1.5 * (u / 1.5).tanh(),
        ),
        (
            "situ",
            dict(situ_beta=0.5, situ_linear_beta=-1.0),
            lambda g, u: 0.5 * (2 * g).tanh() * g.sigmoid() * u,
        ),
        ("gelu_pytorch_tanh", dict(limit=1.0), lambda g, u: _gelu(g) * u),  # vLLM ignores it
    ],
)
def test_numbers_of_activations(name: str, numbers: dict, formula) -> None:
    """vLLM 0.33, layers/fused_moe/activation.py and the operators that it calls."""
    keywords = {
        f"activation_{n}" if n.startswith("situ") else f"swiglu_{n}": v for n, v in numbers.items()
    }
    layer, tensors = loaded(activation=name, **keywords)
    x, logits = 2 * torch.randn(7, H), torch.randn(7, E)
    weights, ids = logits.double().softmax(-1).topk(K)
    weights = weights / weights.sum(-1, keepdim=True)
    assert same(layer(x, logits), written_out(tensors, x, weights, ids, formula))


def _gelu(gate):
    return nn.functional.gelu(gate, approximate="tanh")


def test_a_factor_of_the_output() -> None:
    """vLLM's runner multiplies the routed output, also where weights scale the input."""
    x, logits = torch.randn(5, H), torch.randn(5, E)
    for options in ({}, dict(top_k=1, apply_router_weight_on_input=True, renormalize=False)):
        layer, tensors = loaded(**options)
        scaled = make(routed_scaling_factor=2.5, apply_routed_scale_to_output=True, **options)
        push(scaled, tensors)
        scaled.process_weights_after_loading()
        assert torch.equal(scaled(x, logits), layer(x, logits) * 2.5)
    # The factor of weights that scale the input is inside the activation.
    weighed = make(routed_scaling_factor=2.5, **options)
    push(weighed, tensors)
    weighed.process_weights_after_loading()
    assert (weighed(x, logits) - scaled(x, logits)).norm() > 0.1 * scaled(x, logits).norm()


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ((None, None, None), {}),
        ((4, None, None), dict(tp_size=4)),
        ((2, 1, 2), dict(tp_size=2, dp_size=2)),
        ((2, 4, 2), dict(tp_size=2, dp_size=2, enable_expert_parallel=True)),
        ((None, 8, None), dict(tp_size=8, dp_size=1, enable_expert_parallel=True)),
    ],
)
def test_sizes_of_ranks(sizes: tuple, want: dict) -> None:
    found: dict = {}
    set_ranks(found, *sizes)
    assert found == want


def test_the_view_of_one_rank() -> None:
    parallel = ParallelConfig(ep_size=4, ep_rank=1, dp_size=1)
    layer = make(parallel=parallel, num_redundant_experts=2, reduce_results=False)
    assert layer.expert_map.tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert (layer.global_num_experts, layer.local_num_experts) == (8, 2)
    assert (layer.ep_size, layer.tp_size, layer.partial) == (4, 1, True)
    assert not layer.must_reduce_shared_expert_outputs()
    robin = make(parallel=parallel, expert_placement_strategy="round_robin")
    assert robin.expert_map.tolist() == [-1, 0, -1, -1, -1, 1]
    assert make().expert_map is None


WRONG = {
    "gate": (dict(gate=nn.Linear(2, 2)), "has no gate .*: it computes routed experts from router_"),
    "shared": (dict(fuse_shared_experts=True), "has no fuse_shared_experts .*do the rest in the m"),
    "runner": (dict(runner_args={"a": 1}), "choose dispatcher=... and experts=... by name"),
    "hash": (dict(hash_indices_table=torch.zeros(9, K).int()), "scoring_func='sqrtsoftplus' only"),
    "numbers": (dict(activation=moekit.Activation("silu"), swiglu_beta=7.0), "and swiglu_beta are"),
    "number": (dict(swiglu_limit="7"), "limit='7': it must be a finite number"),
    "other numbers": (dict(activation="swigluoai", swiglu_limit=5.0), "got swiglu_limit=5.0 and"),
    "kind": (dict(activation="swish", swiglu_limit=5.0), "activation 'swish' is unknown; choose"),
    "zeros": (
        dict(apply_routed_scale_to_output=True, routed_scaling_factor=2.0, zero_expert_num=1),
        "apply_routed_scale_to_output=True scales no identity experts",
    ),
    "groups": (dict(use_grouped_topk=True), "use_grouped_topk=True needs num_expert_group and"),
    "ep": (dict(ep_size=3, tp_size=2), "ep_size=3 must be tp_size . dp_size"),
    "zero": (dict(zero_expert_type="copy"), "zero_expert_type='copy': it must be 'identity' or"),
    "config": (dict(quant_config=3), "quant_config=3: it must be a model's quantization_config"),
    "scheme": (dict(quant_config="fp9"), "quant scheme 'fp9' is unknown; choose one of: none, fp8"),
    "no scheme": (
        dict(quant_config=dict(quant_method="fp8", weight_block_size=[64, 64])),
        "quant_config: the experts are stored as fp8 .*: moekit has no scheme for them .* dequant",
    ),
    "scheme of others": (dict(quant_config="fp8_block", quant="int8_w8a16"), "does not fit quant="),
    "no method": (dict(quant_config={}), "has no quant_method, expected .* or fp8"),
    "no groups": (dict(quant_config={"quant_method": "compressed-tensors"}), "no config_groups"),
    "split": (dict(parallel=ParallelConfig(), tp_size=2), "parallel is given, so tp_size"),
    "activation": (dict(activation="swish"), "activation 'swish' is unknown; choose one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(InvalidProblem, match=message):
        make(**arguments)


def test_unknown_keywords() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'renormalise'"):
        make(renormalise=True)


# -- quantization configs ---------------------------------------------------------------------

_FP8 = dict(quant_method="fp8", activation_scheme="static")
_MODELOPT = dict(quantization=dict(quant_algo="FP8"))
_AWQ = dict(quant_method=SimpleNamespace(value="awq"), bits=4, group_size=64)


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        (dict(quant_method="fp8", weight_block_size=[128, 128]), "fp8_block"),
        (_FP8, "fp8_tensor_static"),
        (_FP8 | dict(ignored_layers=["a.experts"]), "none"),
        (_MODELOPT, "fp8_tensor_static"),
        (SimpleNamespace(to_dict=lambda: _AWQ), "int4_w4a16_g64_zp"),
        (SCHEMES["mxfp8"], "mxfp8"),
        ("int4_w4a16_g128", "int4_w4a16_g128"),
        (None, "none"),
    ],
)
def test_quantization_configs(given: Any, scheme: str) -> None:
    assert resolve(given, None, False, (256, 512, 1), "a.experts")[1].name == scheme
