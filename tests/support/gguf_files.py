"""GGUF models with MoE layers, as llama.cpp's converter writes them, by the gguf library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

Types = gguf.GGMLQuantizationType
# Bytes of the fp16 numbers in a block, which random bytes would make infinite.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XS": (0,), "TQ2_0": (64,),
}  # fmt: skip


def blocks(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return random stored data of a tensor (..., columns), with every bit pattern of its codes."""
    if name == "F32":
        return rng.standard_normal(shape, np.float32)
    if name in ("F16", "BF16"):
        return gguf.quantize(rng.standard_normal(shape, np.float32), Types[name])
    elements, nbytes = gguf.GGML_QUANT_SIZES[Types[name]]
    made = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), np.uint8)
    for at in _SCALES.get(name, ()):
        scale = rng.standard_normal(made.shape[:-1]).astype(np.float16)
        scale[rng.random(scale.shape) < 0.05] = 0.0
        made[..., at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        made[..., 0] = rng.integers(117, 123, made.shape[:-1])
    return made.reshape(*shape[:-1], -1)


def values(data: np.ndarray, name: str) -> np.ndarray:
    """Return the numbers of stored data, by the library."""
    return gguf.dequantize(data, Types[name])


def write(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, str]],
    arch: str = "qwen3moe",
    split: int = 0,
    **fields: int,
) -> Path:
    """Write tensors (data, type) and fields of the architecture; ``split``: tensors in a file."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for name, value in fields.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(300)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 300)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def experts(
    rng: np.random.Generator,
    types: tuple[str, str, str],
    *,
    E: int,
    H: int,
    I: int,
    layers: tuple[int, ...] = (0,),
    bias: bool = False,
    fused: bool = False,
) -> dict[str, tuple[np.ndarray, str]]:
    """Return the tensors of layers of experts.

    types: of gate, up and down. fused: gate and up are in one tensor.
    """
    made: dict[str, tuple[np.ndarray, str]] = {}
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    for layer in layers:
        for (role, shape), kind in zip(shapes.items(), types, strict=True):
            data = blocks(rng, shape, kind)
            made[f"blk.{layer}.ffn_{role}_exps.weight"] = data, kind
            if bias:
                made[f"blk.{layer}.ffn_{role}_exps.bias"] = blocks(rng, shape[:2], "F32"), "F32"
        if fused:
            halves = [made.pop(f"blk.{layer}.ffn_{role}_exps.weight") for role in ("gate", "up")]
            both = np.concatenate([data for data, _ in halves], axis=1)
            made[f"blk.{layer}.ffn_gate_up_exps.weight"] = both, halves[0][1]
    return made
