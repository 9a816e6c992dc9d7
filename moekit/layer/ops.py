"""`FusedMoE` as one custom operator, which is what `torch.compile` sees of a layer.

The operator takes the layer's name and looks the layer up. Inside it everything runs as in eager
mode; outside, the compiler knows only that the output looks like x. Layers whose calls cannot be
captured in a CUDA graph use a second operator with the tag that says so.
"""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from moekit.errors import MoekitError, NameClash
from moekit.layer.rows import LayerInputs
from moekit.runtime.operators import Operators


class NamedLayer(Protocol):
    """The part of `FusedMoE` that the operator calls."""

    def run(self, inputs: LayerInputs) -> Tensor: ...


_SCHEMA = (
    "(Tensor x, Tensor? router_logits, Tensor? topk_weights, Tensor? topk_ids, "
    "Tensor? is_padding, SymInt? max_tokens, Tensor? token_ids, str layer) -> Tensor"
)

_layers: WeakValueDictionary[str, NamedLayer] = WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()
_MAKER = "_moekit_maker"  # attribute of a layer: the thread that constructs it


def register(layer: NamedLayer, name: str | None) -> str:
    """Register ``layer`` under ``name`` while it lives; None picks an unused name.

    Returns:
        The name.

    Raises:
        NameClash: Another living layer has the name.
    """
    if name is None:
        name = next(n for i in _numbers if (n := f"fused_moe.{i}") not in _layers)
    if _taken(name):
        gc.collect()  # reference cycles may keep the layers of a model that was dropped
    with _lock:
        if _taken(name):
            raise NameClash(
                f"a layer named {name!r} exists already: give each FusedMoE its own prefix, or none"
            )
        vars(layer)[_MAKER] = threading.get_ident()
        _layers[name] = layer
    return name


def _taken(name: str) -> bool:
    """Return whether a layer uses ``name``.

    A layer whose constructor raised does not count, although a traceback may keep it alive. One
    that another thread has not finished does.
    """
    found = _layers.get(name)
    if found is None or hasattr(found, "packed"):
        return found is not None
    return bool(vars(found)[_MAKER] != threading.get_ident())


def unregister(layer: NamedLayer, name: str) -> None:
    """Free the name if ``layer`` still has it; idempotent."""
    with _lock:
        if _layers.get(name) is layer:
            del _layers[name]


def _run(*arguments: Any) -> Tensor:
    """Run the layer that the last argument names; the others are those of `LayerInputs`."""
    *inputs, layer = arguments
    found = _layers.get(layer)
    if found is None:
        raise MoekitError(
            f"no layer named {layer!r} is alive: compiled code outlived the FusedMoE it was "
            "compiled for; compile again"
        )
    return found.run(LayerInputs(*inputs))


def tracks(inputs: LayerInputs) -> bool:
    """Return whether a gradient is asked for, which the operator refuses.

    The operator takes tensors and integers only, so arguments of other types do not count; the
    layer itself reports them.
    """
    max_tokens = inputs.max_tokens
    tensors = [value for name, value in inputs._asdict().items() if name != "max_tokens"]
    if not any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return False
    typed = all(t is None or isinstance(t, Tensor) for t in tensors)
    return typed and (max_tokens is None or isinstance(max_tokens, int))


operators = Operators.of("fused_moe", _run, "call FusedMoE under torch.no_grad()", _SCHEMA)
