"""vLLM moves experts between ranks while it serves. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("vllm")

import vllm_balancing  # noqa: E402
from vllm_engines import Engines, assert_same  # noqa: E402

EXPERTS, REDUNDANT = 8, 2


def test_replicas_move(saved, engines, tmp_path) -> None:
    """Two ranks hold 8 experts and 2 replicas, whose places change every third step."""
    balance = dict(window_size=2, step_interval=3, num_redundant_experts=REDUNDANT)
    balance |= dict(use_async=False, communicator="torch_nccl")
    engine = dict(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    engine |= dict(eplb_config=balance, distributed_executor_backend="mp")
    with Engines(tmp_path, vllm_balancing) as alone:
        ours = alone(saved("qwen3_moe"), "require", engine=engine)
    assert_same(engines(saved("qwen3_moe"), "off")["first"], ours["first"])
    said = ours["text"]
    assert f", {REDUNDANT} redundant, ep 2 on cpu: local + torch" in said
    maps = [json.loads(line) for line in re.findall(r"PLACES (\[\[.*?\]\])", said)]
    places = {tuple(layer) for layers in maps for layer in layers}
    assert len(places) > 2, "vLLM has moved no experts"
    assert all(len(layer) == EXPERTS + REDUNDANT for layer in places)
