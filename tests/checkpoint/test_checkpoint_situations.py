"""Situations from bug reports of engines: the file is read for what it is, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from checkpoint_cases import ct
from torch import Tensor

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.checkpoint import (
    NAMES,
    ExpertNames,
    declared_format,
    detect,
    load_experts,
    problem_from_config,
    schema,
)
from moekit.cli.main import main
from moekit.errors import WeightsError

pytest.importorskip("safetensors")

H, I, E, K = 256, 128, 4, 2
SIZES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
STEM = "model.layers.0.mlp.experts"
Tensors = dict[str, Tensor]


def config(model_type: str = "qwen3_moe", **more: Any) -> dict[str, Any]:
    made = dict(
        model_type=model_type, hidden_size=H, moe_intermediate_size=I, intermediate_size=4 * I,
        num_experts=E, num_experts_per_tok=K, num_hidden_layers=2, hidden_act="silu",
        dtype="bfloat16",
    ) | more  # fmt: skip
    return {key: value for key, value in made.items() if value is not ...}


def write(folder: Path, tensors: Mapping[str, Tensor], conf: dict[str, Any]) -> Path:
    files.save(folder, tensors, conf)
    return folder


def experts(packer: files.Packer, stem: str = STEM) -> tuple[Tensors, Tensors]:
    """Return the tensors of one layer, and what each matrix (E, N, K) stands for."""
    tensors, values = {}, {}
    for name, (n, k) in SIZES.items():
        made = [packer(files.matrix(n, k)) for _ in range(E)]
        for expert, (stored, _) in enumerate(made):
            tensors |= {f"{stem}.{expert}.{name}.{s}": t for s, t in stored.items()}
        values[name] = torch.stack([value for _, value in made])
    return tensors, values


def fused(stem: str) -> tuple[Tensors, Tensors]:
    _, values = experts(files.bf16)
    both = torch.cat([values["gate_proj"], values["up_proj"]], 1).bfloat16()
    down = values["down_proj"].bfloat16()
    return {f"{stem}.gate_up_proj": both, f"{stem}.down_proj": down}, values


def check(path: Path, values: Tensors, **how: Any) -> MoEProblem:
    """Check that exactly these values are loaded; return their problem."""
    problem = problem_from_config(path, device="cpu", **how)
    dequantize, layer = how.get("dequantize", False), how.get("layer", 0)
    weights = load_experts(path, how.get("names"), layer, problem, dequantize=dequantize)
    got = weights.canonical(problem)
    if problem.quant.weight is not None:
        got = got.dequantize(problem.quant)
    gate, up, down = (values[name].to(got.w2.dtype) for name in SIZES)
    assert torch.equal(got.w13, torch.cat([gate, up], 1)) and torch.equal(got.w2, down)
    return problem


# -- the right set of tensors ------------------------------------------------------------------


@pytest.mark.parametrize("draft_fused", [False, True])
def test_draft_layers_do_not_count(draft_fused: bool, tmp_path: Path) -> None:
    main, values = fused("model.language_model.layers.0.mlp.experts")
    more, _ = fused("model.language_model.layers.1.mlp.experts")
    draft = "mtp.layers.0.mlp.experts"
    other, _ = fused(draft) if draft_fused else experts(files.bf16, draft)
    model = dict(model_type="qwen3_5_moe", text_config=config("qwen3_5_moe_text"))
    path = write(tmp_path, main | more | other, model)
    assert detect(path).layers == (0, 1)
    check(path, values)
    names = NAMES["qwen3_5_moe_text"].under("model.language_model.")
    check(path, values, names=names)


def test_the_advice_for_two_models_works(tmp_path: Path) -> None:
    one, _ = fused("left.layers.0.mlp.experts")
    two, values = experts(files.bf16, "right.layers.0.mlp.experts")
    path = write(tmp_path, one | two, config())
    with pytest.raises(WeightsError, match="several sets .*: left.*, right.*names=") as said:
        detect(path)
    advised = eval(str(said.value).partition("names=")[2])  # noqa: S307
    assert isinstance(advised, ExpertNames) and detect(path, advised).names == advised
    names = NAMES["qwen3_moe"].under("right.")
    check(path, values, names=names)


def test_one_model_in_two_spellings_is_ambiguous(tmp_path: Path) -> None:
    path = write(tmp_path, experts(files.bf16)[0] | fused(STEM)[0], config())
    with pytest.raises(WeightsError, match="layer 0 has several sets of experts"):
        detect(path)


def test_layers_behind_the_decoders_are_no_layers_of_it(tmp_path: Path) -> None:
    tensors = experts(files.bf16)[0] | experts(files.bf16, "model.layers.2.mlp.experts")[0]
    assert detect(write(tmp_path, tensors, config())).layers == (0,)


def test_a_routers_tensor_among_the_experts(tmp_path: Path) -> None:
    tensors, values = experts(files.bf16)
    tensors[f"{STEM}.e_score_correction_bias"] = torch.zeros(E)
    check(write(tmp_path, tensors, config()), values)


# -- every field that changes numbers ----------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "offset"),
    [("auto_round:auto_gptq", 1), ("auto_round", 0), ("auto_round:gptqmodel", 0)],
)
def test_zero_points_of_autoround(packing: str, offset: int, tmp_path: Path) -> None:
    tensors, values = experts(files.gptq(32, zero_points=True, v2=not offset))
    said = dict(quant_method="auto-round", bits=4, group_size=32, sym=False, packing_format=packing)
    check(write(tmp_path, tensors, config(quantization_config=said)), values)


def test_swigluoai_of_any_model(tmp_path: Path) -> None:
    tensors, values = fused(STEM)
    stem = "model.layers.{layer}.mlp.experts"
    names = ExpertNames(gate_up=f"{stem}.gate_up_proj", down=f"{stem}.down_proj")
    said = config("minimax_m3_vl_text", swiglu_alpha=1.702, swiglu_limit=7.0)
    problem = check(write(tmp_path, tensors, said), values, names=names)
    assert problem.activation == moekit.Activation("swigluoai", alpha=1.702, limit=7.0)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        (dict(swiglu_limit=0.0), moekit.Activation("silu")),
        (dict(swiglu_limit=10.0), moekit.Activation("silu", limit=10.0)),
        (dict(hidden_act=..., hidden_activation="gelu"), moekit.Activation("gelu")),
        (dict(mlp_hidden_act="relu2"), moekit.Activation("relu2")),
        (dict(mlp_gate_softcap=0.0), moekit.Activation("silu")),
        (dict(experts_per_token=K), moekit.Activation("silu")),  # gpt-oss has both spellings
    ],
)  # fmt: skip
def test_activations_by_their_fields(
    fields: dict[str, Any], activation: moekit.Activation, tmp_path: Path
) -> None:
    path = write(tmp_path, experts(files.bf16)[0], config(**fields))
    assert detect(path).groups[0].problem.activation == activation


@pytest.mark.parametrize(
    ("fields", "said", "given"),
    [
        (dict(mlp_gate_softcap=4.0), "mlp_gate_softcap=4.0.*pass activation=", "activation"),
        (dict(swiglu_beta=1.5), "swiglu_beta=1.5.*pass activation=", "activation"),
        (dict(hidden_act="snake"), "activation 'snake', but moekit maps only silu", "activation"),
        (dict(expert_act_fn="relu"), "expert_act_fn='relu'.*pass activation=", "activation"),
        (dict(expert_group_act="x"), "expert_group_act='x'.*pass activation=", "activation"),
        (dict(hidden_act="gelu", swiglu_limit=7.0), "'gelu' with .*swiglu_limit=7", "activation"),
        (dict(swiglu_alpha=1.5), "swiglu_alpha=1.5 and swiglu_limit=None", "activation"),
        (
            dict(moe_intermediate_size=[I, 2 * I, I]),
            r"moe_intermediate_size=\[128, 256, 128\].* pass intermediate_size=",
            "intermediate_size",
        ),
    ],
)
def test_fields_that_are_not_understood(
    fields: dict[str, Any], said: str, given: str, tmp_path: Path
) -> None:
    """They are refused by name, with what to pass, and passing it works."""
    path = write(tmp_path, experts(files.bf16)[0], config(**fields))
    with pytest.raises(WeightsError, match=said):
        detect(path)
    value = {"activation": "gelu", "intermediate_size": I}[given]
    problem = problem_from_config(path, device="cpu", **{given: value})
    load_experts(path, None, 0, problem).check(problem)


def test_limits_by_layer(tmp_path: Path) -> None:
    tensors = experts(files.bf16)[0] | experts(files.bf16, "model.layers.1.mlp.experts")[0]
    path = write(tmp_path, tensors, config(swiglu_limits=[0.0, 7.0]))
    with pytest.raises(WeightsError, match=r"pass layer=.*layers 0: .*silu; layers 1: .*limit 7"):
        problem_from_config(path, device="cpu")
    limits = [problem_from_config(path, layer=n, device="cpu").activation.limit for n in (0, 1)]
    assert limits == [None, 7.0]


def test_a_latent_size(tmp_path: Path) -> None:
    latent = 64
    up, down = torch.randn(E, I, latent).bfloat16(), torch.randn(E, latent, I).bfloat16()
    stem = "backbone.layers.1.mixer.experts"
    tensors = {f"{stem}.{e}.up_proj.weight": up[e] for e in range(E)}
    tensors |= {f"{stem}.{e}.down_proj.weight": down[e] for e in range(E)}
    said = dict(n_routed_experts=E, mlp_hidden_act="relu2", moe_latent_size=latent)
    path = write(tmp_path, tensors, config("nemotron_h", num_experts=..., hidden_act=..., **said))
    problem = problem_from_config(path, device="cpu")
    assert problem.hidden_size == latent
    assert torch.equal(load_experts(path, None, 1, problem).w13, up)


@pytest.mark.parametrize(
    ("inputs", "scheme"), [(None, "nvfp4_w4a16"), ({"num_bits": 4, "type": "float"}, "nvfp4")]
)
def test_modelopts_config_groups_say_what_activations_are(
    inputs: Any, scheme: str, tmp_path: Path
) -> None:
    weights = dict(num_bits=4, type="float", group_size=16, dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs)
    said = dict(quant_method="modelopt", quant_algo="NVFP4", config_groups={"group_0": group})
    path = write(tmp_path, experts(files.nvfp4(modelopt=True))[0], config(quantization_config=said))
    assert detect(path).groups[0].scheme == scheme


@pytest.mark.parametrize("entry", ["model.layers.0", "model.layers.0.", "mlp.experts"])
def test_awqs_entries_are_parts_of_names(entry: str) -> None:
    said = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
    said["modules_to_not_convert"] = [entry]
    assert not declared_format(said, H, I, "model.layers.0.mlp.experts").dtype
    if "layers" in entry:
        assert declared_format(said, H, I, "model.layers.1.mlp.experts").dtype == "int4"


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (dict(quant_method="gptq", bits=4, group_size=32, rotation="hadamard"), "rotation is 'had"),
        (dict(quant_method="gptq", bits=4, pack_dtype="int8"), "pack_dtype is 'int8'"),
        (dict(quant_method="bitsandbytes"), "the quant_method 'bitsandbytes', expected .* or fp8"),
        (dict(quant_method="gptq", bits=3, group_size=32), "bits is 3, expected 4 or 8"),
        (dict(quant_method="fp8", weight_block_size=128), "weight_block_size"),
        (ct(99), r"config\.config_groups\.group_0\.weights\.num_bits=99: it must be an integer"),
        (
            dict(quant_method="compressed-tensors", config_groups={"g": {"targets": ["a", 5]}}),
            r"config\.config_groups\.g\.targets\.1=5: it must be a text",
        ),
        (ct(3), "weights of 3 bits of type 'int'"),
        (dict(quant_method="modelopt", quant_algo="W4A8_AWQ"), "'W4A8_AWQ', expected FP8 or"),
        (dict(quant_method="fp8", fmt="e5m2"), "fmt is 'e5m2', expected 'e4m3'"),
        (dict(quant_method="auto-round", bits=4, data_type="mx_fp"), "data_type is 'mx_fp'"),
        (dict(quant_method="auto-round", bits=4, act_bits=8), "act_bits is 8"),
        (
            dict(quant_method="compressed-tensors", transform_config={"R1": {}}),
            "transform_config is .* for compressed-tensors",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                sparsity_config={"format": "sparse-24-bitmask"},
            ),
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
    ],
)  # fmt: skip
def test_quantization_fields_that_are_not_understood(said: dict[str, Any], match: str) -> None:
    with pytest.raises(WeightsError, match=match):
        declared_format(said, H, I)


def test_every_config_class_of_transformers_is_decided() -> None:
    """A new field of a model with experts fails here until somebody reads its meaning."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    decided = {"mlp_gate_softcap", "mlp_up_softcap", "dense_act_fn"}  # refused: no such activation
    undecided: dict[str, list[str]] = {}
    seen = 0
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fields = CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # some need arguments
            continue
        if not any("expert" in name for name in fields):
            continue
        seen += 1
        for name, value in fields.items():
            try:
                schema.check_understood({"model_type": model_type, name: value})
            except WeightsError:
                if name not in decided:
                    undecided.setdefault(name, []).append(model_type)
    assert seen > 40, transformers.__version__
    # A vision encoder whose layers differ in their number of experts.
    assert undecided in ({}, {"per_layer_config": ["dots3_note_vision_encoder"]}), undecided


