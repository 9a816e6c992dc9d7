"""Every experts module of the installed transformers: right, or refused with a reason.

A new version brings models whose experts may compute something else, which must not be dropped.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers_layer import installed  # noqa: F401 (an autouse fixture)
from torch import nn

from moekit.errors import MoekitError

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install moekit[hf]"
)

EXPERTS, HIDDEN, INNER = 8, 32, 48
# What the models call these sizes.
SIZES = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "moe_latent_size"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "expert_intermediate_size",
         "moe_ffn_hidden_size", "ffn_hidden_size", "expert_ffn_hidden_size", "ffn_dim"), INNER
    ),
}  # fmt: skip


# docs/guide/transformers.md has the reasons.
REFUSED = {"Inkling2Experts", "Inkling2LoopExperts", "MuseSparkExperts"}
# Modules outside the experts interface, with parameters as if they were of it.
OWN = (("longcat_flash", "LongcatFlashExperts"), ("step3p7", "Step3p7Experts"))


def classes() -> Iterator[type[nn.Module]]:
    """Yield the classes that are decorated with the experts interface, and OWN."""
    for model, name in OWN:
        yield getattr(
            importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name
        )
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        decorated = r"@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)"
        names = re.findall(decorated, file.read_text(encoding="utf-8"))
        if names:
            name = f"transformers.models.{file.parent.name}.{file.stem}"
            yield from (getattr(importlib.import_module(name), each) for each in names)


def made(cls: type[nn.Module]) -> nn.Module:
    """Return a small module with random parameters, by the first config that fits it."""
    signature = inspect.signature(cls).parameters
    configs = [
        value for name, value in vars(inspect.getmodule(cls)).items()
        if inspect.isclass(value) and name.endswith("Config")
    ]  # fmt: skip
    errors = []
    for kind in sorted(configs, key=lambda kind: kind.__name__ not in str(signature.get("config"))):
        config = kind()
        for name, size in SIZES.items():
            if isinstance(getattr(config, name, []), int | None):
                setattr(config, name, size)
        config._experts_implementation = "eager"
        given = {name: SIZES[name] for name in signature if name in SIZES}
        if "layer_idx" in signature:
            given["layer_idx"] = 0
        try:
            module = cls(config, **given)
        except (AttributeError, TypeError) as error:
            errors.append(f"{kind.__name__}: {error}")
            continue
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.normal_(std=0.3)
        module.config = config
        return module.float().eval().requires_grad_(False)
    raise AssertionError(f"{cls.__name__} takes no config of its module: {errors}")


def verdict(module: Any) -> str:
    """Return "right", the reason of a refusal, or the error."""
    ids = torch.rand(9, getattr(module, "total_experts", EXPERTS)).topk(2).indices
    hidden = getattr(module, "hidden_dim", HIDDEN)  # where no config has a name of SIZES for it
    args = 2 * torch.randn(9, hidden), ids, torch.rand(9, 2)
    want = module(*args)
    module.config._experts_implementation = "moekit"
    try:
        got = module(*args)
    except MoekitError as error:
        return str(error)
    error = float((got - want).norm() / want.norm())
    return "right" if error < 1e-5 else f"WRONG: relative RMS {error:.1e}"


def test_every_module_is_right_or_refused() -> None:
    found = {cls.__name__: verdict(made(cls)) for cls in classes()}
    wrong = {name: said for name, said in found.items() if said.startswith("WRONG")}
    assert not wrong
    refused = {name: said for name, said in found.items() if said != "right"}
    assert all(said.startswith(f"moekit cannot run {name}: ") for name, said in refused.items())
    assert len(found) > 20 and set(refused) <= REFUSED
