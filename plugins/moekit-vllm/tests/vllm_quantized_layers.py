"""MoE layers of the installed vLLM in each quantization format, loaded by vLLM's own loaders.

The layers are vLLM's `RoutedExperts` with vLLM's quantization methods, made in this process
without a GPU. Methods whose constructors look for a kernel of a GPU get the answer that they would
get on Hopper (`choose_backends`). A rank of tensor parallelism is a layer whose config names it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from moekit_vllm import versions
from torch import Tensor

from moekit import Routing

E, TOP_K = 4, 2
_PACKAGE = "vllm.model_executor.layers"
_numbers = itertools.count()


@contextmanager
def process(folder: Path) -> Iterator[None]:
    """Let layers be made in this process, as vLLM's only rank."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def choose_backends(patch: pytest.MonkeyPatch) -> None:
    """Let constructors choose the backends that vLLM has for an H100, which a CPU cannot run.

    On a CPU with AMX, vLLM has kernels for some formats, which leave activations in 16 bits.
    """
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def module(name: str) -> Any:
        return importlib.import_module(f"{_PACKAGE}.{name}")

    marlin = module("fused_moe.experts.marlin_moe").MarlinExperts
    ct = "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
    choices = {
        "select_wna16_moe_backend": ("int_wna16", "WNA16MoEBackend", "MARLIN"),
        "select_int8_moe_backend": ("int8", "Int8MoeBackend", "TRITON"),
        "select_w4a8_moe_backend": ("w4a8", "W4A8MoeBackend", "CUTLASS"),
        "select_nvfp4_moe_backend": ("nvfp4", "NvFp4MoeBackend", "MARLIN"),
        "select_mxfp4_moe_backend": ("mxfp4", "Mxfp4MoeBackend", "MARLIN"),
        "select_deepseek_v4_mxfp4_moe_backend": ("mxfp4", "Mxfp4MoeBackend", "MARLIN"),
    }
    users = [
        f"{ct}_{kind}" for kind in ("wna16", "w8a8_int8", "w4a8_fp8", "w4a4_nvfp4", "w4a4_mxfp4")
    ]
    names = ("auto_gptq", "auto_awq", "moe_wna16", "mxfp4", "modelopt", "online.int8")
    users += [f"quantization.{name}" for name in names]
    for user in map(module, users):
        for name, (oracle, kind, member) in choices.items():
            if hasattr(user, name):
                answer = getattr(module(f"fused_moe.oracle.{oracle}"), kind)[member], marlin
                patch.setattr(user, name, lambda *args, answer=answer, **more: answer)
    for user in map(module, ("quantization.auto_gptq", "quantization.auto_awq", ct, f"{ct}_wna16")):
        for name in ("check_moe_marlin_supports_layer", "check_moe_marlin_supports_config"):
            if hasattr(user, name):
                patch.setattr(user, name, lambda *args, **more: True)
    patch.setattr(versions, "routes_on_cpu", lambda: True)
    awq = module("quantization.auto_awq").AutoAWQConfig
    patch.setattr(awq, "get_min_capability", classmethod(lambda cls: -1))


@dataclass(frozen=True)
class Format:
    """A format, as checkpoints say and store it.

    Attributes:
        vllm: vLLM's name of the quantization.
        scheme: moekit's scheme for the method that vLLM chooses.
        views: The weights must be read without a copy.

    GPTQ and AWQ have fp16 scales, which vLLM rounds to the model's dtype.
    """

    packer: files.Packer
    config: dict[str, Any]
    vllm: str
    method: str
    scheme: str
    views: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype in which vLLM keeps the checkpoint's scales."""
        return (
            torch.float16 if self.config.get("quant_method") in ("gptq", "awq") else torch.bfloat16
        )


def _ct(bits: int, kind: str, strategy: str, inputs: Any = None, **more: Any) -> dict[str, Any]:
    weights = dict(num_bits=bits, type=kind, strategy=strategy, dynamic=False, symmetric=True)
    packed = {"int": "pack-quantized", "float": "mxfp4-pack-quantized"}
    packing = (
        packed[kind] if bits == 4 else "float-quantized" if kind == "float" else "int-quantized"
    )
    packing = more.pop("format", packing)
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"format": packing}},
    }


def _e8m0_blocks(values: Tensor) -> files.Packed:
    """Pack with scales that are powers of two, a byte each."""
    scale = torch.exp2(torch.log2(files.grouped(values, 128, 128) / 448).ceil())
    each = files.spread(scale, *values.shape, 128, 128)
    weight = (values / each).to(files.FP8)
    stored = scale.to(torch.float8_e8m0fnu)
    return {"weight": weight, "weight_scale_inv": stored}, weight.float() * each


