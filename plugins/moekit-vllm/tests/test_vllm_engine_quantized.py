"""A real engine serves quantized experts. Needs vLLM: `make test-vllm`.

vLLM's own kernels for them need a GPU, or a CPU with AMX. So moekit's engine is compared with
vLLM's engine on a checkpoint of the numbers that the quantized experts represent.
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
from test_vllm_engine import ONE_PROCESS, assert_same, run  # noqa: E402

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


def test_mxfp4(tmp_path: Path) -> None:
    """Weights alone are quantized, so the engines agree as closely as in fp32."""
    packer = files.mxfp4(("weight_packed", "weight_scale"))
    packed, meant = quantized(tmp_path / "0", packer, MXFP4, 0)
    other, meant_by_other = quantized(tmp_path / "1", packer, MXFP4, 1)
    ours = run(packed, ONE_PROCESS, ("require",), reload=other)["require"]
    assert "quant mxfp4_w4a16, silu on cpu: local + torch" in ours["text"]
    stock = run(meant, ONE_PROCESS, ("off",))["off"]["first"]
    assert_same(stock, ours["first"], "float32")
    assert_same(
        run(meant_by_other, ONE_PROCESS, ("off",))["off"]["first"], ours["reloaded"], "float32"
    )
    with pytest.raises(AssertionError):
        assert_same(stock, ours["reloaded"], "float32")


def test_mxfp4_on_two_ranks(tmp_path: Path) -> None:
    packed, meant = quantized(tmp_path, files.mxfp4(("weight_packed", "weight_scale")), MXFP4, 0)
    stock = run(meant, ONE_PROCESS, ("off",))["off"]
    ranks = run(packed, {"tensor_parallel_size": 2}, ("require",))["require"]
    assert_same(stock["first"], ranks["first"], "float32")


def test_fp8(tmp_path: Path) -> None:
    """Activations are rounded to fp8, which moves the logarithms of probabilities a little."""
    packed, meant = quantized(tmp_path, files.fp8(-1, -1), FP8, 0)
    engine = {"dtype": "bfloat16", **ONE_PROCESS}  # vLLM refuses fp8 weights in fp32 models
    ours = run(packed, engine, ("on",))["on"]  # vLLM has no kernel for it on CPUs
    assert "quant fp8_tensor, silu on cpu: local + torch" in ours["text"]
    stock = run(meant, engine, ("off",))["off"]
    assert_same(stock["first"], ours["first"], "bfloat16")
