"""vLLM's Triton experts: `fused_experts_impl`, its kernel, its tuned tables, its host code.

They come from an installed vllm, or from the folder that MOEKIT_VLLM_PATH names (the wheel's
vllm/). Of that folder these files are read, and nothing else of vllm is imported:

    model_executor/layers/fused_moe/fused_moe.py, moe_align_block_size.py, configs/*.json
    _moe_C_stable_libtorch.abi3.so      (align, sum)
    _C_stable_libtorch.abi3.so          (SiLU * mul; without it, _glue's kernel)

With a folder, _glue quantizes activations. Whatever else fused_moe.py imports is replaced by the
stand-ins below, none of which runs on the device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from _glue import quantize, silu_mul, vllm_version
from moekit_bench import Unavailable

name = "vllm_triton"
version = vllm_version
_FUSED = "vllm.model_executor.layers.fused_moe"
_LIBRARIES = {  # file -> whether it is loaded already
    "_moe_C_stable_libtorch.abi3.so": lambda: hasattr(torch.ops._moe_C, "moe_sum"),
    "_C_stable_libtorch.abi3.so": lambda: hasattr(torch.ops._C, "silu_and_mul"),
}


def make(problem, weights, device):
    if device.type != "cuda":
        raise Unavailable(f"runs on CUDA, not on {device}")
    if problem.activation.name != "silu" or problem.activation.clamped or problem.has_bias:
        raise Unavailable("only plain silu without biases")
    scheme, operand = problem.quant.name, problem.quant.weight
    options, scales = {}, (weights.w13_scale, weights.w2_scale)
    if scheme in ("fp8_tensor", "fp8_channel_token", "fp8_block"):
        options = {"use_fp8_w8a8": True, "per_channel_quant": scheme == "fp8_channel_token"}
        options["block_shape"] = [128, 128] if scheme == "fp8_block" else None
    elif scheme == "int8_w8a16":
        options = {"use_int8_w8a16": True}
    elif scheme in ("int4_w4a16_g32", "int4_w4a16_g64", "int4_w4a16_g128"):
        options = {"use_int4_w4a16": True, "block_shape": [0, operand.group[1]]}
        scales = [s.to(problem.dtype) for s in scales]
    elif scheme != "none":
        raise Unavailable(f"neither fused_experts_impl nor this adapter supports {scheme}")
    if operand is not None:
        options |= {"w1_scale": scales[0], "w2_scale": scales[1]}
    fused_experts = implementation()

    def call(x, routing):
        return fused_experts(
            x, weights.w13, weights.w2, routing.topk_weights, routing.topk_ids, **options
        )

    return call


def implementation():
    try:
        return getattr(sys.modules[f"{_FUSED}.fused_moe"], "fused_experts_impl")  # noqa: B009
    except KeyError:
        pass
    folder = os.environ.get("MOEKIT_VLLM_PATH")
    try:
        if not folder:
            return importlib.import_module(f"{_FUSED}.fused_moe").fused_experts_impl
        return from_folder(Path(folder)).fused_experts_impl
    except (ImportError, OSError, AttributeError) as error:
        hint = "pip install vllm, or set MOEKIT_VLLM_PATH"
        raise Unavailable(f"vllm's fused_moe does not import ({error}): {hint}") from error


def from_folder(folder: Path) -> ModuleType:
    import triton
    import triton.language as tl

    ops = torch.ops._moe_C
    for library, loaded in _LIBRARIES.items():
        if not loaded() and (folder / library).is_file():
            torch.ops.load_library(str(folder / library))
    own = hasattr(torch.ops._C, "silu_and_mul")

    def activate(_, out, h):
        torch.ops._C.silu_and_mul(out, h) if own else silu_mul(h, out)

    def quantized(A, A_scale, quant_dtype, per_act_token_quant, block_shape=None):
        if quant_dtype is None:
            return A, A_scale
        if block_shape or per_act_token_quant:
            return quantize(A, block_shape[1] if block_shape else A.shape[1])
        scale = A.abs().amax().float().clamp(min=1e-10).view(1) / 448.0
        return (A / scale).to(quant_dtype), scale

    def dtype_name(dtype, **uses):
        return next((use.removeprefix("use_") for use, on in uses.items() if on), None)

    def swaps(m, n):
        return torch.cuda.get_device_capability() == (9, 0) and m < 64 <= n

    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None)
    stand_in("vllm.logger", init_logger=lambda name: MagicMock())
    stand_in("vllm._custom_ops", moe_align_block_size=ops.moe_align_block_size,
             moe_sum=lambda y, out: ops.moe_sum(y, out, None, None))  # fmt: skip
    stand_in("vllm.platforms", current_platform=SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False))  # fmt: skip
    stand_in("vllm.triton_utils", tl=tl, triton=triton)
    stand_in("vllm.triton_utils.allocation", set_triton_allocator=None)
    stand_in("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2,
             round_up=lambda n, by: -(-n // by) * by, cdiv=triton.cdiv)  # fmt: skip
    device_name = torch.cuda.get_device_name().replace(" ", "_")
    stand_in("vllm.utils.platform_utils", get_device_name_as_file_name=lambda: device_name)
    stand_in("vllm.utils.torch_utils", direct_register_custom_op=lambda *_, **__: None)
    stand_in(_FUSED, get_config=lambda: None)
    stand_in(f"{_FUSED}.modular_kernel", FusedMoEExpertsModular=SimpleNamespace(
        adjust_N_for_activation=lambda n, _: n // 2))  # fmt: skip
    stand_in(f"{_FUSED}.activation", MoEActivation=MagicMock(), apply_moe_activation=activate)
    stand_in(f"{_FUSED}.config", FUSED_MOE_UNQUANTIZED_CONFIG=None, FusedMoEQuantConfig=object,
             _get_config_dtype_str=dtype_name)  # fmt: skip
    stand_in(f"{_FUSED}.utils", enable_swap_ab=swaps, moe_kernel_quantize_input=quantized,
             resolve_moe_use_td=lambda: False,
             warn_if_moe_use_td_ineffective=lambda *_, **__: None)  # fmt: skip
    real = folder / "model_executor/layers/fused_moe"
    load(f"{_FUSED}.moe_align_block_size", real / "moe_align_block_size.py")
    return load(f"{_FUSED}.fused_moe", real / "fused_moe.py")


def stand_in(name: str, **contents) -> None:
    """Put a module with these contents into ``sys.modules``, and the packages above it."""
    parent = None
    for end in [i for i, letter in enumerate(name + ".") if letter == "."]:
        module = sys.modules.setdefault(name[:end], ModuleType(name[:end]))
        module.__path__ = []
        if parent is not None:
            setattr(parent, name[:end].rpartition(".")[2], module)
        parent = module
    vars(parent).update(contents)


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not file.is_file():
        raise ImportError(f"no {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
