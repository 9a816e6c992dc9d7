"""The formats in use: how a layer is written in each, and what config.json says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import checkpoint_files as files

from moekit import ParallelConfig

# All ranks of EP 3 x TP 1, 2, 4; the last ones of EP 1 and 2.
RANKS = [
    ParallelConfig(ep_size=ep, ep_rank=e, tp_size=tp, tp_rank=t, dp_size=1)
    for ep in (1, 2, 3)
    for e in range(ep)
    for tp in (1, 2, 4)
    for t in range(0 if ep == 3 else tp - 1, tp)
]


def ct(
    bits: int = 4,
    kind: str = "int",
    strategy: str = "group",
    group: int | None = None,
    inputs: dict[str, Any] | None = None,
    format: str = "pack-quantized",
    **more: Any,
) -> dict[str, Any]:
    """Return compressed-tensors' quantization_config."""
    weights = dict(num_bits=bits, type=kind, strategy=strategy, group_size=group, **more)
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


TOKEN = dict(num_bits=8, type="float", strategy="token", dynamic=True)
STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False)
GROUP = dict(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True)
MX = dict(num_bits=8, type="float", strategy="group", group_size=32, dynamic=True)
NVFP4 = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local")
GPTQ = dict(quant_method="gptq", bits=4, group_size=32)
FP8 = dict(quant_method="fp8", fmt="e4m3")


@dataclass(frozen=True)
class Case:
    packer: files.Packer
    config: dict[str, Any] | None
    scheme: str | None  # None: moekit has no such scheme
    activation: str = ""


CASES = {
    "bf16": Case(files.bf16, None, "none"),
    "fp8-tensor": Case(files.fp8(-1, -1), FP8 | dict(activation_scheme="dynamic"), "fp8_tensor"),
    "fp8-tensor-static": Case(
        files.fp8(-1, -1, static=True), FP8 | dict(activation_scheme="static"), "fp8_tensor_static"
    ),
    "modelopt-fp8": Case(
        files.fp8(-1, -1, static=True),
        dict(quant_method="modelopt", quant_algo="FP8"),
        "fp8_tensor_static",
    ),
    "fbgemm-fp8": Case(files.fp8(1, -1), dict(quant_method="fbgemm_fp8"), "fp8_channel_token"),
    "ct-fp8-channel": Case(
        files.fp8(1, -1), ct(8, "float", "channel", inputs=TOKEN), "fp8_channel_token"
    ),
    "ct-fp8-tensor-static": Case(
        files.fp8(-1, -1, static=True),
        ct(8, "float", "tensor", inputs=STATIC),
        "fp8_tensor_static",
    ),
    # no scheme has scales per tensor and per token; one per channel also fits
    "ct-fp8-tensor-token": Case(
        files.fp8(-1, -1), ct(8, "float", "tensor", inputs=TOKEN), "fp8_channel_token"
    ),
    "ct-fp8-weight-only": Case(files.fp8(1, -1), ct(8, "float", "channel"), "fp8_w8a16_channel"),
    "ct-int8": Case(
        files.int8, ct(8, "int", "channel", inputs=TOKEN | {"type": "int"}), "int8_channel_token"
    ),
    "ct-int8-weight-only": Case(files.int8, ct(8, "int", "channel"), "int8_w8a16"),
    "ct-int8-packed": Case(files.pack_quantized_int8, ct(8, "int", "channel"), "int8_w8a16"),
    "ct-int4-g32": Case(files.pack_quantized(32), ct(group=32), "int4_w4a16_g32"),
    "ct-int4-g64": Case(files.pack_quantized(64), ct(group=64), "int4_w4a16_g64"),
    "ct-int4-zp": Case(
        files.pack_quantized(32, True), ct(group=32, symmetric=False), "int4_w4a16_g32_zp"
    ),
    "ct-int4-channel": Case(files.pack_quantized(-1), ct(strategy="channel"), "int4_w4a16_channel"),
    "ct-int4-channel-zp": Case(
        files.pack_quantized(-1, True),
        ct(strategy="channel", symmetric=False),
        "int4_w4a16_channel_zp",
    ),
    "ct-int4-act-order": Case(
        files.pack_quantized(32, act_order=True),
        ct(group=32, actorder="group"),
        "int4_w4a16_g32_act_order",
    ),
    "gptq": Case(files.gptq(32), GPTQ | dict(sym=True, desc_act=False), "int4_w4a16_g32"),
    "gptq-channel": Case(
        files.gptq(-1), GPTQ | dict(sym=True, group_size=-1), "int4_w4a16_channel"
    ),
    "gptq-zp": Case(files.gptq(32, zero_points=True), GPTQ | dict(sym=False), "int4_w4a16_g32_zp"),
    "gptq-v2-zp": Case(
        files.gptq(64, zero_points=True, v2=True),
        GPTQ | dict(sym=False, group_size=64, checkpoint_format="gptq_v2"),
        "int4_w4a16_g64_zp",
    ),
    "gptq-act-order": Case(
        files.gptq(32, zero_points=True, act_order=True),
        GPTQ | dict(sym=False, desc_act=True),
        "int4_w4a16_g32_zp_act_order",
    ),
    "gptq-int8": Case(
        files.gptq_int8, dict(quant_method="gptq", bits=8, group_size=-1, sym=True), "int8_w8a16"
    ),
    "awq": Case(
        files.awq(32),
        dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        "int4_w4a16_g32_zp",
    ),
    "ct-mxfp4": Case(
        files.mxfp4(("weight_packed", "weight_scale")), ct(4, "float", group=32), "mxfp4_w4a16"
    ),
    "ct-int4-fp8": Case(files.pack_quantized(128), ct(group=128, inputs=TOKEN), "int4_w4a8_g128"),
    "ct-mxfp4-mxfp8": Case(
        files.mxfp4(("weight_packed", "weight_scale")),
        ct(4, "float", group=32, inputs=MX),
        "mxfp4_w4a8",
    ),
    "ct-mxfp8": Case(files.mxfp8, ct(8, "float", group=32, inputs=MX), "mxfp8"),
    "ct-nvfp4": Case(
        files.nvfp4(modelopt=False), ct(4, "float", "tensor_group", 16, inputs=NVFP4), "nvfp4"
    ),
    "modelopt-nvfp4": Case(
        files.nvfp4(modelopt=True), dict(quant_method="modelopt", quant_algo="NVFP4"), "nvfp4"
    ),
    "ct-nvfp4-weight-only": Case(
        files.nvfp4(modelopt=False), ct(4, "float", "tensor_group", 16), "nvfp4_w4a16"
    ),
}
