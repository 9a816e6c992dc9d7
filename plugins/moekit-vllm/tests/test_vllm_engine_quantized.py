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
from safetensors.torch import load_file  # noqa: E402
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


def quantized(folder: Path, seed: int) -> list[str]:
    """Save a model with quantized experts, and one with the numbers that they represent."""
    plain = models.save("qwen3_moe", folder / "plain", seed)
    packer = files.mxfp4(("weight_packed", "weight_scale"))
    packed, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if ".experts." not in name:
            packed[name] = meant[name] = tensor
            continue
        parts, values = packer(tensor.float())
        stem = name.removesuffix("weight")
        packed |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
        meant[name] = values.to(tensor.dtype)
        assert torch.equal(meant[name].float(), values)
    said = json.loads((plain / "config.json").read_text())
    files.save(folder / "packed", packed, said | {"quantization_config": MXFP4})
    files.save(folder / "meant", meant, said)
    return [str(folder / "packed"), str(folder / "meant")]


def test_mxfp4(engines: Engines, tmp_path: Path) -> None:
    """Weights alone are quantized, so the engines agree as closely as in fp32."""
    (packed, meant), (other, meant_by_other) = (quantized(tmp_path / str(n), n) for n in (0, 1))
    ours = engines(packed, "require", reload=other)
    assert any("quant mxfp4_w4a16, silu on cpu: local + torch" in line for line in ours["log"])
    stock = engines(meant, "off")["first"]
    assert_same(stock, ours["first"])
    assert_same(engines(meant_by_other, "off")["first"], ours["reloaded"])
    with pytest.raises(AssertionError):
        assert_same(stock, ours["reloaded"])
