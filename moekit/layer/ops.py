"""`FusedMoE` as one custom operator, which is what `torch.compile` sees of a layer.

The operator takes the layer's number and looks the layer up. Inside it everything runs as in eager
mode; outside, the compiler knows only that the output looks like x. Layers whose calls cannot be
captured in a CUDA graph use a second operator with the tag that says so.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from moekit.errors import MoekitError
from moekit.layer.flow import LayerInputs
from moekit.runtime.operators import Operators

_SCHEMA = (
    "(Tensor x, Tensor? router_logits, Tensor? topk_weights, Tensor? topk_ids, "
    "Tensor? is_padding, SymInt? max_tokens, Tensor? token_ids, Tensor? adapter_ids, int layer) "
    "-> Tensor"
)

_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of `FusedMoE`
_numbers = itertools.count()


def register(layer: Any) -> int:
    """Return the number under which the operators find a layer while it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def _run(*arguments: Any) -> Tensor:
    """Run the layer that the last argument numbers; the others are the fields of `LayerInputs`."""
    *inputs, number = arguments
    found = _layers.get(number)
    if found is None:
        raise MoekitError(
            "compiled code outlived the FusedMoE that it was compiled for: compile again"
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
