"""A real engine generates the same with and without moekit. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm_models as models  # noqa: E402

ENGINE = Path(__file__).parent / "vllm_engine.py"
ONE_PROCESS = {"distributed_executor_backend": "uni"}
# The largest difference of a log probability. bf16 sums of another order differ by 2 ** -8 a term.
LIMIT = {"float32": 2e-4, "bfloat16": 0.15}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    made: dict[tuple[str, int], Path] = {}

    def save(name: str, seed: int = 0) -> str:
        if (name, seed) not in made:
            made[name, seed] = models.save(name, tmp_path_factory.mktemp(f"{name}-{seed}"), seed)
        return str(made[name, seed])

    return save


def run(model: str, engine: dict, modes=("off", "require"), env=None, **more) -> dict:
    """Return what `vllm_engine.py` prints of one model."""
    return run_each([{"model": model, "modes": modes, "engine": engine, **more}], env)[0]


def run_each(asked: list[dict], env=None) -> list[dict]:
    """Return what `vllm_engine.py` prints of several, with one process for all."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO", **(env or {})}
    done = subprocess.run(
        [sys.executable, str(ENGINE), json.dumps(asked)],
        capture_output=True, text=True, timeout=900, env=environment,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    answers = json.loads(lines[0].removeprefix("ANSWERS "))
    for each in answers:
        for answer in each.values():
            answer["text"] = done.stdout + done.stderr
            assert "error" not in answer, answer["error"]
    return answers


def assert_same(stock: list, ours: list, dtype: str, limit: float | None = None) -> None:
    """Compare completions until the first token that two nearly equal logits decide."""
    limit, compared = limit or LIMIT[dtype], 0
    assert len(stock) == len(ours)
    for a, b in zip_longest(stock, ours):
        for token, other, logprob, found in zip(
            a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
        ):
            assert abs(logprob - found) <= limit
            compared += 1
            if token != other:
                assert dtype != "float32", "greedy tokens differ in fp32"
                break
    assert compared >= len(stock) * 3


CASES = {
    "qwen3_moe compiled": ("qwen3_moe", "float32", {"enforce_eager": False}),
    "qwen3_moe bf16": ("qwen3_moe", "bfloat16", {}),
    "mixtral": ("mixtral", "float32", {}),
    "mixtral bf16": ("mixtral", "bfloat16", {}),
    "deepseek_v2": ("deepseek_v2", "float32", {}),
    "gpt_oss": ("gpt_oss", "float32", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(saved, case) -> None:
    name, dtype, engine = CASES[case]
    found = run(saved(name), {"dtype": dtype, **ONE_PROCESS, **engine})
    assert_same(found["off"]["first"], found["require"]["first"], dtype)
    assert not found["off"]["log"]
    (line,) = found["require"]["log"]
    assert line.startswith("moekit: ") and "local + torch" in line


@pytest.mark.full
def test_families(saved) -> None:
    """Models with other routing, activations, shared experts and ways to call vLLM's layer."""
    asked = [
        {"model": saved(name), "modes": ["off", "require"], "engine": ONE_PROCESS}
        for name in models.FAMILIES
    ]
    for name, found in zip(models.FAMILIES, run_each(asked), strict=True):
        print(name)  # pytest shows the last one if it fails
        # vLLM's own values for Qwen2-MoE differ by 3e-4 between environments, moekit's do not.
        assert_same(found["off"]["first"], found["require"]["first"], "float32", limit=1e-3)
        assert any("local + torch" in line for line in found["require"]["log"])


def test_ways_to_serve(saved, tmp_path) -> None:
    """Cached prefixes, prompts in chunks, and tokens that are guessed and verified."""
    chunks = {"enable_prefix_caching": True, "max_num_batched_tokens": 16}
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    ours = {"model": saved("qwen3_moe"), "modes": ["require"]}
    stock, cached, guessed = run_each(
        [
            {**ours, "modes": ["off"], "engine": ONE_PROCESS},
            {**ours, "engine": ONE_PROCESS | chunks, "again": True},
            {**ours, "engine": ONE_PROCESS | {"speculative_config": guesses}},
        ]
    )
    first = stock["off"]["first"]
    for found in (cached["require"], guessed["require"]):
        assert "local + torch" in found["log"][0]
        assert_same(first, found["first"], "float32")
    assert_same(first, cached["require"]["again"], "float32")


def test_experts_are_written_while_serving(saved, tmp_path) -> None:
    """`load_weights` of a running model; on CPUs vLLM's other layers cannot be written to."""
    other = models.with_experts_of(saved("qwen3_moe"), saved("qwen3_moe", 1), tmp_path)
    both = {"modes": ["require"], "engine": ONE_PROCESS}
    written, fresh = run_each(
        [
            {**both, "model": saved("qwen3_moe"), "load": saved("qwen3_moe", 1)},
            {**both, "model": str(other), "modes": ["off"]},
        ]
    )
    assert_same(fresh["off"]["first"], written["require"]["loaded"], "float32")
    with pytest.raises(AssertionError):
        assert_same(fresh["off"]["first"], written["require"]["first"], "float32")


def test_vllm_keeps_its_faster_kernel(saved) -> None:
    found = run(saved("qwen3_moe"), ONE_PROCESS, ("off", "on"))
    assert found["on"]["first"] == found["off"]["first"]
    (line,) = found["on"]["log"]
    assert "stays with vLLM: vLLM's own kernel is faster on this CPU" in line


def test_weights_are_updated_in_place(saved) -> None:
    """vLLM reloads another checkpoint into a running engine, which then is as a fresh one."""
    found = run(saved("qwen3_moe"), ONE_PROCESS, ("require",), reload=saved("qwen3_moe", 1))
    fresh = run(saved("qwen3_moe", 1), ONE_PROCESS, ("off",))["off"]
    ours = found["require"]
    assert ours["first"] != ours["reloaded"]
    assert_same(fresh["first"], ours["reloaded"], "float32")


def test_biases_are_updated_in_place(saved) -> None:
    """vLLM 0.32 does not restore all of gpt-oss, so a fresh engine is no reference."""
    found = run(saved("gpt_oss"), ONE_PROCESS, reload=saved("gpt_oss", 1))
    stock, ours = found["off"], found["require"]
    assert ours["first"] != ours["reloaded"]
    assert_same(stock["reloaded"], ours["reloaded"], "float32")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("experts", ["sliced", "whole"])
def test_ranks(saved, name, experts) -> None:
    """Two ranks agree with two of vLLM's, whose own expert parallelism fails on the CPU."""
    engine = {"tensor_parallel_size": 2}
    stock = run(saved(name), engine, ("off",))["off"]
    more = {"enable_expert_parallel": experts == "whole"}
    ours = run(saved(name), engine | more, ("require",))["require"]
    assert_same(stock["first"], ours["first"], "float32")
    assert "local + torch" in ours["text"]
