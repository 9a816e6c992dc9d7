"""vLLM moves experts between ranks while it serves. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import os
import re

import pytest

pytest.importorskip("vllm")

import vllm_balancing  # noqa: E402
import vllm_models as models  # noqa: E402
import vllm_plugins  # noqa: E402
from test_vllm_engine import ONE_PROCESS, assert_same, run  # noqa: E402

EXPERTS, REDUNDANT = 8, 2


def test_replicas_move(tmp_path) -> None:
    """Two ranks hold 8 experts and 2 replicas, whose places change every third step."""
    vllm_plugins.install(vllm_balancing, tmp_path)
    model = str(models.save("qwen3_moe", tmp_path / "model"))
    balance = dict(window_size=2, step_interval=3, num_redundant_experts=REDUNDANT)
    balance |= dict(use_async=False, communicator="torch_nccl")
    engine = dict(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = run(model, engine | dict(eplb_config=balance), ("require",), env={"PYTHONPATH": path})
    stock = run(model, ONE_PROCESS, ("off",))["off"]
    assert_same(stock["first"], found["require"]["first"], "float32")
    said = found["require"]["text"]
    assert f", {REDUNDANT} redundant, ep 2 on cpu: local + torch" in said
    maps = [json.loads(line) for line in re.findall(r"PLACES (\[\[.*?\]\])", said)]
    places = {tuple(layer) for layers in maps for layer in layers}
    assert len(places) > 2, "vLLM has moved no experts"
    assert all(len(layer) == EXPERTS + REDUNDANT for layer in places)
