"""Model files in vLLM's style compute what transformers' models do, from the same checkpoints."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
import vllm_style_models as blocks
from hf_models import DEEPSEEK_V3, GPT_OSS, MIXTRAL, HFModel
from moekit_vllm import FusedMoE
from torch import Tensor, nn

from moekit import ParallelConfig

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

_numbers = itertools.count()
PROJECTIONS = ("gate_proj", "down_proj", "up_proj")
MODELS: dict[str, tuple[HFModel, type[nn.Module], tuple[str, str, str]]] = {
    "mixtral": (MIXTRAL, blocks.MixtralMoE, ("w1", "w2", "w3")),
    "deepseek_v3": (DEEPSEEK_V3, blocks.DeepseekV2MoE, PROJECTIONS),
    "gpt_oss": (GPT_OSS, blocks.GptOssMLP, PROJECTIONS),
}
RANKS = {
    "whole": [ParallelConfig()],
    "tp2": [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)],
    "ep3": [ParallelConfig(ep_size=3, ep_rank=rank, dp_size=1) for rank in range(3)],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(name: str) -> tuple[Path, Any]:
        path = hfm.save(MODELS[name][0], tmp_path_factory.mktemp(name), torch.float32)
        return path, hfm.load(path.parent)

    return make


def tensors(path: Path) -> list[tuple[str, Tensor]]:
    with safetensors.safe_open(path, "pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


def build(name: str, config: Any, parallel: ParallelConfig, redundant: int = 0) -> blocks.MoEModel:
    hf, block, names = MODELS[name]
    how = dict(
        device="cpu", params_dtype=torch.float32, parallel=parallel,
        num_redundant_experts=redundant,
    )  # fmt: skip
    paths = [hf.stored.format(layer=layer) for layer in hf.moe_layers]
    number = next(_numbers)  # the prefix of each living layer must be another one
    make = lambda path: block(config, f"{number}.{path}", **how)  # noqa: E731
    return blocks.MoEModel(paths, make, names, redundant)


def load(model: blocks.MoEModel, weights: list[tuple[str, Tensor]]) -> set[str]:
    loaded = model.load_weights(weights)
    for module in model.modules():
        if isinstance(module, FusedMoE):
            module.process_weights_after_loading()
    return loaded


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_as_transformers(name: str, ranks: str, saved) -> None:
    (path, model), (hf, block, _) = saved(name), MODELS[name]
    ids = hfm.token_ids()
    want, captures = hfm.forward(hf, model, ids)
    redundant = 3 if ranks == "ep3" else 0
    mine = [build(name, model.config, parallel, redundant) for parallel in RANKS[ranks]]
    for rank in mine:
        load(rank, tensors(path))

    def routed(layer: int, x: Tensor) -> Tensor:
        of = [rank.get_submodule(hf.stored.format(layer=layer)) for rank in mine]
        return sum(b.routed(x) if block is blocks.DeepseekV2MoE else b(x) for b in of)

    with pytest.MonkeyPatch.context() as patch:  # the ranks' sums, in this process
        patch.setattr(FusedMoE, "maybe_all_reduce_tensor_model_parallel", lambda self, x: x)
        got = hfm.forward_with(hf, model, ids, routed)
    assert (got - want).norm() < 1e-5 * want.norm()
    without = hfm.forward_with(hf, model, ids, lambda layer, x: torch.zeros_like(x))
    assert (without - want).norm() > 0.05 * want.norm()  # the routed experts matter
    if ranks == "whole" and name == "deepseek_v3":  # has shared experts
        for layer, seen in captures.items():
            whole = mine[0].get_submodule(hf.stored.format(layer=layer))(seen.x_TH)
            assert (whole - seen.out_TH).norm() < 1e-5 * seen.out_TH.norm()


def test_loaded_parameters_are_those_of_the_model(saved) -> None:
    path, model = saved("mixtral")
    mine = build("mixtral", model.config, ParallelConfig())
    assert load(mine, tensors(path)) == {name for name, _ in mine.named_parameters()}
