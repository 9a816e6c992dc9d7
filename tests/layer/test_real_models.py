"""Real architectures with random weights: moekit from the file against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
from torch import Tensor

from moekit import Activation, FusedMoE, ParallelConfig
from moekit.checkpoint import load_experts, problem_from_config

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

LLAMA4 = dict(scoring_func="sigmoid", renormalize=False)


class Saved:
    """A model on disk, and the results of transformers' own forward."""

    def __init__(self, hf: hfm.HFModel, directory: Path) -> None:
        self.hf, self.path = hf, hfm.save(hf, directory, torch.float32)
        self.model = hfm.load(directory)
        self.logits, self.captures = hfm.forward(hf, self.model, hfm.token_ids())

    def theirs(self, layer: int) -> Tensor:
        """Return transformers' output of the layer's routed experts only, (T, H)."""
        capture = self.captures[layer]
        return capture.out_TH if capture.shared_TH is None else capture.out_TH - capture.shared_TH

    @torch.no_grad()
    def ours(self, layer: int, x_TH: Tensor, **wrong: Any) -> Tensor:
        """Return moekit's. Its routing comes from the config, but Llama 4's, which is stated."""
        block = self.model.get_submodule(self.hf.block.format(layer=layer))
        router: Any = block.get_submodule(self.hf.router)
        logits = torch.nn.functional.linear(x_TH, router.weight, getattr(router, "bias", None))
        stated = LLAMA4 if self.hf.name == "llama4_text" else {}
        made = FusedMoE.from_checkpoint(self.path, layer, device="cpu", **{**stated, **wrong})
        return made(x_TH, logits)


@pytest.fixture(scope="module", params=hfm.MODELS, ids=lambda hf: hf.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param.name))


def relative_rms(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_hidden_states_and_logits(saved: Saved) -> None:
    for layer in saved.hf.moe_layers:
        x = saved.captures[layer].x_TH
        assert relative_rms(saved.ours(layer, x), saved.theirs(layer)) < 1e-5
    logits = hfm.forward_with(saved.hf, saved.model, hfm.token_ids(), saved.ours)
    assert relative_rms(logits, saved.logits) < 1e-4


WRONG: dict[str, list[dict[str, Any]]] = {
    "mixtral": [dict(renormalize=False)],
    "qwen3_moe": [dict(renormalize=False)],
    "deepseek_v3": [
        dict(scoring_func="softmax", e_score_correction_bias=None),
        dict(num_expert_group=None, topk_group=None),
        dict(routed_scaling_factor=1.0),
        dict(e_score_correction_bias=None),
    ],
    "gpt_oss": [
        dict(activation=Activation("swigluoai", alpha=1.702, limit=1e6)),
        dict(activation=Activation("swigluoai", alpha=1.0, limit=7.0)),
        dict(renormalize=False),
    ],
    "llama4_text": [dict(apply_router_weight_on_input=False), dict(scoring_func="softmax")],
}


def test_each_fact_of_a_model_matters(saved: Saved) -> None:
    """Negative control: with one wrong fact, moekit's numbers are very different."""
    layer = saved.hf.moe_layers[0]
    for wrong in WRONG[saved.hf.name]:
        got = saved.ours(layer, saved.captures[layer].x_TH, **wrong)
        assert relative_rms(got, saved.theirs(layer)) > 0.02, wrong


def test_slices_of_a_layer_make_the_layer(saved: Saved) -> None:
    """The slices of EP x TP ranks, joined, are exactly the whole layer's tensors."""
    layer = saved.hf.moe_layers[0]

    def load(**parallel: int) -> Any:
        ranks = ParallelConfig(**parallel, dp_size=1)
        problem = problem_from_config(saved.path, layer=layer, parallel=ranks, device="cpu")
        weights = load_experts(saved.path, None, layer, problem)
        return weights.canonical(problem), list(problem.local_experts)

    whole, _ = load()
    for rank in range(3):
        parts = [load(ep_size=3, ep_rank=rank, tp_size=2, tp_rank=tp) for tp in range(2)]
        columns, mine = [part for part, _ in parts], parts[0][1]
        assert torch.equal(torch.cat([c.w2 for c in columns], dim=2), whole.w2[mine])
        gates, ups = zip(*(c.w13.chunk(2, dim=1) for c in columns), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], dim=1), whole.w13[mine])
        if whole.w2_bias is not None:
            summed = torch.stack([c.w2_bias for c in columns]).sum(0)
            assert torch.equal(summed, whole.w2_bias[mine])
