"""`FusedMoE` as one custom operator, which is what `torch.compile` sees of a layer.

The operator takes the layer's name and looks the layer up. Inside it everything runs as in eager
mode; outside, the compiler knows only that the output looks like x. Layers whose calls cannot be
captured in a CUDA graph use a second operator with the tag that says so.
"""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from moekit.errors import MoekitError, NameClash
from moekit.layer.flow import LayerInputs
from moekit.runtime.operators import Operators

_SCHEMA = (
    "(Tensor x, Tensor? router_logits, Tensor? topk_weights, Tensor? topk_ids, "
    "Tensor? is_padding, SymInt? max_tokens, Tensor? token_ids, str layer) -> Tensor"
)

_layers: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of `FusedMoE`
_numbers = itertools.count()
_lock = threading.RLock()


def free_name(name: str | None) -> str:
    """Return ``name``, or an unused name for None. Raises NameClash if a living layer has it."""
    if name is None:
        return next(n for i in _numbers if (n := f"fused_moe.{i}") not in _layers)
    if name in _layers:
        gc.collect()  # reference cycles may keep the layers of a model that was dropped
    if name in _layers:
        raise NameClash(
            f"a layer named {name!r} exists already: give each FusedMoE its own prefix, or none"
        )
    return name


def register(layer: Any, name: str) -> None:
    """Register a complete layer under ``name`` while it lives; another thread may have taken it."""
    with _lock:
        _layers[free_name(name)] = layer


def unregister(layer: Any, name: str) -> None:
    """Free the name if ``layer`` still has it; idempotent."""
    with _lock:
        if _layers.get(name) is layer:
            del _layers[name]


def _run(*arguments: Any) -> Tensor:
    """Run the layer that the last argument names; the others are the fields of `LayerInputs`."""
    *inputs, layer = arguments
    found = _layers.get(layer)
    if found is None:
        raise MoekitError(
            f"no layer named {layer!r} is alive: compiled code outlived the FusedMoE it was "
            "compiled for; compile again"
        )
    out: Tensor = found.run(LayerInputs(*inputs))
    return out


def tracks(inputs: LayerInputs) -> bool:
    """Return whether a gradient is asked for, which the operator refuses.

    The operator takes only tensors and an integer; the layer reports arguments of other types.
    """
    *tensors, most = (*inputs._replace(max_tokens=None), inputs.max_tokens)
    tracked = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    typed = all(t is None or isinstance(t, Tensor) for t in tensors)
    return tracked and typed and (most is None or isinstance(most, int))


operators = Operators.of("fused_moe", _run, "pass trainable=True, or run under no_grad()", _SCHEMA)
