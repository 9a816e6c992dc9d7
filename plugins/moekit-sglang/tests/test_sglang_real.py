"""Test moekit-sglang with SGLang itself: its classes, and an engine on the CPU.

The tests need SGLang 0.5.15 or 0.5.23.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.plugins")

import moekit_sglang
from moekit_sglang import hooks, versions
from moekit_sglang.problem import facts_of
from moekit_sglang.weights import READERS, read

QUANTIZATION = "sglang.srt.layers.quantization"
MODULES = {
    "UnquantizedFusedMoEMethod": "unquant", "Fp8MoEMethod": "fp8", "W8A8FP8MoEMethod": "w8a8_fp8",
    "W8A8Int8MoEMethod": "w8a8_int8", "Mxfp4MoEMethod": "mxfp4", "MoeWNA16Method": "moe_wna16",
    "CompressedTensorsW8A8Fp8MoE": "compressed_tensors.schemes",
    "CompressedTensorsWNA16MoE": "compressed_tensors.schemes",
    "GPTQMarlinMoEScheme": "gptq.schemes", "AWQMoEScheme": "awq.schemes",
}  # fmt: skip


def bare(name: str, **fields: object) -> object:
    """Return an object without calling its constructor, which needs a GPU or an engine."""
    made = object.__new__(sglang_class(name))
    vars(made).update(fields)
    return made


def sglang_class(name: str) -> type:
    return getattr(import_module(f"{QUANTIZATION}.{MODULES[name]}"), name)


def fp8(**config: object) -> object:
    kind = import_module(f"{QUANTIZATION}.fp8").Fp8Config
    config |= {"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic"}
    return sglang_class("Fp8MoEMethod")(kind(**config))


GPTQ = dict(group_size=128, pack_factor=8, weight_bits=4)
WNA16 = dict(strategy="group", actorder=None, num_bits=4, packed_factor=8, group_size=32, sym=True)
MADE = {
    "none": lambda: sglang_class("UnquantizedFusedMoEMethod")(),
    "fp8_block": lambda: fp8(weight_block_size=[128, 128]),
    "fp8_tensor": lambda: fp8(),
    "fp8_channel_token": lambda: sglang_class("W8A8FP8MoEMethod")(SimpleNamespace()),
    "fp8_channel_token of compressed-tensors": lambda: bare(
        "CompressedTensorsW8A8Fp8MoE", block_quant=False, weight_block_size=None,
        static_input_scales=False, weight_quant=SimpleNamespace(strategy="channel"),
    ),
    "int8_channel_token": lambda: sglang_class("W8A8Int8MoEMethod")(SimpleNamespace()),
    "mxfp4_w4a16": lambda: bare(
        "Mxfp4MoEMethod", use_marlin=False, use_flashinfer=False, _fi_kernel=None,
        use_deep_gemm=False, use_mega_moe=False,
    ),
    "int4_w4a16_g32": lambda: bare("CompressedTensorsWNA16MoE", **WNA16),
    "int4_w4a16_g128": lambda: bare(
        "GPTQMarlinMoEScheme", kernel=SimpleNamespace(),
        quant_config=SimpleNamespace(desc_act=False, is_sym=True, **GPTQ),
    ),
    "int4_w4a16_g128_zp": lambda: bare(
        "AWQMoEScheme", quant_config=SimpleNamespace(zero_point=True, **GPTQ)
    ),
    "int4_w4a16_g128 of moe_wna16": lambda: sglang_class("MoeWNA16Method")(
        SimpleNamespace(
            bit8_pack_factor=2, has_zp=False, linear_quant_method="gptq", **GPTQ
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("scheme", MADE)
def test_parameters_that_sglang_creates_are_read(monkeypatch, scheme) -> None:
    """SGLang's own create_weights makes them, and random values fill them."""
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(versions, "argument", lambda name, default=None: default)
    layer, method = torch.nn.Module(), MADE[scheme]()
    vars(layer).update(
        hidden_size=256, intermediate_size_per_partition=128, num_local_experts=3, moe_tp_size=1,
        num_experts=3, moe_ep_size=1, moe_ep_rank=0,
        moe_runner_config=SimpleNamespace(
            is_gated=True, params_dtype=torch.bfloat16, gemm1_alpha=None, gate_up_interleaved=True,
            top_k=2, activation="silu",
        ),
    )  # fmt: skip
    if not type(method).__name__.endswith("Method"):
        layer.scheme = method
    with get_parallel().override(tp_size=1, moe_tp_size=1, moe_ep_size=1):
        method.create_weights(
            layer=layer, num_experts=3, hidden_size=256, intermediate_size_per_partition=128,
            params_dtype=torch.bfloat16, weight_loader=print, intermediate_size_full=128,
        )  # fmt: skip
    found, weights = read(facts_of(layer, method))
    assert found == scheme.partition(" ")[0]
    columns = 1 + (weights.w13.dtype == torch.uint8)
    assert weights.w13.shape == (3, 256, 256 // columns)
    assert weights.w2.shape == (3, 256, 128 // columns)
    assert all(hasattr(param, "weight_loader") for param in layer.parameters())


def test_every_reader_meets_sglangs_own_method() -> None:
    assert {type(make()).__name__ for make in MADE.values()} == set(READERS)


def test_the_hooks_are_applied_to_sglangs_own_classes(monkeypatch) -> None:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
    from sglang.srt.plugins.hook_registry import HookRegistry

    if versions.installed() is None:
        monkeypatch.setattr(versions, "installed", lambda: "0.5.23")
    monkeypatch.setenv("MOEKIT_SGLANG", "require")
    monkeypatch.setattr(hooks, "_installed", [])
    moekit_sglang.register()
    HookRegistry.apply_hooks()
    targets = [f"{versions.LAYER}.__init__", versions.MAKE_DISPATCHER]
    for target in (*targets, *versions.LOADERS):
        assert hasattr(versions.found(target), "__wrapped__"), target
    names = StandardDispatcher.__init__.__code__.co_names
    assert "skip_local_expert_mapping" in names
    made = versions.standard().StandardDispatchOutput("x", None, "topk")
    assert (made.hidden_states, made.topk_output) == ("x", "topk")
    assert versions.standard().StandardCombineInput("x").hidden_states == "x"
    assert issubclass(StandardDispatcher, versions.standard().BaseDispatcher)
    assert versions.has_cpu_kernel() in (0, 1)


@pytest.mark.full
def test_an_engine_completes_the_same_through_updates(tmp_path) -> None:
    """Its requests also return the experts of their tokens. It takes five minutes on two cores."""
    _unpin(tmp_path)
    script = Path(__file__).parents[3] / "benchmarks" / "sglang_engine.py"
    command = [sys.executable, str(script), "--tokens", "--quant", "none", "--memory", "0.3"]
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("96 of 96 tokens equal") == 3
    assert done.stdout.count("; 616 of 616 tokens have the same experts") == 3


def _unpin(folder: Path) -> None:
    """Install a plugin for SGLang's processes; it pins memory for experts."""
    (folder / "unpinned.py").write_text(
        "import torch\n\n\n"
        "def register():\n"
        "    zeros = torch.zeros\n"
        "    torch.zeros = lambda *a, pin_memory=False, **more: zeros(*a, **more)\n"
    )
    info = folder / "unpinned-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unpinned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nunpinned = unpinned:register\n")
