"""PEFT's LoRA on the parameters of experts (`target_parameters`) as an operand of the experts.

PEFT adds B A to all experts' weights in each forward, by a parametrization of the parameter. With
this patch its context records A and B in the module, and `Layer.adapt` passes them to the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moekit.contract import Adapters
from moekit.lora.read import as_packed
from moekit.problem import AdapterSlots, MoEProblem
from moekit.problem.weights import gate_before_up

OPERANDS = "_moekit_adapters"  # of an experts module: its `Operand`s by the parameter's name
_MATRICES = {"gate_up_proj": "w13", "up_proj": "w13", "down_proj": "w2"}


class Operand(NamedTuple):
    """The active adapters of a parameter: PEFT's wrapper, and their names."""

    wrapper: Any
    names: list[str]

    @property
    def rank(self) -> int:
        return sum(int(self.wrapper.r[name]) for name in self.names)

    @property
    def parameters(self) -> list[Tensor]:
        held = (self.wrapper.lora_A, self.wrapper.lora_B)
        return [side[name].weight for name in self.names for side in held]

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A (E, r, in) and scaled B (E, out, r); several adapters are joined along r."""
        wrapper, found = self.wrapper, []
        stored = bool(getattr(wrapper.get_base_layer(), "is_transposed", False))
        turned = getattr(wrapper, "_did_swap_in_out_features", False) == stored
        for name in self.names:
            sides = (wrapper.lora_A[name].weight, wrapper.lora_B[name].weight)
            a, b = as_packed(*sides, wrapper.num_experts, turned)
            found.append((a.to(dtype), (b * wrapper.scaling[name]).to(dtype)))
        return torch.cat([a for a, _ in found], dim=1), torch.cat([b for _, b in found], dim=2)


def operands_of(module: nn.Module) -> Mapping[str, Operand]:
    """Return the module's adapters in this forward, by ``w13`` and ``w2``."""
    return vars(module).get(OPERANDS) or {}


def slots_of(operands: Mapping[str, Operand]) -> AdapterSlots:
    return AdapterSlots(1, max(operand.rank for operand in operands.values()))


def stack_of(
    operands: Mapping[str, Operand], problem: MoEProblem, interleaved: bool, device: torch.device
) -> Adapters:
    """Return the adapters as a stack of one slot, through which gradients flow."""
    made: dict[str, Tensor] = {}
    assert problem.adapters is not None
    for which, operand in operands.items():
        a, b = (t[: problem.num_experts] for t in operand.matrices(problem.dtype))
        if which == "w13" and interleaved:
            b = gate_before_up(b)
        if missing := problem.adapters.rank - a.shape[1]:
            a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        a = a[:, None] if which == "w13" else a
        made |= {f"{which}_a": a[None].contiguous(), f"{which}_b": b[None].contiguous()}
    return Adapters(torch.ones(1, dtype=torch.float32, device=device), **made)


def patch(
    set_: Callable[[Any, str, Any], None],
    ours: Callable[[nn.Module], bool],
    forget: Callable[[nn.Module], None],
) -> None:
    """Make PEFT's wrapper record the adapters in modules for which ``ours`` returns true.

    Args:
        set_: sets an attribute, and remembers how to undo it.
        forget: drops a module's packed weights, which merging invalidates.
    """
    from peft.tuners.lora.layer import ParamWrapper

    product = ParamWrapper._activate_lora

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        module, which = self.get_base_layer(), _MATRICES.get(self.parameter_name)
        names = [name for name in active_adapters if name in self.lora_A]
        if not names or which is None or not ours(module):
            with product(self, active_adapters):
                yield
            return
        operands = vars(module).setdefault(OPERANDS, {})
        operands[which] = Operand(self, names)
        try:
            yield
        finally:
            operands.pop(which, None)

    def forgetting(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(self: Any, *args: Any, **given: Any) -> Any:
            result = change(self, *args, **given)
            forget(self.get_base_layer())
            return result

        return changed

    set_(ParamWrapper, "_activate_lora", activate)
    for name in ("merge", "unmerge"):
        set_(ParamWrapper, name, forgetting(getattr(ParamWrapper, name)))
