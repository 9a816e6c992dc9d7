"""The function that transformers calls for the experts of a layer, also under torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from moekit.errors import MoekitError, Unsupported
from moekit.integrations.packed_layer import ATTRIBUTE, Form, Layer
from moekit.integrations.peft import operands_of
from moekit.runtime.operators import Operators

# Whether dynamo evaluates functions of modules while it compiles; torch 2.11 does not.
BINDS_MODULES = torch.__version__ >= (2, 13)  # type: ignore[operator]  # a TorchVersion
RUN_FIRST = "before torch 2.13, run the model once before torch.compile sees it"


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool = False,
) -> Tensor:
    """Compute the experts: hidden_states (T, H), ids and weights (T, K) -> (T, H).

    Where a gradient is required, torch.compile breaks its graph here.

    Raises:
        Unsupported: moekit cannot run the module, or it is compiled before it ran once.
        WeightsError: The module has no weights.
    """
    needs_grad: list[Tensor] = []
    if torch.is_grad_enabled():
        inputs = (hidden_states, top_k_weights, *self.parameters(recurse=False))
        needs_grad = [t for t in inputs if t.requires_grad]
    computed = hasattr(self, "parametrizations") or bool(operands_of(self))
    if computed or (needs_grad and not torch.compiler.is_exporting()):
        made: Tensor = _differentiated(
            self, hidden_states, top_k_index, top_k_weights, weight_on_input
        )
        return made
    if torch.compiler.is_compiling():
        known: nn.Module | int = self
        if torch.compiler.is_compiling() and not BINDS_MODULES:
            if getattr(self, ATTRIBUTE, None) is None:
                raise Unsupported(f"this layer has not run yet: {RUN_FIRST}", [RUN_FIRST])
            known = getattr(self, ATTRIBUTE).number
        _prepare(known, hidden_states.dtype, int(top_k_index.shape[1]), weight_on_input)
        # Read from the module, so that a guard binds compiled code to it.
        layer = getattr(self, ATTRIBUTE)
        operator = _operators.plain if layer.graph_safe else _operators.without_graphs
        return operator(
            hidden_states, top_k_index, top_k_weights, needs_grad, layer.number, weight_on_input
        )
    layer = Layer.of(self)
    return layer.run(hidden_states, top_k_index, top_k_weights, weight_on_input, replays=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _differentiated(module: nn.Module, *args: Any) -> Tensor:
    if not operands_of(module):
        return Layer.of(module).differentiate(*args)
    return Layer.of(module).adapt(*args)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare(known: nn.Module | int, dtype: torch.dtype, top_k: int, on_input: bool) -> None:
    """Pack a module, or the one of a layer's number, before compiled code captures a graph."""
    layer = Layer.numbered[known] if isinstance(known, int) else Layer.of(known)
    with suppress(MoekitError):  # the call raises it
        layer.prepare(Form(dtype, top_k, on_input))


def _run(
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    needs_grad: Sequence[Tensor],
    number: int,
    on_input: bool,
) -> Tensor:
    """Run a layer as one operator, for torch.compile and torch.export.

    number: the Layer's. needs_grad: tensors to which an exported program has no gradients.
    """
    return Layer.numbered[number].run(x, ids, topk_weights, on_input)


_operators = Operators.of(
    "transformers_experts",
    _run,
    "train the model itself, and export it under torch.no_grad()",
)
