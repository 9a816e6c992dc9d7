"""Every model of the installed transformers that has experts: moekit runs them, or refuses.

A new version brings models whose experts moekit would leave to transformers without a word.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers_layer import installed  # noqa: F401 (an autouse fixture)

from moekit.errors import Unsupported

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install moekit[hf]"
)

from transformers.initialization import no_init_weights  # noqa: E402

# Models whose code speaks of experts but has none.
WITHOUT_EXPERTS = {
    "bamba", "cosmos3_omni", "decision_transformer", "evolla", "pi0", "vitpose",
}  # fmt: skip
# What moekit's message names. docs/guide/transformers.md has the reasons.
REFUSED = {
    "doge": "DogeCDMoE",
    "jetmoe": "JetMoeParallelExperts",
    "nllb_moe": "NllbMoeExperts",
    "switch_transformers": "SwitchTransformersExperts",
    "vitpose_backbone": "VitPoseNaiveMoe",
}
# What else moekit runs than the modules of the experts interface.
OWN = {"DbrxExperts", "Llama4TextMoe", "LongcatFlashExperts", "Step3p7Experts"}
# What a config needs for a model with experts.
INDEXER = dict(
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=16,
    indexer_compress_ratio=2,
)  # fmt: skip
ROUTED = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=48)
CONFIGS: dict[str, dict[str, Any]] = {
    "dbrx": dict(attn_config=dict(rope_theta=1e4)),
    "deepseek_ocr2": dict(
        text_config=dict(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"])
    ),
    "diffusion_gemma": dict(text_config=ROUTED),
    "doge": dict(is_moe=True),
    "dots1": dict(n_routed_experts=8, n_shared_experts=1),
    "gemma4": dict(text_config=ROUTED),
    "hunyuan_v1_moe": dict(head_dim=128),
    "lfm2_moe": dict(layer_types=["conv"] * 32),
    "qwen3_omni_moe": dict(
        talker_config=dict(
            spatial_merge_size=2, text_config=dict(shared_expert_intermediate_size=48)
        )
    ),
    "qwen4_exp": dict(text_config=INDEXER),
    "vitpose_backbone": dict(num_experts=4, part_features=64),
}


@cache
def modeling() -> dict[str, str]:
    """Return the modules whose code speaks of experts, by model."""
    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    return {
        file.parent.name: f"transformers.models.{file.parent.name}.{file.stem}"
        for file in files
        if "expert" in file.read_text(encoding="utf-8").lower()
    }


def whole_model(name: str, how: str = "eager", layers: int = 6) -> Any:
    """Return a model without data, of the last class of its module that takes its own config."""
    if name not in modeling():
        pytest.skip(f"this transformers has no {name}")
    module = modeling()[name]
    kinds = [
        kind
        for kind in vars(importlib.import_module(module)).values()
        if inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
        if kind.__module__ == module and kind.config_class and "PreTrained" not in kind.__name__
        if not kind.__name__.startswith("Ernie4_5_VL_Moe")  # old names
    ]
    config = kinds[-1].config_class(**CONFIGS.get(name, {}))
    for part in (config, *(getattr(config, each) for each in config.sub_configs)):
        shorten(part, layers)
    config._experts_implementation = how
    with torch.device("meta"), no_init_weights():
        return kinds[-1](config)


def shorten(config: Any, most: int) -> None:
    """Leave ``most`` layers, also in lists that have an entry for each layer."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= most:
        return
    config.num_hidden_layers = most
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:most])


def implementations(model: Any) -> set[str | None]:
    """Return what the experts of ``model`` would run; None for a module that asks no config."""
    asks = {
        path: module.config._experts_implementation
        for path, module in model.named_modules()
        if hasattr(module, "is_concatenated") or type(module).__name__ in OWN
    }
    others = {
        path
        for path, _ in model.named_modules()
        if path.endswith(".experts") and not any(f"{path}.".startswith(f"{p}.") for p in asks)
    }
    return {*asks.values(), *({None} if others else set())}


def verdict(name: str) -> str:
    model = whole_model(name)
    try:
        model.set_experts_implementation("moekit")
    except Unsupported as error:
        assert model.config._experts_implementation == "eager"
        return str(error)
    found = implementations(model)
    model.set_experts_implementation("eager")
    assert implementations(model) <= {"eager"}
    return {"set()": "no experts", "{'moekit'}": "runs"}.get(str(found), f"{found}")


def test_every_model_runs_or_is_refused() -> None:
    found = {name: verdict(name) for name in modeling()}
    for name, refused in REFUSED.items():
        said = found.pop(name)
        assert "outside transformers' experts interface" in said and f"({refused} at " in said
    expected = {name: "no experts" if name in WITHOUT_EXPERTS else "runs" for name in found}
    assert found == expected
    assert set(expected) >= WITHOUT_EXPERTS and len(found) > 50


@pytest.mark.parametrize("name", ["dbrx", "dots3_note", "llama4", "longcat_flash", "step3p7"])
def test_a_config_that_names_moekit(name: str) -> None:
    model = whole_model(name, "moekit")
    assert implementations(model) == {"moekit"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_names_moekit_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{REFUSED[name]} at .*leave the argument out"):
        whole_model(name, "moekit")


def test_parts_of_a_model() -> None:
    model = whole_model("dots3_note", layers=100)  # whose last ones have experts of images
    model.set_experts_implementation({"vision_config": "moekit"})
    assert implementations(model) == {"eager", "moekit"}
    assert implementations(model.model.vision_tower) == {"moekit"}
    model.set_experts_implementation({"vision_config": "eager", "text_config": "moekit"})
    assert implementations(model.model.vision_tower) == {"eager"}
    assert implementations(model.model.language_model) == {"moekit"}