_TOKEN = dict(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
_GROUP = dict(
    num_bits=8, type="float", strategy="group", group_size=128, dynamic=True, symmetric=True
)
_STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
_FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
_BLOCK = _FP8 | dict(weight_block_size=[128, 128])
_GPTQ = dict(quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=True)
_AWQ = dict(quant_method="awq", bits=4, group_size=64, zero_point=True, version="gemm")
_NVFP4 = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local")
_MODELOPT = dict(quant_method="modelopt", exclude_modules=[])
_MX = dict(group_size=32, scale_dtype="torch.uint8")
_PACKED = ("weight_packed", "weight_scale")
# vLLM's names of a quantization and of its method.
_BY_FP8 = ("fp8", "Fp8MoEMethod")
_BY_CT_FP8, _BY_CT_INT8, _BY_WNA16, _BY_CT_W4A8, _BY_CT_MXFP4, _BY_CT_MXFP4_FP8, _BY_CT_NVFP4 = (
    ("compressed-tensors", f"CompressedTensors{kind}MoEMethod")
    for kind in ("W8A8Fp8", "W8A8Int8", "WNA16", "W4A8Fp8", "W4A4Mxfp4", "W4A8Mxfp4", "W4A4Nvfp4")
)
_BY_GPTQ, _BY_AWQ = ("auto_gptq", "AutoGPTQMoEMethod"), ("auto_awq", "AutoAWQMoEMethod")
_BY_MOE_WNA16 = ("moe_wna16", "MoeWNA16Method")
_BY_MODELOPT = ("modelopt", "ModelOptFp8MoEMethod")
_BY_MODELOPT_FP4 = ("modelopt_fp4", "ModelOptNvFp4FusedMoE")

FORMATS = {
    "fp8-block": Format(files.fp8(128, 128, "weight_scale_inv"), _BLOCK, *_BY_FP8, "fp8_block"),
    "fp8-block-e8m0": Format(_e8m0_blocks, _BLOCK, *_BY_FP8, "fp8_block"),
    "fp8-tensor": Format(files.fp8(-1, -1), _FP8, *_BY_FP8, "fp8_tensor"),
    "fp8-static": Format(files.fp8(-1, -1, static=True), _FP8 | dict(activation_scheme="static"),
                         *_BY_FP8, "fp8_tensor_static"),
    "modelopt-fp8": Format(files.fp8(-1, -1, static=True), _MODELOPT | dict(quant_algo="FP8"),
                           *_BY_MODELOPT, "fp8_tensor_static"),
    "ct-fp8-block": Format(files.fp8(128, 128),
                           _ct(8, "float", "block", _GROUP, block_structure=[128, 128]),
                           *_BY_CT_FP8, "fp8_block"),
    "ct-fp8-channel": Format(files.fp8(1, -1), _ct(8, "float", "channel", _TOKEN),
                             *_BY_CT_FP8, "fp8_channel_token"),
    "ct-fp8-static": Format(files.fp8(-1, -1, static=True), _ct(8, "float", "tensor", _STATIC),
                            *_BY_CT_FP8, "fp8_tensor_static"),
    "ct-int8": Format(files.int8, _ct(8, "int", "channel", _TOKEN | {"type": "int"}),
                      *_BY_CT_INT8, "int8_channel_token"),
    "ct-int8-packed": Format(files.pack_quantized_int8,
                             _ct(8, "int", "channel", format="pack-quantized"),
                             *_BY_WNA16, "int8_w8a16", views=False),
    "ct-int4": Format(files.pack_quantized(64), _ct(4, "int", "group", group_size=64),
                      *_BY_WNA16, "int4_w4a16_g64"),
    "ct-int4-zp": Format(files.pack_quantized(32, True),
                         _ct(4, "int", "group", group_size=32, symmetric=False),
                         *_BY_WNA16, "int4_w4a16_g32_zp"),
    "ct-int4-channel": Format(files.pack_quantized(-1), _ct(4, "int", "channel"),
                              *_BY_WNA16, "int4_w4a16_channel"),
    "ct-int4-fp8": Format(files.pack_quantized(128),
                          _ct(4, "int", "group", _TOKEN, group_size=128),
                          *_BY_CT_W4A8, "int4_w4a8_g128"),
    "gptq": Format(files.gptq(64), _GPTQ, *_BY_GPTQ, "int4_w4a16_g64", views=False),
    "gptq-channel": Format(files.gptq(-1), _GPTQ | dict(group_size=-1),
                           *_BY_GPTQ, "int4_w4a16_channel", views=False),
    "gptq-int8": Format(files.gptq_int8, _GPTQ | dict(bits=8, group_size=-1),
                        *_BY_GPTQ, "int8_w8a16", views=False),
    "awq": Format(files.awq(64), _AWQ, *_BY_AWQ, "int4_w4a16_g64_zp", views=False),
    "wna16-gptq": Format(files.gptq(64), _GPTQ, *_BY_MOE_WNA16, "int4_w4a16_g64"),
    "wna16-gptq-zp": Format(files.gptq(64, zero_points=True), _GPTQ | dict(sym=False),
                            *_BY_MOE_WNA16, "int4_w4a16_g64_zp"),
    "wna16-awq": Format(files.awq(64), _AWQ, *_BY_MOE_WNA16, "int4_w4a16_g64_zp"),
    "ct-mxfp4": Format(files.mxfp4(_PACKED), _ct(4, "float", "group", **_MX),
                       *_BY_CT_MXFP4, "mxfp4_w4a16"),
    # Marlin leaves the activations in 16 bits
    "ct-mxfp4-fp8": Format(files.mxfp4(_PACKED), _ct(4, "float", "group", _TOKEN, **_MX),
                           *_BY_CT_MXFP4_FP8, "mxfp4_w4a16"),
    "ct-nvfp4": Format(files.nvfp4(modelopt=False),
                       _ct(4, "float", "tensor_group", group_size=16,
                           format="nvfp4-pack-quantized"),
                       *_BY_CT_NVFP4, "nvfp4_w4a16"),
    "modelopt-nvfp4": Format(files.nvfp4(modelopt=True),
                             _MODELOPT | dict(quant_algo="NVFP4", group_size=16),
                             *_BY_MODELOPT_FP4, "nvfp4_w4a16"),
}  # fmt: skip


def empty_layer(
    format: Format, H: int, I: int, *, tp_size: int = 1, tp_rank: int = 0, **more: Any
) -> Any:
    """Return a `RoutedExperts` layer of vLLM with parameters that nothing was loaded into."""
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    kind = get_quantization_config(format.vllm)
    if format.vllm == "online":
        from vllm.config.quantization import QuantizationConfigArgs

        config = kind(QuantizationConfigArgs(moe=format.config["moe"]))
    else:
        config = kind.from_config(format.config)
    make = fused_moe.FusedMoE if "FusedMoE" in fused_moe.__all__ else fused_moe.FusedMoEFactory
    runner = make(
        num_experts=E,
        top_k=TOP_K,
        hidden_size=H,
        intermediate_size=I,
        params_dtype=format.dtype,
        quant_config=config,
        prefix=f"model.layers.{next(_numbers)}.mlp.experts",
        tp_size=tp_size,
        **more,
    )
    layer = runner.routed_experts
    layer.moe_config.moe_parallel_config.tp_rank = tp_rank
    assert type(layer.quant_method).__name__ == format.method
    return layer


def load(layer: Any, made: files.Layer) -> Any:
    """Load a checkpoint's tensors by vLLM's loaders, and return the layer."""
    stem = "model.layers.0.mlp.experts."
    held = dict(layer.named_parameters())
    named = [
        (name.removeprefix(stem), tensor)
        for name, tensor in made.tensors.items()
        if name.startswith(stem)
        # vLLM's models skip g_idx where the layer has no such parameter
        and (not name.endswith("g_idx") or any(n.endswith("g_idx") for n in held))
    ]
    assert set(layer.load_weights(named)) <= set(held)
    return layer


@contextmanager
def rank_of_loaders(tp_rank: int) -> Iterator[None]:
    """Tell the loader of MoeWNA16Method the rank, which it asks vLLM's groups for."""
    module = importlib.import_module(f"{_PACKAGE}.quantization.moe_wna16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "get_tensor_model_parallel_rank", lambda: tp_rank)
        yield


# -- what is computed ------------------------------------------------------------------------


def expected_output(made: files.Layer, x: Tensor, routing: Routing) -> Tensor:
    """Compute the experts in fp32 with the numbers that the packers meant."""
    x, out = x.float(), torch.zeros(x.shape)
    for t in range(len(x)):
        for weight, e in zip(routing.topk_weights[t], routing.topk_ids[t].tolist(), strict=True):
            h = torch.nn.functional.silu(made.gate[e] @ x[t]) * (made.up[e] @ x[t])
            out[t] += weight * (made.down[e] @ h)
    return out


def relative_rms(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def inputs(hidden: int, tokens: int = 9) -> tuple[Tensor, Routing]:
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(tokens)])
    return torch.randn(tokens, hidden).bfloat16() / 4, Routing(torch.rand(tokens, TOP_K) + 0.2, ids)
