"""mxfp4 layers of vLLM: padded sizes, biases, and gpt-oss's alternating gate and up rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

import checkpoint_files as files  # noqa: E402
import vllm_quantized_layers as layers  # noqa: E402
from moekit_vllm import problem as problems  # noqa: E402

import moekit  # noqa: E402
from moekit import Routing  # noqa: E402
from moekit.backends.reference import oracle  # noqa: E402
from moekit.checkpoint import Checkpoint, load_experts  # noqa: E402
from moekit.problem.tolerance import rms_bound  # noqa: E402

H, I = 320, 192  # Marlin has multiples of 256 and 128
GPT_OSS = layers.Format(
    files.mxfp4(("blocks", "scales")), {}, "gpt_oss_mxfp4", "GptOssMxfp4MoEMethod", "mxfp4_w4a16"
)


pytestmark = pytest.mark.usefixtures("vllm_process")


def spoil(layer: Any) -> None:
    """Fill the parameters with noise, as memory has it that vLLM allocates to load anew."""
    for parameter in layer.parameters():
        if parameter.dtype == torch.uint8:
            parameter.data.random_(1, 255)
        else:
            parameter.data.fill_(1e4)


def gpt_oss_tensors() -> dict[str, Tensor]:
    """Return a layer of gpt-oss as its checkpoint stores it; gate and up rows alternate."""
    tensors: dict[str, Tensor] = {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        packed = [GPT_OSS.packer(files.matrix(n, k))[0] for _ in range(layers.E)]
        for part in ("blocks", "scales"):
            tensors[f"{name}_{part}"] = torch.stack([p[part] for p in packed])
        tensors[f"{name}_bias"] = torch.randn(layers.E, n).bfloat16()
    return tensors


def load_whole(layer: Any, tensors: dict[str, Tensor], tp_size: int, tp_rank: int) -> None:
    """Load as vLLM's gpt-oss does: cut for the rank by the model, copied by the layer's loader.

    A rank has whole blocks of 32 neurons, and only the first adds w2's bias.
    """
    share = -(-I // 32 // tp_size) * 32
    mine = slice(tp_rank * share, min((tp_rank + 1) * share, I))
    rows = slice(2 * mine.start, 2 * mine.stop)
    down = tensors["down_proj_blocks"].flatten(2)
    cut = {
        "w13_weight": tensors["gate_up_proj_blocks"].flatten(2)[:, rows],
        "w13_weight_scale": tensors["gate_up_proj_scales"][:, rows],
        "w13_bias": tensors["gate_up_proj_bias"][:, rows],
        "w2_weight": down[:, :, mine.start // 2 : mine.stop // 2],
        "w2_weight_scale": tensors["down_proj_scales"][:, :, mine.start // 32 : mine.stop // 32],
        "w2_bias": tensors["down_proj_bias"] * (tp_rank == 0),
    }
    for name, tensor in cut.items():
        layer.weight_loader(getattr(layer, name), tensor, f"experts.{name}", None, None)


def load_streamed(layer: Any, tensors: dict[str, Tensor], tp_size: int, tp_rank: int) -> None:
    """Load expert by expert, by the loader of gpt-oss's layer, which cuts for the rank."""
    parts = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}
    for stem, name in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        for part, suffix in parts.items():
            held = f"{name}_{suffix}"
            for expert in range(layers.E):
                tensor = tensors[f"{stem}_{part}"][expert]
                layer.weight_loader(
                    getattr(layer, held), tensor, held, f"gpt_oss_{name}", expert, True
                )


def output(problem: Any, weights: Any, x: Tensor, routing: Routing) -> Tensor:
    kernel = moekit.compose(problem, experts="torch")
    width = problem.hidden_size
    padded = torch.nn.functional.pad(x, (0, width - x.shape[1])).bfloat16()
    out = kernel(padded, kernel.pack(weights), routing).float()
    assert int(out[:, x.shape[1] :].count_nonzero()) == 0
    return out[:, : x.shape[1]]


@pytest.mark.parametrize("load", [load_whole, load_streamed])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_gpt_oss(tp_size: int, load: Any, tmp_path: Path) -> None:
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    kind = {"routed_experts_cls": GptOssRoutedExperts} if load is load_streamed else {}
    tensors = gpt_oss_tensors()
    files.save(
        tmp_path,
        {f"model.layers.0.mlp.experts.{name}": t for name, t in tensors.items()},
        dict(model_type="gpt_oss", num_hidden_layers=1, swiglu_limit=7.0),
    )
    x, routing = layers.inputs(H)
    total, shifted = torch.zeros(len(x), H), torch.zeros(len(x), H)
    for rank in range(tp_size):
        layer = layers.empty_layer(
            GPT_OSS,
            H,
            I,
            tp_size=tp_size,
            tp_rank=rank,
            has_bias=True,
            activation="swigluoai",
            **kind,
        )
        assert layer.w13_weight.shape == (layers.E, 2 * (256 if tp_size == 1 else 128), 256)
        if tp_size == 1:  # on more ranks vLLM's loaders leave it open where a share ends
            spoil(layer)
        load(layer, tensors, tp_size, rank)
        problem, read = problems.load(layer, layer.quant_method)
        assert problem.quant.name == "mxfp4_w4a16" and read.interleaved
        assert read.w13.data_ptr() == layer.w13_weight.data_ptr()
        assert (problem.hidden_size, problem.has_bias) == (512, True)
        total += output(problem, read, x, routing)
        read.w13.bitwise_xor_(8)  # negates every number
        shifted += output(problem, read, x, routing)
    whole = problem.replace(hidden_size=H, intermediate_size=I)
    with Checkpoint(tmp_path) as opened:
        loaded = load_experts(opened, "gpt_oss", 0, whole)
    want = oracle(x, loaded, routing, whole)
    bound = rms_bound(whole)
    assert layers.relative_rms(total, want) < bound
    assert layers.relative_rms(shifted, want) > 0.3
