"""Find the experts of a transformers model, and run those outside transformers' experts interface.

Modules of the interface ask their `config` for the implementation. `settle` gives a config to the
modules of `OWN`, which `install` makes ask it as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moekit.errors import Unsupported
from moekit.integrations.forward import experts_forward

NAME = "moekit"
# Ends of the names of modules and classes. Shared experts compute every token.
_ROUTED = re.compile(r"(?<!shared)(?<!shared_)(experts|moe)$", re.IGNORECASE)


def settle(model: Any) -> None:
    """Make every experts module of ``model`` follow the config of the model that it belongs to.

    transformers reaches neither modules with a copy of that config nor modules of `OWN`. Raises
    Unsupported if the config asks for moekit, and an experts module asks no config.
    """
    found = list(experts_in(model, model))
    outside = {
        type(module).__name__: path
        for path, module, owner in found
        if owner.config._experts_implementation == NAME and not _asks(module)
    }
    if outside:
        model.config._experts_implementation = "eager"
    for _, module, owner in found:
        asked = owner.config._experts_implementation
        if hasattr(type(module), "config"):
            module.config = owner.config
        elif _asks(module) and type(module.config) is type(owner.config):
            if NAME in (asked, module.config._experts_implementation):
                module.config._experts_implementation_internal = asked
    if outside:
        reason = (
            f"{type(model).__name__} has experts outside transformers' experts interface "
            f"({', '.join(f'{name} at {path}' for name, path in outside.items())})"
        )
        advice = "leave the argument out, or load a quantized model dequantized"
        raise Unsupported(f"experts_implementation={NAME!r}: {reason}; {advice}", [reason])


def experts_in(module: Any, owner: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the module and the model of each module that computes routed experts.

    A model inside a model of the same config class counts as part of it.
    """
    if hasattr(module, "set_experts_implementation"):
        if type(module.config) is not type(owner.config):
            owner = module
    elif _asks(module):
        yield path, module, owner
        return
    found = [
        each
        for name, child in module.named_children()
        for each in experts_in(child, owner, f"{path}.{name}".lstrip("."))
    ]
    if not found and (_ROUTED.search(path) or _ROUTED.search(type(module).__name__)):
        found = [(path, module, owner)]
    yield from found


def _asks(module: nn.Module) -> bool:
    """Return whether the module's forward asks its config for the implementation."""
    return hasattr(module, "is_concatenated") or hasattr(type(module), "config")


def asks_for_moekit(module: nn.Module) -> bool:
    """Return whether a module of transformers' experts interface runs in moekit."""
    config: Any = getattr(module, "config", None)
    return hasattr(module, "is_concatenated") and config._experts_implementation == NAME


def asking(forward: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs ``ours`` if the module's config names moekit."""

    def chosen(self: Any, *args: Any) -> Any:
        asked = self.config is not None and self.config._experts_implementation == NAME
        return (ours if asked else forward)(self, *args)

    return chosen


# -- models without the interface ------------------------------------------------------------------


def _llama4(self: Any, hidden_states: Tensor) -> Any:
    """Compute the chosen experts; the original block computes all of them for every token."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    topk_weights, ids = scores.topk(self.top_k, dim=1)
    routed = experts_forward(self.experts, x, ids, topk_weights, weight_on_input=True)
    return self.shared_expert(x).add_(routed), logits


def _longcat_flash(self: Any, x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Compute the experts; the ones past `num_routed_experts` return the token."""
    identity = ids >= self.num_routed_experts
    routed = experts_forward(self, x, ids.masked_fill(identity, -1), topk_weights)
    kept = torch.where(identity, topk_weights, 0).sum(1, keepdim=True)
    return routed + (x * kept).to(x.dtype)


def _dbrx(self: Any, hidden_states: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, self.hidden_size)
    return experts_forward(self.mlp, x, ids, topk_weights).view(len(hidden_states), -1, x.shape[1])


# (model, class): the forward that replaces the class's.
OWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("dbrx", "DbrxExperts"): _dbrx,
    ("llama4", "Llama4TextMoe"): _llama4,
    ("longcat_flash", "LongcatFlashExperts"): _longcat_flash,
    ("step3p7", "Step3p7Experts"): experts_forward,
}
