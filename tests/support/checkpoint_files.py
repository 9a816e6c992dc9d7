"""Write small checkpoints in the formats in use, packed without any code of moekit.

Each format is a function `(values (N, K) fp32) -> (tensors by suffix, the values they represent)`.
`write` writes a layer of such Linears to sharded safetensors files with a config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]
FP8 = torch.float8_e4m3fn


def words(values: np.ndarray, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack (n, c * 32 / bits) to int32 (n, c), value order[i] of each word in its i-th field."""
    per = 32 // bits
    groups = values.reshape(len(values), -1, per).astype(np.uint64)
    total = np.zeros(groups.shape[:2], dtype=np.uint64)
    for i in range(per):
        total |= groups[:, :, order[i]] << np.uint64(bits * i)
    return torch.from_numpy(total.astype(np.uint32).view(np.int32))


def grouped(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each block, (N / rows, K / columns); -1 for all."""
    n, k = values.shape
    rows, columns = (n if rows < 0 else rows), (k if columns < 0 else columns)
    out = torch.zeros(-(-n // rows), -(-k // columns))
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            block = values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            out[i, j] = block.abs().max()
    return out


def spread(scale: Tensor, n: int, k: int, rows: int, columns: int) -> Tensor:
    """Expand a scale for each block to one for each element."""
    i = torch.arange(n) // (n if rows < 0 else rows)
    j = torch.arange(k) // (k if columns < 0 else columns)
    return scale[i][:, j]


# -- one Linear in each format ---------------------------------------------------------------


def bf16(values: Tensor) -> Packed:
    weight = values.bfloat16()
    return {"weight": weight}, weight.float()


def fp8(rows: int, columns: int, name: str = "weight_scale", static: bool = False) -> Packer:
    def pack(values: Tensor) -> Packed:
        scale = grouped(values, rows, columns) / 448
        each = spread(scale, *values.shape, rows, columns)
        weight = (values / each).to(FP8)
        stored = scale.reshape(()) if (rows, columns) == (-1, -1) else scale
        tensors = {"weight": weight, name: stored}
        if static:  # the same for every matrix, because gate and up share it
            tensors["input_scale"] = torch.tensor(0.03)
        return tensors, weight.float() * each

    return pack


def int8(values: Tensor) -> Packed:
    scale = grouped(values, 1, -1) / 127
    weight = (values / scale).round().to(torch.int8)
    return {"weight": weight, "weight_scale": scale.bfloat16()}, (
        weight.float() * scale.bfloat16().float()
    )


def _int4(values: Tensor, group: int, zero_points: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return (q 0..15 as numpy, scale (N, G) in ``dtype``, zeros (N, G), the values)."""
    n, k = values.shape
    scale = (grouped(values, 1, group) / 7).to(dtype)
    zeros = torch.full(scale.shape, 8.0)
    if zero_points:
        zeros = torch.randint(3, 12, scale.shape).float()
    each_scale, each_zero = (spread(t.float(), n, k, 1, group) for t in (scale, zeros))
    q = (values / each_scale + each_zero).round().clamp(0, 15)
    return q.numpy().astype(np.uint8), scale, zeros, (q - each_zero) * each_scale


def pack_quantized(group: int, zero_points: bool = False, act_order: bool = False) -> Packer:
    """The integer format of compressed-tensors."""

    def pack(values: Tensor) -> Packed:
        n, k = values.shape
        q, scale, zeros, back = _int4(values, group, zero_points, torch.bfloat16)
        tensors = {
            "weight_packed": words(q),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if zero_points:
            tensors["weight_zero_point"] = words(zeros.numpy().astype(np.uint8).T.copy()).T
        if act_order:
            q, back, g_idx = _shuffle(q, back, group)
            tensors |= {"weight_packed": words(q), "weight_g_idx": g_idx}
        return {name: t.contiguous() for name, t in tensors.items()}, back

    return pack


def pack_quantized_int8(values: Tensor) -> Packed:
    scale = (grouped(values, 1, -1) / 127).bfloat16()
    q = (values / scale.float()).round().clamp(-128, 127)
    unsigned = (q.numpy() + 128).astype(np.uint8)
    tensors = {
        "weight_packed": words(unsigned, 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor(values.shape),
    }
    return tensors, q * scale.float()


_PERMUTATIONS: dict[int, np.ndarray] = {}


def _shuffle(q: np.ndarray, back: Tensor, group: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Shuffle the columns of groups, in the same way for each K, as gate and up share it."""
    k = q.shape[1]
    order = _PERMUTATIONS.setdefault(k, np.random.default_rng(k).permutation(k))
    return q[:, order], back[:, order], torch.from_numpy(order // group).int()


def gptq(
    group: int, *, zero_points: bool = False, v2: bool = False, act_order: bool = False
) -> Packer:
    def pack(values: Tensor) -> Packed:
        k = values.shape[1]
        q, scale, zeros, back = _int4(values, group, zero_points, torch.float16)
        size = k if group < 0 else group
        g_idx = torch.arange(k).int() // size
        if act_order:
            q, back, g_idx = _shuffle(q, back, size)
        stored = zeros.numpy().astype(np.uint8) - (0 if v2 else 1)
        tensors = {
            "qweight": words(q).T,
            "qzeros": words(stored.T.copy()),
            "scales": scale.T,
            "g_idx": g_idx,
        }
        return {name: t.contiguous() for name, t in tensors.items()}, back

    return pack


def gptq_int8(values: Tensor) -> Packed:
    scale = (grouped(values, 1, -1) / 127).half()
    q = (values / scale.float()).round().clamp(-128, 127)
    tensors = {
        "qweight": words((q.numpy() + 128).astype(np.uint8), 8).T,
        "qzeros": words(np.full((1, len(values)), 127, dtype=np.uint8), 8),
        "scales": scale.T,
        "g_idx": torch.zeros(values.shape[1], dtype=torch.int32),
    }
    return {name: t.contiguous() for name, t in tensors.items()}, q * scale.float()


def awq(group: int) -> Packer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(values: Tensor) -> Packed:
        q, scale, zeros, back = _int4(values, group, True, torch.float16)
        tensors = {
            "qweight": words(q.T.copy(), order=order),
            "qzeros": words(zeros.numpy().astype(np.uint8).T.copy(), order=order),
            "scales": scale.T.contiguous(),
        }
        return tensors, back

    return pack


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _fp4(values: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (codes 0..15, the values) with a scale for each group."""
    each = spread(scale, *values.shape, 1, group)
    codes = (values[..., None] / each[..., None] - _E2M1).abs().argmin(-1)
    return codes.to(torch.uint8), _E2M1[codes] * each


def _bytes(codes: Tensor) -> Tensor:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def mxfp4(suffixes: tuple[str, str]) -> Packer:
    """mxfp4: scales are exponents in bytes; ``blocks`` are (N, K / 32, 16)."""

    def pack(values: Tensor) -> Packed:
        exponent = torch.log2(grouped(values, 1, 32) / 6).ceil()
        codes, back = _fp4(values, torch.exp2(exponent), 32)
        packed = _bytes(codes)
        if suffixes[0] == "blocks":
            packed = packed.view(len(values), -1, 16)
        return {suffixes[0]: packed, suffixes[1]: (exponent + 127).to(torch.uint8)}, back

    return pack


def mxfp8(values: Tensor) -> Packed:
    exponent = torch.log2(grouped(values, 1, 32) / 448).ceil()
    each = torch.exp2(exponent).repeat_interleave(32, dim=1)
    weight = (values / each).to(FP8)
    tensors = {"weight": weight, "weight_scale": (exponent + 127).to(torch.uint8)}
    return tensors, weight.float() * each


def nvfp4(modelopt: bool) -> Packer:
    def pack(values: Tensor) -> Packed:
        total = values.abs().max() / (6 * 448)
        scale = (grouped(values, 1, 16) / 6 / total).to(FP8)
        if modelopt:
            each, suffix, stored = scale.float() * total, "weight_scale_2", total
        else:
            each, suffix, stored = scale.float() / (1 / total), "weight_global_scale", 1 / total
        codes, back = _fp4(values, each, 16)
        names = ("weight", "weight_scale") if modelopt else ("weight_packed", "weight_scale")
        tensors = {names[0]: _bytes(codes), names[1]: scale, suffix: stored.reshape(1)}
        if modelopt:
            tensors["input_scale"] = torch.tensor(0.1)
        return tensors, back

    return pack


# -- whole layers ----------------------------------------------------------------------------


@dataclass
class Layer:
    """A checkpoint on disk, and its matrices (E, I, H), (E, I, H), (E, H, I)."""

    path: Path
    sizes: dict[str, int]
    gate: Tensor
    up: Tensor
    down: Tensor
    tensors: dict[str, Tensor] = field(repr=False)


def write(
    path: Path,
    packer: Packer,
    config: Mapping[str, Any] | None = None,
    *,
    E: int = 5,
    H: int = 128,
    I: int = 256,
    layers: int = 1,
    stem: str = "model.layers.{layer}.mlp.experts.{expert}",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    model_type: str = "qwen3_moe",
    extra: Mapping[str, Tensor] | None = None,
    shards: int = 3,
) -> Layer:
    """Write a set of tensors for each expert, as a quantizer of Linears does."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": torch.zeros(8, H)}
    back: dict[str, list[Tensor]] = {name: [] for name in names}
    for layer in range(layers):
        for expert in range(E):
            for name, (n, k) in zip(names, ((I, H), (I, H), (H, I)), strict=True):
                packed, meant = packer(matrix(n, k))
                prefix = stem.format(layer=layer, expert=expert)
                tensors |= {f"{prefix}.{name}.{suffix}": t for suffix, t in packed.items()}
                if layer == layers - 1:
                    back[name].append(meant)
    sizes = dict(num_experts=E, hidden_size=H, intermediate_size=I)
    said = {
        "model_type": model_type,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "hidden_size": H,
        "moe_intermediate_size": I,
        "intermediate_size": 7 * I,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "dtype": "bfloat16",
    }
    said |= {"quantization_config": config} if config else {}
    save(path, tensors | dict(extra or {}), said, shards)
    gate, up, down = (torch.stack(back[name]) for name in names)
    return Layer(path, sizes, gate, up, down, tensors)


def save(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shards: int = 1
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    names = list(tensors)
    place = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(place.values()):
        held = {name: tensors[name].contiguous() for name in names if place[name] == file}
        save_file(held, str(path / file), metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": place})
    )


def matrix(n: int, k: int) -> Tensor:
    """Return random values whose rows and groups of columns differ in magnitude."""
    values = torch.randn(n, k) * torch.exp(0.5 * torch.randn(n, 1))
    return values * torch.tensor([0.5, 1.5, 1.0])[torch.arange(k) // 16 % 3] + 0.01
