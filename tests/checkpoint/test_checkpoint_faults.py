"""Faults of checkpoints: one error names all of them, and nothing is loaded in part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moekit import MoEProblem, ParallelConfig
from moekit.checkpoint import (
    Checkpoint,
    detect,
    load_experts,
    load_layers,
    problem_from_config,
)
from moekit.errors import InvalidProblem, MoekitError, WeightsError

pytest.importorskip("safetensors")

STEM = "model.layers.0.mlp.experts"
FP8 = dict(quant_method="fp8", activation_scheme="static")
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=True)
PACKED = {
    "bf16": (files.bf16, None),
    "fp8": (files.fp8(-1, -1, static=True), FP8),
    "gptq": (files.gptq(32), GPTQ),
    "act-order": (files.gptq(32, act_order=True), GPTQ),
    "ct": (files.pack_quantized(64), None),
    "awq": (files.awq(32), dict(quant_method="awq")),
    "nvfp4": (files.nvfp4(modelopt=True), dict(quant_method="modelopt", quant_algo="NVFP4")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, files.Layer]:
    return {
        name: files.write(tmp_path_factory.mktemp(name), packer, config, E=4, H=64, I=64, layers=2)
        for name, (packer, config) in PACKED.items()
    }


Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def changed(made: dict[str, files.Layer], tmp_path: Path):
    """Return a function that copies a checkpoint with changed tensors."""

    def change(name: str, how: Change, **config: Any) -> Path:
        source = made[name].path
        tensors = dict(made[name].tensors)
        how(tensors)
        said = json.loads((source / "config.json").read_text())
        if config:
            said["quantization_config"] = said.get("quantization_config", {}) | config
        files.save(tmp_path, tensors, said, shards=2)
        return tmp_path

    return change


def load(path: Path, **how: Any) -> None:
    load_experts(path, None, 0, problem_from_config(path, device="cpu"), **how)


# -- files -----------------------------------------------------------------------------------------


def test_every_broken_file_is_named(made: dict[str, files.Layer], tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(made["bf16"].path, path)
    first, second, third = sorted(path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-10])
    second.write_text("version https://example.invalid/pointer")
    third.unlink()
    with pytest.raises(WeightsError) as caught:
        Checkpoint(path)
    said = str(caught.value)
    assert f"{first}: truncated or not a safetensors file" in said
    assert f"{second}: truncated or not" in said
    assert f"{third}: no such file; download the whole model" in said


# -- tensors ---------------------------------------------------------------------------------------


def test_all_faults_of_tensors_at_once(changed, tmp_path: Path) -> None:
    """Missing, of another shape or dtype, unexpected, and in two files."""

    def break_it(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{STEM}.1.up_proj.weight"]
        tensors[f"{STEM}.2.down_proj.weight"] = torch.zeros(64, 63).bfloat16()
        tensors[f"{STEM}.0.gate_proj.weight"] = torch.zeros(64, 64).int()
        tensors[f"{STEM}.0.gate_proj.bias"] = torch.zeros(64)
        tensors[f"{STEM}.4.gate_proj.weight"] = torch.zeros(64, 64)

    path = changed("bf16", break_it)
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(n for n in tensors if n.startswith(STEM))
    again = path / "model-again.safetensors"
    save_file({name: tensors[name]}, again)
    index = path / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["other"] = again.name
    index.write_text(json.dumps(held))
    with pytest.raises(WeightsError) as caught:
        load(path)
    said = str(caught.value)
    for part in (
        "6 tensor(s) or settings",
        f"{STEM}.1.up_proj.weight is missing",
        f"{STEM}.2.down_proj.weight is (64, 63), expected (64, 64)",
        f"{STEM}.0.gate_proj.weight is torch.int32, expected torch.bfloat16 or",
        f"{STEM}.0.gate_proj.bias is unexpected",
        f"{STEM}.4.gate_proj.weight is unexpected",
        f"{name} is duplicate, in {file.name}, {again.name}",
    ):
        assert part in said, said


def put(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.{name}"] = value(tensors[f"{STEM}.{name}"])

    return change


@pytest.mark.parametrize(
    ("format", "change", "said"),
    [
        (
            "fp8",
            put("3.down_proj.input_scale", lambda t: t * float("inf")),
            "3.down_proj.input_scale is inf, expected a finite number above 0",
        ),
        (
            "gptq",
            put("1.gate_proj.qzeros", lambda t: t + 1),
            "1.gate_proj.qzeros is not all 8, but the weights are symmetric",
        ),
        (
            "act-order",
            put("1.gate_proj.g_idx", lambda t: t.flip(0)),
            "1.gate_proj.g_idx and .*1.up_proj.g_idx differ",
        ),
        (
            "act-order",
            put("1.down_proj.g_idx", lambda t: t * 0),
            "1.down_proj.g_idx does not form groups of 32 columns",
        ),
    ],
)
def test_invalid_values(format: str, change: Change, said: str, changed) -> None:
    with pytest.raises(WeightsError, match=said):
        load(changed(format, change))


def test_a_mix_of_dtypes(changed) -> None:
    path = changed("bf16", put("2.down_proj.weight", lambda t: t.half()))
    with pytest.raises(WeightsError, match="different dtypes: .* is torch.bfloat16, .*float16"):
        load(path)


def test_no_layer_is_read_before_all_are_checked(changed) -> None:
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    path = changed("bf16", lambda tensors: tensors.pop(name))
    problem = problem_from_config(path, device="cpu")
    with Checkpoint(path) as checkpoint:
        with pytest.raises(WeightsError, match="layers.1.mlp.experts.0.up_proj.weight is missing"):
            next(load_layers(checkpoint, None, [0, 1], problem))
        assert checkpoint.bytes_read == 0
    # a tensor that another rank lacks does not matter
    elsewhere = problem.replace(parallel=ParallelConfig(ep_size=2, ep_rank=1))
    assert len(load_experts(path, None, 1, elsewhere).w2) == 2


# -- formats, schemes, sizes -----------------------------------------------------------------------


def nothing(tensors: dict[str, Tensor]) -> None:
    pass


@pytest.mark.parametrize(
    ("format", "config", "change", "said"),
    [
        ("awq", dict(version="gemv"), nothing, "AWQ version 'gemv' is not supported"),
        ("gptq", dict(checkpoint_format="marlin"), nothing, "'marlin' is not supported"),
        (
            "gptq",
            {},
            put("0.down_proj.qweight", lambda t: t[:6].contiguous()),
            "symmetric 3-bit GPTQ is not supported",
        ),
        (
            "gptq",
            {},
            put("0.down_proj.qweight", lambda t: t.flatten()),
            r"0.down_proj.qweight must have two dimensions for each expert \(got \(512,\)\)",
        ),
        (
            "bf16",
            dict(quant_method="bitsandbytes"),
            put("0.down_proj.weight", lambda t: t.view(torch.uint8)),
            "is torch.uint8, and moekit does not support the quantization method bitsandbytes",
        ),
        (
            "fp8",
            dict(activation_scheme=None, quant_method="compressed-tensors",
                 config_groups={"a": {"targets": ["Linear"], "weights": {},
                                      "input_activations": {"num_bits": 4, "type": "float"}}}),
            nothing,
            "no scheme for them with float4_e2m1 activations.*choose another scheme .* with quant=",
        ),
    ],
)  # fmt: skip
def test_formats_that_are_not_supported(
    format: str, config: dict[str, Any], change: Change, said: str, changed
) -> None:
    with pytest.raises(WeightsError, match=said):
        problem_from_config(changed(format, change, **config), device="cpu")


def test_plain_tensors_of_an_unknown_method_are_read_with_a_warning(changed, caplog) -> None:
    path = changed("bf16", nothing, quant_method="rotated")
    for _ in range(2):
        assert problem_from_config(path, device="cpu").quant.name == "none"
    assert caplog.text.count("does not know the quantization method rotated") == 1


@pytest.mark.parametrize(
    ("format", "scheme", "said"),
    [
        (
            "bf16",
            "fp8_block",
            "stored as unquantized, .*does not fit quant='fp8_block'.*float8_e4m3fn.*quant='none'",
        ),
        ("fp8", "int8_w8a16", "the scheme has int8 weights; use quant='fp8_tensor_static' or"),
        ("nvfp4", "none", "use quant='nvfp4' or quant='none' and dequantize=True"),
        ("nvfp4", "mxfp4_w4a16", "the scheme has float8_e8m0fnu scales"),
        ("gptq", "int4_w4a16_g32_zp", "the scheme has zero points"),
        ("awq", "int4_w4a16_g32", "the scheme has no zero points"),
        ("gptq", "int4_w4a16_g64", r"the scheme has one scale per \(1, 64\)"),
        ("gptq", "int4_w4a16_channel", r"the scheme has one scale per \(1, -1\)"),
        (
            "gptq",
            "none",
            "the scheme has unquantized weights; use quant='int4_w4a16_g32_act_order' or ",
        ),
        (
            "act-order",
            "int4_w4a16_g32",
            "0.down_proj.g_idx is in act-order; use quant='int4_w4a16_g32_act_order'",
        ),
    ],
)
def test_schemes_that_do_not_fit(
    format: str, scheme: str, said: str, made: dict[str, files.Layer]
) -> None:
    path = made[format].path
    problem = problem_from_config(path, quant=scheme, device="cpu")
    with pytest.raises(WeightsError, match=said):
        load_experts(path, None, 0, problem)
    if problem.quant.weight is not None:
        with pytest.raises(WeightsError, match="dequantize=True needs a problem with quant='none'"):
            load_experts(path, None, 0, problem, dequantize=True)


def test_weights_may_be_used_with_other_activations(made: dict[str, files.Layer]) -> None:
    path = made["fp8"].path
    for scheme in ("fp8_tensor", "fp8_w8a16_tensor", "fp8_channel_token", "fp8_block"):
        problem = problem_from_config(path, quant=scheme, device="cpu")
        weights = load_experts(path, None, 1, problem)
        weights.check(problem)
        got = weights.canonical(problem).dequantize(problem.quant)
        assert torch.equal(got.w2[..., :64], made["fp8"].down) and not got.w2[..., 64:].any()


def test_a_group_cut_by_tensor_parallelism(tmp_path: Path) -> None:
    """I = 240: 120 = 64 + 56 cuts a group of 64 unevenly, and 32 * 3 + 24 one of 32."""
    weights = dict(num_bits=4, type="int", strategy="group", group_size=64)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = dict(quant_method="compressed-tensors", config_groups=groups)
    path = files.write(tmp_path, files.pack_quantized(64), config, E=2, I=240).path
    halves, thirds = ParallelConfig(tp_size=2, tp_rank=1), ParallelConfig(tp_size=3, tp_rank=2)
    assert problem_from_config(path, device="cpu").quant.name == "int4_w4a16_g64"
    said = "tp_size=2 cuts its groups of 64 columns of w2; use expert parallelism, or load"
    with pytest.raises(WeightsError, match=said):
        problem_from_config(path, parallel=halves, device="cpu")
    problem = problem_from_config(path, parallel=halves, quant="int4_w4a16_g32", device="cpu")
    said = "leaves 120 columns of w2 to a rank, which cuts int4 groups of 32; use expert paral"
    with pytest.raises(WeightsError, match=said):
        load_experts(path, None, 0, problem)
    # 80 = 64 + 16
    assert problem_from_config(path, parallel=thirds, device="cpu").quant.name == "int4_w4a16_g64"


def test_sizes_that_do_not_divide(made: dict[str, files.Layer]) -> None:
    path = made["gptq"].path
    with pytest.raises(InvalidProblem, match="tp_size=3 must divide"):
        problem_from_config(path, parallel=ParallelConfig(tp_size=3), device="cpu")
    with pytest.raises(InvalidProblem, match="ep_size=9 exceeds the 4 experts"):
        problem_from_config(path, parallel=ParallelConfig(ep_size=9), device="cpu")
    with pytest.raises(MoekitError, match="has none of hidden_size"):
        config = json.loads((path / "config.json").read_text())
        del config["hidden_size"]
        (path / "config.json").write_text(json.dumps(config))
        detect(path)


def test_missing_experts(tmp_path: Path) -> None:
    files.save(tmp_path, {"a": torch.zeros(2)}, {"model_type": "olmoe", "num_hidden_layers": 3})
    with pytest.raises(WeightsError, match=r"no layer has experts called model.layers.\{layer\}"):
        detect(tmp_path)
    problem = MoEProblem(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8, device="cpu")
    with pytest.raises(WeightsError, match="no layer has experts called .*; if they have other"):
        load_experts(tmp_path, None, 1, problem)


def test_a_layer_without_experts(made: dict[str, files.Layer]) -> None:
    problem = problem_from_config(made["bf16"].path, device="cpu")
    with pytest.raises(WeightsError, match="layer 5 has no .*one of the 2 layers from 0 to 1"):
        load_experts(made["bf16"].path, None, 5, problem)


def test_more_experts_than_memory(
    made: dict[str, files.Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moekit.checkpoint.load.available_memory", lambda: 1000.0)
    with pytest.raises(WeightsError, match="take 0.0 GB .* use more ranks, or correct the sizes"):
        load(made["bf16"].path)
