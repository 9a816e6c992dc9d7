"""Layouts: one tensor for all experts, transposed, interleaved; names and prefixes; replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from torch import Tensor

from moekit import MoEProblem, ParallelConfig
from moekit.checkpoint import (
    NAMES,
    Checkpoint,
    ExpertNames,
    detect,
    load_experts,
    load_layers,
    problem_from_config,
)
from moekit.errors import WeightsError

pytest.importorskip("safetensors")

E, H, I = 5, 128, 160
RANKS = [
    ParallelConfig(ep_size=3, ep_rank=e, tp_size=tp, tp_rank=t, dp_size=1)
    for e in range(3)
    for tp in (1, 2, 4)
    for t in range(tp)
]


def config(model_type: str, **more: Any) -> dict[str, Any]:
    sizes = dict(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=1)
    return dict(model_type=model_type, hidden_act="silu", dtype="bfloat16", **sizes, **more)


def stack(n: int, k: int, packer: files.Packer) -> tuple[dict[str, Tensor], Tensor]:
    """Return one tensor per suffix with the experts in dim 0, and the values."""
    made = [packer(files.matrix(n, k)) for _ in range(E)]
    return {s: torch.stack([t[s] for t, _ in made]) for s in made[0][0]}, torch.stack(
        [back for _, back in made]
    )


def check(path: Path, gate: Tensor, up: Tensor, down: Tensor, **how: Any) -> None:
    """Check that every rank loads exactly its share."""
    with Checkpoint(path) as checkpoint:
        for parallel in RANKS:
            problem = problem_from_config(
                checkpoint, parallel=parallel, device="cpu", dequantize=bool(how)
            )
            weights = load_experts(checkpoint, None, 0, problem, **how)
            weights.check(problem)
            canonical = weights.canonical(problem)
            plain = canonical if how else canonical.dequantize(problem.quant)
            i, mine = problem.local_intermediate_size, list(problem.local_experts)
            cut = slice(parallel.tp_rank * i, (parallel.tp_rank + 1) * i)
            w13 = torch.cat([gate[mine][:, cut], up[mine][:, cut]], dim=1)
            # dequantized at load, the values are rounded to the problem's dtype
            w13, w2 = (t.to(plain.w13.dtype) for t in (w13, down[mine][:, :, cut]))
            assert torch.equal(plain.w13, w13) and torch.equal(plain.w2, w2), parallel


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", ""])
@pytest.mark.parametrize(
    "model_type", ["llama4_text", "qwen3_vl_moe_text", "granitemoe", "mixtral"]
)
def test_one_tensor_for_all_experts(model_type: str, prefix: str, tmp_path: Path) -> None:
    """bf16: Llama 4 stores (in, out), Qwen3-VL does by its shapes, Mixtral as in memory."""
    transposed = model_type in ("llama4_text", "qwen3_vl_moe_text")
    names = NAMES[model_type].under(prefix)
    if model_type == "mixtral":
        stem = f"{prefix}layers.{{layer}}.mlp.experts"
        names = ExpertNames(gate_up=f"{stem}.gate_up_proj", down=f"{stem}.down_proj")
    (w13, back13), (w2, back2) = (stack(n, k, files.bf16) for n, k in ((2 * I, H), (H, I)))
    tensors = {
        template.format(layer=0): (t["weight"].mT if transposed else t["weight"])
        for template, t in ((names.gate_up, w13), (names.down, w2))
    }
    text = config(model_type)
    files.save(tmp_path, tensors, dict(model_type="wrapper", text_config=text), shards=2)
    check(tmp_path, back13[:, :I], back13[:, I:], back2)
    found = detect(tmp_path)
    assert found.groups[0].scheme == "none"
    assert found.groups[0].problem.apply_router_weight_on_input == (model_type == "llama4_text")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_fused_fp8_blocks(said: bool, transposed: bool, tmp_path: Path) -> None:
    """transformers writes x_scale_inv for x; the config or the shape gives the block."""
    tensors, values = {}, []
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        packed, back = stack(n, k, files.fp8(64, 64, "scale_inv"))
        values.append(back)
        stem = f"model.layers.0.mlp.experts.{name}"
        tensors[stem] = packed["weight"].mT if transposed else packed["weight"]
        scale = packed["scale_inv"]
        tensors[f"{stem}_scale_inv"] = scale.mT if transposed else scale
    quantization = dict(quant_method="fp8", weight_block_size=[64, 64]) if said else {}
    files.save(
        tmp_path, tensors, config("qwen3_vl_moe_text", quantization_config=quantization), shards=2
    )
    assert detect(tmp_path).groups[0].formats[0].group == (64, 64)
    gate_up, down = values
    check(tmp_path, gate_up[:, :I], gate_up[:, I:], down, dequantize=True)


def test_modelopt_llama4(tmp_path: Path) -> None:
    """fp8 (in, out) with one scale and one input scale for all experts."""
    stem, tensors, back = "language_model.model.layers.0.feed_forward.experts", {}, {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        values = torch.randn(E, n, k)
        scale = values.abs().max() / 448
        weight = (values / scale).to(files.FP8)
        back[name] = weight.float() * scale
        tensors |= {
            f"{stem}.{name}": weight.mT,
            f"{stem}.{name}_weight_scale": scale,
            f"{stem}.{name}_input_scale": torch.tensor(0.5),
        }
    quantization = dict(quant_method="modelopt", quant_algo="FP8")
    files.save(tmp_path, tensors, config("llama4_text", quantization_config=quantization))
    assert detect(tmp_path).groups[0].scheme == "fp8_tensor_static"
    gate_up = back["gate_up_proj"]
    check(tmp_path, gate_up[:, :I], gate_up[:, I:], back["down_proj"])
    problem = problem_from_config(tmp_path, device="cpu")
    assert load_experts(tmp_path, None, 0, problem).w2_input_scale == 0.5


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return mxfp4 blocks as released: rows are outputs, gate and up alternate, with biases."""
    stem, tensors, values = "model.layers.0.mlp.experts", {}, {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        packed, values[name] = stack(n, k, files.mxfp4(("blocks", "scales")))
        tensors |= {f"{stem}.{name}_{suffix}": t for suffix, t in packed.items()}
        values[f"{name}_bias"] = tensors[f"{stem}.{name}_bias"] = torch.randn(E, n).bfloat16()
    path = tmp_path_factory.mktemp("gpt_oss")
    said = config("gpt_oss", swiglu_limit=7.0, quantization_config=dict(quant_method="mxfp4"))
    files.save(path, tensors, said, shards=2)
    return path, values | {"blocks": tensors[f"{stem}.down_proj_blocks"]} | {
        "scales": tensors[f"{stem}.down_proj_scales"]
    }


def test_gpt_oss(gpt_oss: tuple[Path, dict[str, Tensor]]) -> None:
    """Quarters of 5 groups of 32 are a group and 8 columns of the last one each."""
    path, values = gpt_oss
    (found,) = detect(path).groups
    assert (found.scheme, found.problem.activation.name) == ("mxfp4_w4a16", "swigluoai")
    gate_up, down = values["gate_up_proj"], values["down_proj"]
    bias = values["gate_up_proj_bias"]
    for tp_size in (1, 2, 4):
        seen = []
        for rank in range(tp_size):
            parallel = ParallelConfig(ep_size=2, tp_size=tp_size, tp_rank=rank, dp_size=1)
            problem = problem_from_config(path, parallel=parallel, device="cpu")
            assert (problem.quant.name, problem.has_bias) == ("mxfp4_w4a16", True)
            weights = load_experts(path, "gpt_oss", 0, problem)
            weights.check(problem)
            canonical = weights.canonical(problem)
            plain = canonical.dequantize(problem.quant)
            mine = {
                1: list(range(160)),
                2: [*range(64 * rank, 64 * rank + 64), *range(128 + 16 * rank, 144 + 16 * rank)],
                4: [*range(32 * rank, 32 * rank + 32), *range(128 + 8 * rank, 136 + 8 * rank)],
            }[tp_size]
            seen += mine
            want = torch.cat([gate_up[:3, 0::2][:, mine], gate_up[:3, 1::2][:, mine]], dim=1)
            assert torch.equal(plain.w13, want)
            assert torch.equal(plain.w2, down[:3, :, mine])
            want = torch.cat([bias[:3, 0::2][:, mine], bias[:3, 1::2][:, mine]], dim=1)
            assert torch.equal(canonical.w13_bias, want)
        assert sorted(seen) == list(range(160))


def test_gpt_oss_dequantized(gpt_oss: tuple[Path, dict[str, Tensor]]) -> None:
    """Four ranks have 40 columns each of groups of 32."""
    path, values = gpt_oss
    gate_up, down = values["gate_up_proj"], values["down_proj"]
    check(path, gate_up[:, 0::2], gate_up[:, 1::2], down, dequantize=True)
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    problem = problem_from_config(path, parallel=parallel, dequantize=True, device="cpu")
    weights = load_experts(path, "gpt_oss", 0, problem, dequantize=True)
    assert weights.w13.dtype == torch.bfloat16 and weights.interleaved
    assert torch.equal(weights.w13_bias, values["gate_up_proj_bias"][:, I:])
    assert torch.equal(weights.w2_bias, values["down_proj_bias"])


def test_gpt_oss_as_transformers_reads_it(gpt_oss: tuple[Path, dict[str, Tensor]]) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    _, values = gpt_oss
    theirs = mxfp4.convert_moe_packed_tensors(values["blocks"], values["scales"])
    assert torch.equal(theirs.float().mT, values["down_proj"])


@pytest.mark.parametrize(
    ("algorithm", "scheme"),
    [("nvfp4", "nvfp4"), ("W4A16_NVFP4", "nvfp4_w4a16"), ("W4A8_NVFP4_FP8", None)],
)
def test_modelopt_fp4(tmp_path: Path, algorithm: str, scheme: str | None) -> None:
    config = dict(quant_method="modelopt", quant_algo=algorithm)
    path = files.write(tmp_path, files.nvfp4(modelopt=True), config, E=2, H=64, I=64).path
    assert detect(path).groups[0].scheme == scheme
    if scheme is None:
        with pytest.raises(
            WeightsError, match="no scheme for them with W4A8_NVFP4_FP8 activations"
        ):
            problem_from_config(path, device="cpu")


def test_fp4_of_a_matrix_of_zeros(tmp_path: Path) -> None:
    """A pruned expert has scales of zero in e4m3, which are valid."""
    config = dict(quant_method="modelopt", quant_algo="NVFP4")
    layer = files.write(tmp_path, files.nvfp4(modelopt=True), config, E=2, H=64, I=64)
    name = "model.layers.0.mlp.experts.1.down_proj.weight_scale"
    layer.tensors[name].zero_()
    files.save(tmp_path, layer.tensors, json.loads((tmp_path / "config.json").read_text()))
    problem = problem_from_config(tmp_path, dequantize=True, device="cpu")
    weights = load_experts(tmp_path, None, 0, problem, dequantize=True)
    assert bool((weights.w2[1] == 0).all()) and bool((weights.w2[0] != 0).any())
    quantized = problem_from_config(tmp_path, device="cpu")
    load_experts(tmp_path, None, 0, quantized).check(quantized)
    layer.tensors[name].view(torch.uint8)[0, 0] = 0xB8  # -1
    files.save(tmp_path, layer.tensors, json.loads((tmp_path / "config.json").read_text()))
    weights = load_experts(tmp_path, None, 0, problem, dequantize=True)
    exact = load_experts(tmp_path, None, 0, quantized).canonical(quantized)
    assert bool((weights.w2[1, 0] != 0).any())
    assert torch.equal(exact.dequantize(quantized.quant).w2.bfloat16(), weights.w2)
    layer.tensors[name].view(torch.uint8)[0, 0] = 0x7F  # NaN
    files.save(tmp_path, layer.tensors, json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(WeightsError, match=f"{name} holds values that are not finite"):
        load_experts(tmp_path, None, 0, quantized)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    """Nemotron-H: up and down, relu squared."""
    ups, downs, tensors = [], [], {}
    for expert in range(E):
        stem = f"backbone.layers.1.mixer.experts.{expert}"
        up, down = files.matrix(I, H).bfloat16(), files.matrix(H, I).bfloat16()
        tensors |= {f"{stem}.up_proj.weight": up, f"{stem}.down_proj.weight": down}
        ups.append(up)
        downs.append(down)
    files.save(
        tmp_path,
        tensors,
        config("nemotron_h") | dict(hidden_act=None, mlp_hidden_act="relu2", num_hidden_layers=2),
    )
    found = detect(tmp_path)
    assert (found.groups[0].problem.activation.name, found.layers) == ("relu2", (1,))
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
    weights = load_experts(tmp_path, None, 1, problem)
    assert torch.equal(weights.w13, torch.stack(ups)[:, I // 2 :])
    assert torch.equal(weights.w2, torch.stack(downs)[:, :, I // 2 :])
    with pytest.raises(WeightsError, match="activation silu does not fit experts with no gate"):
        load_experts(tmp_path, None, 1, problem.replace(activation="silu"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> files.Layer:
    path = tmp_path_factory.mktemp("plain")
    return files.write(path, files.bf16, E=6, I=64, layers=3)


def test_replicas_and_other_placements(plain: files.Layer) -> None:
    """Replicas repeat the first experts, and any other placement may be passed."""
    slots = []
    for rank in range(4):
        parallel = ParallelConfig(ep_size=4, ep_rank=rank)
        problem = problem_from_config(
            plain.path, parallel=parallel, num_redundant_experts=3, device="cpu"
        )
        weights = load_experts(plain.path, None, 2, problem)
        slots += [p % 6 for p in problem.local_experts]
        assert torch.equal(weights.w2.float(), plain.down[slots[-len(weights.w2) :]])
        if rank == 1:
            moved = load_experts(plain.path, None, 2, problem, experts=[5, 5])
            assert torch.equal(moved.w2.float(), plain.down[[5, 5]])
            for wrong, said in (
                ([1], "experts must name one .*got 1"),
                ([0, 6], r"experts must be in 0..5 \(got \[6\]"),
            ):
                with pytest.raises(WeightsError, match=said):
                    load_experts(plain.path, None, 2, problem, experts=wrong)
    assert slots == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_layers_one_after_the_other(plain: files.Layer) -> None:
    with Checkpoint(plain.path) as checkpoint:
        problem = problem_from_config(checkpoint, device="cpu")
        kept = list(load_layers(checkpoint, None, detect(checkpoint).layers, problem))
        assert [layer for layer, _ in kept] == [0, 1, 2]
        assert torch.equal(kept[2][1].w2.float(), plain.down)
        assert not torch.equal(kept[0][1].w2, kept[2][1].w2)


def test_a_checkpoint_of_two_models(tmp_path: Path) -> None:
    """The caller must choose one."""
    tensors: dict[str, Tensor] = {}
    for prefix in ("thinker.model.", "talker.model."):
        stem = prefix + "layers.{layer}.mlp.experts.{expert}"
        made = files.write(tmp_path, files.bf16, E=2, I=64, stem=stem)
        tensors |= made.tensors
    files.save(tmp_path, tensors, config("qwen3_moe") | dict(num_local_experts=2))
    problem = MoEProblem(num_experts=2, top_k=1, hidden_size=H, intermediate_size=64, device="cpu")
    with pytest.raises(WeightsError, match="several sets of experts: talker.*, thinker"):
        load_experts(tmp_path, "qwen3_moe", 0, problem)
    names = NAMES["qwen3_moe"].under("talker.model.")
    assert torch.equal(load_experts(tmp_path, names, 0, problem).w2.float(), made.down)


def test_custom_names(tmp_path: Path) -> None:
    made = files.write(
        tmp_path, files.gptq(32), dict(quant_method="gptq", group_size=32, sym=True),
        stem="net.{layer}.moe.{expert}", names=("a", "b", "c"), model_type="mystery",
    )  # fmt: skip
    stem = "net.{layer}.moe.{expert}"
    names = ExpertNames(gate=f"{stem}.a.weight", up=f"{stem}.b.weight", down=f"{stem}.c.weight")
    problem = problem_from_config(tmp_path, names=names, device="cpu")
    assert problem.quant.name == "int4_w4a16_g32"
    weights = load_experts(tmp_path, names, 0, problem).canonical(problem)
    assert torch.equal(weights.dequantize(problem.quant).w2, made.down)
    with pytest.raises(
        WeightsError, match=r"names of model type 'mystery' are not known .*ExpertNames\(gate="
    ):
        detect(tmp_path)


# What model types call the sizes of a tiny model; each takes what it knows.
SMALL: dict[str, Any] = dict(
    vocab_size=32, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    num_experts_per_tok=2, moe_topk=2, moe_k=2, num_experts=4, num_local_experts=4,
    n_routed_experts=4, moe_num_experts=4, moe_intermediate_size=16, n_shared_experts=1,
    shared_expert_intermediate_size=16, shared_intermediate_size=16, first_k_dense_replace=1,
    num_dense_layers=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, rotary_dim=8,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, topk_method="greedy", pad_token_id=0,
    layer_types=["full_attention"] * 2,
)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": dict(mamba_n_heads=2, layer_types=["attention", "mamba"]),
    "llama4_text": dict(num_experts_per_tok=1, intermediate_size_mlp=16),
}
# Parts of multimodal models, and models whose layers are of several kinds.
NOT_ALONE = {
    "qwen3_omni_moe_text", "glm4v_moe_text", "qwen3_vl_moe_text", "jamba", "nemotron_h",
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(NAMES.keys() - NOT_ALONE))
def test_saved_by_transformers(model_type: str, tmp_path: Path) -> None:
    """transformers has the same names: the loaded weights are the module's."""
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {model_type}")
    said = transformers.AutoConfig.for_model(model_type, **SMALL | OTHERS.get(model_type, {}))
    model = transformers.AutoModelForCausalLM.from_config(said, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    problem = problem_from_config(tmp_path, device="cpu")
    weights = load_experts(tmp_path, None, 1, problem)
    assert problem.num_experts == 4 and problem.dtype == torch.bfloat16
    canonical = weights.canonical(problem)
    for name, loaded in (("gate_up_proj", canonical.w13), ("down_proj", canonical.w2)):
        (p,) = (
            p
            for full, p in model.named_parameters()
            if "layers.1." in full and full.endswith(f"experts.{name}")
        )
        own = p.mT if model_type in ("gpt_oss", "llama4_text") else p
        if model_type == "gpt_oss" and name == "gate_up_proj":
            own = torch.cat([own[:, 0::2], own[:, 1::2]], dim=1)
        assert torch.equal(loaded, own), name
