"""Load one MoE layer from a sharded fp8 checkpoint as each of two ranks would.

    python examples/load_layer.py

The program writes a small checkpoint in DeepSeek's format, loads the share of each rank, composes a
kernel on each share, and compares the sum of the ranks' results with fp32 arithmetic on the whole
layer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import moekit
from moekit.backends.reference import oracle
from moekit.checkpoint import Checkpoint, detect, load_experts, problem_from_config

EXPERTS, TOP_K, HIDDEN, INTER, RANKS, TOKENS = 8, 2, 256, 384, 2, 32
LAYER = 1


def write(folder: Path) -> moekit.ExpertWeights:
    """Write the checkpoint, and return its layer's weights in fp32."""
    names = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    shards: list[dict[str, Tensor]] = [{}, {}]
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    for expert in range(EXPERTS):
        for name, (rows, columns) in names.items():
            blocks = torch.randn(rows // 128, 128, columns // 128, 128) / columns**0.5
            scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            weight = (blocks / scale).to(torch.float8_e4m3fn)
            values[name].append((weight.float() * scale).view(rows, columns))
            stem = f"model.layers.{LAYER}.mlp.experts.{expert}.{name}"
            shards[expert % 2][f"{stem}.weight"] = weight.view(rows, columns)
            shards[expert % 2][f"{stem}.weight_scale_inv"] = scale[:, 0, :, 0].contiguous()
    place = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, str(folder / file))
        place |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    config = dict(
        model_type="deepseek_v3",
        num_hidden_layers=2,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        hidden_act="silu",
        quantization_config=dict(
            quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]
        ),
    )
    (folder / "config.json").write_text(json.dumps(config))
    gate, up, down = (torch.stack(values[name]) for name in names)
    return moekit.ExpertWeights(torch.cat([gate, up], dim=1), down)


def main() -> float:
    """Return the relative error of the sum over ranks."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    routing = moekit.route(torch.randn(TOKENS, EXPERTS), TOP_K, renormalize=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        whole = write(folder)
        found = detect(folder)
        print(found)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        total = torch.zeros(TOKENS, HIDDEN)
        for rank in range(RANKS):
            # Experts are split. All ranks have the same tokens, so their results are summed.
            parallel = moekit.ParallelConfig(ep_size=RANKS, ep_rank=rank, dp_size=1)
            with Checkpoint(folder) as checkpoint:
                problem = problem_from_config(checkpoint, parallel=parallel, device="cpu")
                kernel = moekit.compose(problem)
                packed = kernel.pack(load_experts(checkpoint, None, LAYER, problem))
                print(
                    f"rank {rank}: experts {list(problem.local_experts)}, {checkpoint.bytes_read} "
                    f"of {size} bytes read, {kernel.explanation.chosen}"
                )
            total += kernel(x, packed, routing).float()
    plain = moekit.MoEProblem(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        dtype=torch.float32,
        device="cpu",
    )
    expected = oracle(x, whole, routing, plain)
    error = float((total - expected).norm() / expected.norm())
    print(f"error of the ranks' sum against fp32: {error:.1e}")
    return error


if __name__ == "__main__":
    raise SystemExit(main() > 0.1)
