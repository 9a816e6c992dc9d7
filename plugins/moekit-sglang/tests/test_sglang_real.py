"""SGLang itself has what moekit-sglang uses, and an engine on the CPU completes what it does alone.

The tests need SGLang (0.5.15 or 0.5.23), whose modules are imported as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.plugins")

import moekit_sglang
from moekit_sglang import hooks, versions
from moekit_sglang.weights import READERS

QUANTIZATION = "sglang.srt.layers.quantization"
MODULES = {
    "UnquantizedFusedMoEMethod": "unquant", "Fp8MoEMethod": "fp8", "W8A8FP8MoEMethod": "w8a8_fp8",
    "W8A8Int8MoEMethod": "w8a8_int8", "Mxfp4MoEMethod": "mxfp4", "MoeWNA16Method": "moe_wna16",
    "CompressedTensorsW8A8Fp8MoE": "compressed_tensors.schemes",
    "CompressedTensorsWNA16MoE": "compressed_tensors.schemes",
    "GPTQMarlinMoEScheme": "gptq.schemes", "AWQMoEScheme": "awq.schemes",
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_the_methods_that_are_read(name) -> None:
    method = getattr(import_module(f"{QUANTIZATION}.{MODULES[name]}"), name)
    assert callable(method.create_weights) and callable(method.process_weights_after_loading)


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
    made = versions.dispatched("x", "topk")
    assert (made.hidden_states, made.topk_output) == ("x", "topk")
    assert versions.standard("x").hidden_states == "x" and versions.has_cpu_kernel() in (0, 1)


@pytest.mark.full
def test_an_engine_completes_the_same_through_updates() -> None:
    """It takes about four minutes on two cores."""
    script = Path(__file__).parents[3] / "benchmarks" / "sglang_engine.py"
    command = [sys.executable, str(script), "--tokens", "--quant", "none", "--memory", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "24 of 24 completions are equal so far" in done.stdout
