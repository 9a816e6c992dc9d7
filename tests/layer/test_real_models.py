"""Real architectures with random weights: moekit from the file against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hf_models as hfm
import pytest
import torch
from real_models import (
    Router,
    expert_parallel_rank,
    problem_of,
    relative_rms,
    routed_layer,
    tensor_parallel_rank,
)
from torch import Tensor

from moekit import ParallelConfig
from moekit.checkpoint import load_experts
from moekit.testing.distributed import RankPool

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")


class Saved:
    """A model on disk, and the results of transformers' own forward."""

    def __init__(self, hf: hfm.HFModel, directory: Path, dtype: torch.dtype) -> None:
        self.hf = hf
        self.path = hfm.save(hf, directory, dtype)
        self.model = hfm.load(directory)
        self.ids = hfm.token_ids()
        self.logits, self.captures = hfm.forward(hf, self.model, self.ids)

    def routed(self, layer: int) -> Tensor:
        """Return transformers' output of the layer's routed experts only, (T, H)."""
        capture = self.captures[layer]
        return capture.out_TH if capture.shared_TH is None else capture.out_TH - capture.shared_TH


@pytest.fixture(scope="module", params=hfm.MODELS, ids=lambda hf: hf.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param.name), torch.float32)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    made = {world: RankPool(world) for world in (2, 4)}
    yield made
    for pool in made.values():
        pool.close()


def test_one_rank_hidden_states_and_logits(saved: Saved) -> None:
    hf = saved.hf
    for layer in hf.moe_layers:
        x = saved.captures[layer].x_TH
        got = routed_layer(hf.name, str(saved.path), layer, x)
        assert relative_rms(got, saved.routed(layer)) < 1e-5

    def by_moekit(layer: int, x_TH: Tensor) -> Tensor:
        return routed_layer(hf.name, str(saved.path), layer, x_TH)

    logits = hfm.forward_with(hf, saved.model, saved.ids, by_moekit)
    assert relative_rms(logits, saved.logits) < 1e-4


def test_one_rank_bf16(saved: Saved, tmp_path: Path) -> None:
    """Layer by layer, from transformers' inputs: rounding elsewhere may change the experts."""
    half = Saved(saved.hf, tmp_path, torch.bfloat16)
    for layer in half.hf.moe_layers:
        capture = half.captures[layer]
        got = routed_layer(half.hf.name, str(half.path), layer, capture.x_TH)
        same = (
            Router.read(half.hf, half.path, layer)(capture.x_TH).topk_ids.sort(1).values
            == capture.topk_ids_TK.sort(1).values
        ).all(1)
        assert same.float().mean() > 0.9
        assert relative_rms(got[same], half.routed(layer)[same]) < 2e-2


def wrong(hf: hfm.HFModel, part: str, **changes: object) -> hfm.HFModel:
    return replace(hf, **{part: replace(getattr(hf, part), **changes)})


WRONG = {
    "mixtral": [("routing", {"renormalize": False})],
    "qwen3_moe": [("routing", {"renormalize": False})],
    "deepseek_v3": [
        ("routing", {"scoring": "softmax"}),
        ("routing", {"num_groups": 1}),
        ("routing", {"scaling_factor": 1.0}),
        ("names", {"correction_bias": None}),
    ],
    "gpt_oss": [
        ("activation", {"limit": 1e9}),
        ("activation", {"alpha": 1.0}),
        ("names", {"router_bias": None}),
    ],
    "llama4_text": [("routing", {"weight_on_input": False}), ("routing", {"scoring": "softmax"})],
}


def test_each_fact_of_a_model_matters(saved: Saved) -> None:
    """Negative control: with one wrong fact, moekit's numbers are very different."""
    layer = saved.hf.moe_layers[0]
    for part, changes in WRONG[saved.hf.name]:
        model = wrong(saved.hf, part, **changes)
        got = routed_layer(model, str(saved.path), layer, saved.captures[layer].x_TH)
        assert relative_rms(got, saved.routed(layer)) > 0.02, changes


@pytest.mark.parametrize("world", [2, 4])
def test_expert_parallel(saved: Saved, pools: dict[int, RankPool], world: int) -> None:
    """The second rank has no tokens."""
    hf, layer = saved.hf, saved.hf.moe_layers[-1]
    sizes = {2: [38, 0], 4: [11, 0, 26, 1]}[world]
    xs = list(saved.captures[layer].x_TH.split(sizes))
    parts = pools[world].run(expert_parallel_rank, hf.name, str(saved.path), layer, xs, None)
    assert [len(part) for part in parts] == sizes
    assert relative_rms(torch.cat(parts), saved.routed(layer)) < 1e-5


def test_tensor_parallel(saved: Saved, pools: dict[int, RankPool]) -> None:
    hf, layer = saved.hf, saved.hf.moe_layers[0]
    x = saved.captures[layer].x_TH
    for part in pools[2].run(tensor_parallel_rank, hf.name, str(saved.path), layer, x):
        assert relative_rms(part, saved.routed(layer)) < 1e-5


def test_slices_of_a_layer_make_the_layer(saved: Saved) -> None:
    """The slices of EP x TP ranks, joined, are exactly the whole layer's tensors."""
    hf, layer = saved.hf, saved.hf.moe_layers[0]
    whole_problem = problem_of(hf, torch.float32)
    whole = load_experts(saved.path, hf.name, layer, whole_problem).canonical(whole_problem)
    for ep_rank in range(3):
        columns = []
        for tp_rank in range(2):
            parallel = ParallelConfig(
                ep_size=3, ep_rank=ep_rank, tp_size=2, tp_rank=tp_rank, dp_size=1
            )
            problem = problem_of(hf, torch.float32, parallel)
            columns.append(load_experts(saved.path, hf.name, layer, problem).canonical(problem))
        mine = list(problem.local_experts)
        assert torch.equal(torch.cat([c.w2 for c in columns], dim=2), whole.w2[mine])
        gates, ups = zip(*(c.w13.chunk(2, dim=1) for c in columns), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], dim=1), whole.w13[mine])
        if whole.w2_bias is not None:
            summed = torch.stack([c.w2_bias for c in columns]).sum(0)
            assert torch.equal(summed, whole.w2_bias[mine])
