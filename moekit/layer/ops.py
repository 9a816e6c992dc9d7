"""`FusedMoE` as one operator: what `torch.compile` sees of a layer, and how it finds it again.

A layer travels by its name. Inside the operator everything is as in eager mode; outside, the
compiler knows only that the output looks like x. Layers whose calls cannot be captured in a CUDA
graph go by an operator of their own, which says so.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moekit.errors import MoekitError, NameClash, Unsupported

if TYPE_CHECKING:
    from moekit.layer.layer import FusedMoE

_SCHEMA = (
    "(Tensor x, Tensor? router_logits, Tensor? topk_weights, Tensor? topk_ids, "
    "Tensor? is_padding, SymInt? max_tokens, str layer) -> Tensor"
)

_layers: WeakValueDictionary[str, FusedMoE] = WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()
_MAKER = "_moekit_maker"  # the attribute of a layer that says which thread constructs it


def register(layer: FusedMoE, name: str | None) -> str:
    """Makes ``layer`` known as ``name`` (None: a free one) while it lives; returns the name.

    Raises NameClash when another living layer has it.
    """
    if name is None:
        name = next(n for i in _numbers if (n := f"fused_moe.{i}") not in _layers)
    if _taken(name):
        gc.collect()  # a model that was dropped may still hang together in cycles
    with _lock:
        if _taken(name):
            raise NameClash(
                f"a layer named {name!r} exists already: give each FusedMoE a prefix of its own, "
                "or none"
            )
        vars(layer)[_MAKER] = threading.get_ident()
        _layers[name] = layer
    return name


def _taken(name: str) -> bool:
    """By more than the remains of a layer whose constructor raised, which a traceback keeps.

    What another thread has not finished is a layer, as far as one can tell.
    """
    found = _layers.get(name)
    if found is None or hasattr(found, "packed"):
        return found is not None
    return bool(vars(found)[_MAKER] != threading.get_ident())


def unregister(name: str) -> None:
    """Frees the name; idempotent."""
    _layers.pop(name, None)


def _run(
    x: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    is_padding: Tensor | None,
    max_tokens: int | None,
    layer: str,
) -> Tensor:
    found = _layers.get(layer)
    if found is None:
        raise MoekitError(
            f"no layer named {layer!r} is alive: compiled code outlived the FusedMoE it was "
            "compiled for; compile again"
        )
    return found.run(x, router_logits, topk_weights, topk_ids, is_padding, max_tokens)


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _no_backward(ctx: Any, grad: Tensor) -> Any:
    reason = "moekit has no backward pass"
    raise Unsupported(f"{reason}: call FusedMoE under torch.no_grad()", [reason])


def _operator(name: str, tags: tuple[torch.Tag, ...] = ()) -> Callable[..., Tensor]:
    operator = torch.library.custom_op(
        f"moekit::{name}", _run, mutates_args=(), schema=_SCHEMA, tags=tags
    )
    operator.register_fake(_fake)
    operator.register_autograd(_no_backward)
    return operator


fused_moe = _operator("fused_moe")
fused_moe_without_graphs = _operator("fused_moe_without_graphs", (torch.Tag.cudagraph_unsafe,))
