"""A real engine serves quantized experts. Needs vLLM: `make test-vllm`.

vLLM's own kernels for them need a GPU, or a CPU with AMX, which `Engines` hides. So moekit's engine
is compared with vLLM's engine on a checkpoint of the numbers that the quantized experts represent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import checkpoint_files as files  # noqa: E402
import vllm_models as models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm_engines import Engines, assert_same  # noqa: E402

# Only the experts are quantized.
_OTHERS = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
_GROUP = dict(num_bits=4, type="float", strategy="group", group_size=32, dynamic=False)
MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": _OTHERS,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _GROUP | {"symmetric": True, "scale_dtype": "torch.uint8"},
            "input_activations": None,
            "format": "mxfp4-pack-quantized",
        }
    },
}
_LINEAR = [f"self_attn.{part}_proj" for part in "qkvo"] + ["mlp.gate"]
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"]
    + [f"model.layers.{n}.{part}" for n in (0, 1) for part in _LINEAR],
}


def quantized(folder: Path, packer: files.Packer, config: dict[str, Any], seed: int) -> list[str]:
    """Save a model with quantized experts, and one with the numbers that they represent."""
    plain = models.save("qwen3_moe", folder / "plain", seed)
    tensors = load_file(plain / "model.safetensors")
    packed, meant = {}, {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            parts, values = packer(tensor.float())
            stem = name.removesuffix("weight")
            packed |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
            meant[name] = values.to(tensor.dtype)
            assert torch.equal(meant[name].float(), values)
        else:
            packed[name] = meant[name] = tensor
    said = json.loads((plain / "config.json").read_text())
    saved = []
    for kind, held, more in (
        ("packed", packed, {"quantization_config": config}),
        ("meant", meant, {}),
    ):
        (folder / kind).mkdir()
        save_file(held, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(said | more))
        saved.append(str(folder / kind))
    return saved


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    packer = files.mxfp4(("weight_packed", "weight_scale"))
    return [quantized(tmp_path_factory.mktemp("mxfp4"), packer, MXFP4, seed) for seed in (0, 1)]


def test_mxfp4(engines: Engines, mxfp4: list[list[str]]) -> None:
    """Weights alone are quantized, so the engines agree as closely as in fp32."""
    (packed, meant), (other, meant_by_other) = mxfp4
    ours = engines(packed, "require", reload=other)
    assert any("quant mxfp4_w4a16, silu on cpu: local + torch" in line for line in ours["log"])
    stock = engines(meant, "off")["first"]
    assert_same(stock, ours["first"])
    assert_same(engines(meant_by_other, "off")["first"], ours["reloaded"])
    with pytest.raises(AssertionError):
        assert_same(stock, ours["reloaded"])


def test_fp8(engines: Engines, tmp_path: Path) -> None:
    """Activations are rounded to fp8, which moves the logarithms of probabilities a little."""
    packed, meant = quantized(tmp_path, files.fp8(-1, -1), FP8, 0)
    bf16 = {"dtype": "bfloat16"}  # vLLM refuses fp8 weights in fp32 models
    ours = engines(packed, "on", engine=bf16)  # vLLM has no kernel for it on CPUs
    assert any("quant fp8_tensor, silu on cpu: local + torch" in line for line in ours["log"])
    stock = engines(meant, "off", engine=bf16)
    assert_same(stock["first"], ours["first"], "bfloat16")