# -- no matrix speaks for another --------------------------------------------------------------


def test_fp4_experts_under_a_config_of_fp8(tmp_path: Path) -> None:
    def make(matrix: Tensor) -> files.Packed:
        stored, meant = files.mxfp4(("weight", "scale"))(matrix)
        dtypes = {"weight": torch.int8, "scale": torch.float8_e8m0fnu}
        return {name: t.view(dtypes[name]) for name, t in stored.items()}, meant

    tensors, values = experts(make)
    fp8 = dict(quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128])
    path = write(tmp_path, tensors, config(expert_dtype="fp4", quantization_config=fp8))
    check(path, values, dequantize=True)
    check(path, values, quant="mxfp4_w4a16")


def static_fp8(scale: Callable[[int], float | None]) -> Tensors:
    tensors: Tensors = {}
    for e in range(E):
        for name, size in SIZES.items():
            stem = f"{STEM}.{e}.{name}"
            tensors[f"{stem}.weight"] = torch.randn(size).to(torch.float8_e4m3fn)
            tensors[f"{stem}.weight_scale"] = torch.tensor(0.01)
            if (said := scale(e)) is not None:
                tensors[f"{stem}.input_scale"] = torch.tensor(said)
    return tensors


MODELOPT_FP8 = dict(quant_method="modelopt", quant_algo="FP8")


