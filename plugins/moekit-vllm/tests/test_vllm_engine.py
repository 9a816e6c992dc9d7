"""A real engine generates the same with and without moekit. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import vllm_models as models  # noqa: E402
from vllm_engines import Engines, assert_same  # noqa: E402

CASES = {
    "qwen3_moe compiled": ("qwen3_moe", {"enforce_eager": False}, ""),
    "qwen3_moe bf16": ("qwen3_moe", {"dtype": "bfloat16"}, ""),
    "mixtral": ("mixtral", {}, ""),
    "deepseek_v2": ("deepseek_v2", {}, ""),
    "gpt_oss": ("gpt_oss", {}, "reload"),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(saved, engines, case) -> None:
    """A fresh engine is no reference for gpt-oss's update: vLLM 0.32 does not restore all of it."""
    name, engine, reload = CASES[case]
    more = {"reload": saved(name, 1)} if reload else {}
    more |= {"engine": engine} if engine else {}
    stock, ours = (engines(saved(name), mode, **more) for mode in ("off", "require"))
    dtype = engine.get("dtype", "float32")
    assert_same(stock["first"], ours["first"], dtype)
    if reload:
        assert ours["first"] != ours["reloaded"]
        assert_same(stock["reloaded"], ours["reloaded"], dtype)
    assert not stock["log"]
    (line,) = ours["log"]
    assert line.startswith("moekit: ") and "local + torch" in line


@pytest.mark.full
@pytest.mark.parametrize("name", models.FAMILIES)
def test_families(saved, engines, name) -> None:
    """Models with other routing, activations, shared experts and ways to call vLLM's layer."""
    stock, ours = (engines(saved(name), mode) for mode in ("off", "require"))
    # vLLM's own values for Qwen2-MoE differ by 3e-4 between environments, moekit's do not.
    assert_same(stock["first"], ours["first"], limit=1e-3)
    assert any("local + torch" in line for line in ours["log"])


def test_weights_change_while_serving(saved, engines, tmp_path) -> None:
    """Experts by `load_weights` of the running model, then all by vLLM's `reload_weights`.

    On CPUs vLLM's other layers cannot be written to.
    """
    seeds = saved("qwen3_moe"), saved("qwen3_moe", 1)
    ours = engines(seeds[0], "require", load=seeds[1], reload=seeds[1])
    other = models.with_experts_of(*seeds, tmp_path)
    for path, found in ((other, ours["loaded"]), (seeds[1], ours["reloaded"])):
        fresh = engines(path, "off")["first"]
        assert_same(fresh, found)
        with pytest.raises(AssertionError):
            assert_same(fresh, ours["first"])


@pytest.mark.parametrize("eager", [True, False])
def test_adapters(saved, engines, tmp_path, eager) -> None:
    """Prompts of a batch with adapters (LoRA) of experts complete as with merged weights."""
    adapter, merged = models.adapter_of(saved("qwen3_moe"), tmp_path)
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enforce_eager": eager}
    paths = [str(adapter), "", str(adapter)]
    ours = engines(saved("qwen3_moe"), "require", engine=engine, adapters=paths)
    plain, wanted = engines(saved("qwen3_moe"), "off")["first"], engines(merged, "off")["first"]
    assert_same(plain, ours["first"])
    assert_same([wanted[0], plain[1], wanted[2]], ours["adapted"])
    (line,) = ours["log"]
    assert "2 adapters of rank 8" in line and "local + torch" in line


def test_vllm_keeps_its_faster_kernel(saved, engines) -> None:
    found = engines(saved("qwen3_moe"), "on")
    assert found["first"] == engines(saved("qwen3_moe"), "off")["first"]
    (line,) = found["log"]
    assert "stays with vLLM: vLLM's own kernel is faster on this CPU" in line


@pytest.mark.parametrize(
    ("name", "whole"), [("qwen3_moe", False), ("gpt_oss", True), ("deepseek_v2", True)]
)
def test_ranks(saved, engines, tmp_path, name, whole) -> None:
    """Two ranks with slices of the experts or whole ones, which vLLM's kernels for CPUs lack."""
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    spread |= {"distributed_executor_backend": "mp"}
    with Engines(tmp_path) as alone:
        ours = alone(saved(name), "require", engine=spread)
    more = {"reload": saved(name, 1)} if name == "gpt_oss" else {}
    assert_same(engines(saved(name), "off", **more)["first"], ours["first"])
    assert "local + torch" in ours["text"]