def test_all_ranks_say_the_same_of_a_missing_input_scale(tmp_path: Path) -> None:
    tensors = static_fp8(lambda e: None if e == 2 else 0.02)
    path = write(tmp_path, tensors, config(quantization_config=MODELOPT_FP8))
    said = []
    for rank in range(2):
        parallel = ParallelConfig(ep_size=2, ep_rank=rank, dp_size=1)
        problem = problem_from_config(path, device="cpu", parallel=parallel)
        with pytest.raises(WeightsError, match="experts.2.gate_proj.input_scale is missing") as why:
            load_experts(path, None, 0, problem)
        said.append(str(why.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("other", ["down_proj", "expert", "plain"])
def test_bits_that_differ(other: str, tmp_path: Path) -> None:
    count = iter(range(100))

    def make(matrix: Tensor) -> files.Packed:
        odd = (
            next(count) % E == 3
            if other == "expert"
            else len(matrix) == (I if other == "plain" else H)
        )
        eight = files.bf16 if other == "plain" else files.gptq_int8
        return (eight if odd else files.gptq(32))(matrix)

    tensors, values = experts(make)
    said = dict(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=False)
    path = write(tmp_path, tensors, config(quantization_config=said))
    check(path, values, dequantize=True)
    with pytest.raises(
        WeightsError, match=r"GPTQ \(int4, .*_proj.* and (GPTQ \(int8, |unquant).*dequantize"
    ):
        problem_from_config(path, device="cpu")
    problem = problem_from_config(path, quant="none", device="cpu")
    with pytest.raises(WeightsError, match="several formats; use quant='none' and dequantize=True"):
        load_experts(path, None, 0, problem)


def test_layers_of_two_schemes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, values = experts(files.bf16)
    four, others = experts(files.gptq(32), "model.layers.1.mlp.experts")
    said = dict(quant_method="gptq", bits=4, group_size=32, sym=True)
    path = write(tmp_path, plain | four, config(quantization_config=said))
    found = detect(path)
    assert [group.scheme for group in found.groups] == ["none", "int4_w4a16_g32"]
    assert "layers 0: unquantized" in repr(found) and "layers 1: GPTQ (int4" in str(found)
    check(path, values, layer=0)
    check(path, others, layer=1)
    check(path, values, dequantize=True)
    with pytest.raises(WeightsError, match="layers differ, .* pass layer="):
        problem_from_config(path, device="cpu")
    assert main(["explain", "--model", str(path), "--device", "cpu"]) == 0
    assert "int4_w4a16_g32" in capsys.readouterr().out


# -- valid values ------------------------------------------------------------------------------


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_scales_of_any_sign(method: str, dequantize: bool, tmp_path: Path) -> None:
    def make(matrix: Tensor) -> files.Packed:
        stored, meant = files.gptq(32)(matrix)
        return stored | {"scales": -stored["scales"]}, -meant

    tensors, values = experts(make)
    said = dict(quant_method=method, bits=4, group_size=32, sym=True)
    said["packing_format"] = "auto_round:auto_gptq"
    path = write(tmp_path, tensors, config(quantization_config=said))
    check(path, values, dequantize=dequantize)


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_g_idx_of_minus_one(dequantize: bool, tmp_path: Path) -> None:
    def make(matrix: Tensor) -> files.Packed:
        stored, meant = files.pack_quantized(32)(matrix)
        return stored | {"weight_g_idx": torch.full(matrix.shape[1:], -1).int()}, meant

    tensors, values = experts(make)
    weights = dict(num_bits=4, type="int", strategy="group", group_size=32, actorder="group")
    groups = {"group_0": dict(targets=["Linear"], weights=weights)}
    said = dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    path = write(tmp_path, tensors, config(quantization_config=said))
    check(path, values, dequantize=dequantize)


def test_a_scale_that_overflows(tmp_path: Path) -> None:
    tensors = static_fp8(lambda e: None)
    tensors[f"{STEM}.1.up_proj.weight_scale"] = torch.tensor(3e38)
    path = write(tmp_path, tensors, config(quantization_config=MODELOPT_FP8))
    problem = problem_from_config(path, device="cpu", dequantize=True)
    with pytest.raises(WeightsError, match="1.up_proj.weight_scale is too large: bfloat16 overfl"):
        load_experts(path, None, 0, problem, dequantize=True)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, experts(files.bf16)[0], config())
    monkeypatch.setattr(Path, "glob", refuse)
    with pytest.raises(WeightsError, match="cannot be read .Permission denied.*may read"):
        detect(path)


# -- the whole layer ---------------------------------------------------------------------------


def test_a_layer_as_its_checkpoint_describes_it(tmp_path: Path) -> None:
    tensors, values = experts(files.bf16)
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.linspace(0, 1, E)
    said = dict(norm_topk_prob=True, routed_scaling_factor=2.5, n_group=2, topk_group=1)
    path = write(tmp_path, tensors, config("deepseek_v3", **said))
    layer = moekit.FusedMoE.from_checkpoint(path, 0, device="cpu")
    bias = torch.linspace(0, 1, E)
    x, logits = torch.randn(5, H).bfloat16(), torch.randn(5, E)
    want = moekit.FusedMoE(
        E, K, H, I, scoring_func="sigmoid", renormalize=True, routed_scaling_factor=2.5,
        num_expert_group=2, topk_group=1, e_score_correction_bias=bias, device="cpu",
    )  # fmt: skip
    both = torch.cat([values["gate_proj"], values["up_proj"]], 1).bfloat16()
    want.load_weights(moekit.ExpertWeights(both, values["down_proj"].bfloat16()))
    assert torch.equal(layer(x, logits), want(x, logits))


def test_routing_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, experts(files.bf16)[0], config("afmoe"))
    with pytest.raises(WeightsError, match="'afmoe' routes is not known: pass it"):
        moekit.FusedMoE.from_checkpoint(path, 0, device="cpu")
    layer = moekit.FusedMoE.from_checkpoint(path, 0, renormalize=False, device="cpu")
    assert isinstance(layer.problem, MoEProblem)
