"""A differentiated call as operators, for selective checkpoints and torch.compile.

    moe_layer       the call as torch.compile traces it: the autograd function `Call`
    moe_forward     its forward, in eager mode too: the output and a key, int64 (1,) on the CPU
    moe_backward    its backward in compiled code, which finds by the key what the forward saved

A call's saved tensors live as long as the key's storage, so code that keeps the outputs of
`moe_forward` keeps them. In eager mode autograd keeps the saved tensors, where its hooks see them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit.contract import Routing
from moekit.errors import MoekitError
from moekit.kernel import ModularKernel
from moekit.runtime.device import on_device

_kernels: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of `TrainableKernel`
_numbers = itertools.count()


def register(kernel: Any) -> Tensor:
    """Return the number of a kernel, as a tensor.

    A tensor is not a constant of compiled code, so compiled layers of one model share their code.
    """
    _kernels[number := next(_numbers)] = kernel
    return torch.tensor(number, device="cpu")


class Saved(bytearray):
    """The saved state of a call. Its bytes are the storage of the call's key.

    call: the kernel, the dispatcher's handle, and max_tokens. tensors: x, topk_ids and topk_weights
    as they arrived, then the tensors that the experts saved. None stands for an argument of the
    call: autograd keeps it, and compiled code may overwrite it later.
    """

    by_address: WeakValueDictionary[int, Saved] = WeakValueDictionary()

    def __init__(self, call: tuple[Any, Any, int | None], tensors: list[Any]) -> None:
        super().__init__(8)
        self.call, self.tensors = call, tensors

    def key(self) -> Tensor:
        made = torch.frombuffer(self, dtype=torch.int64)
        self.by_address[made.data_ptr()] = self
        return made

    @classmethod
    def of(cls, key: Tensor) -> Saved:
        found = cls.by_address.get(key.data_ptr())
        if found is None:
            raise MoekitError(
                "the tensors that this call saved for its backward are freed, because its key was "
                "copied: let hooks on saved tensors leave int64 tensors on the CPU as they are"
            )
        return found


def _forward(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: Sequence[Tensor], number: Tensor,
    layout: str, max_tokens: int | None, saves: bool, compiled: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel with a number.

    layout: the weights' names, see `TrainableKernel._packed`.
    compiled: the caller may overwrite its tensors before the backward.
    """
    kernel, arguments = _kernels[int(number)], (x, topk_ids, topk_weights)
    with on_device(x):
        packed = kernel._packed(weights, layout)
        if compiled and kernel.dispatcher.spec.moves_tokens:  # the handle may keep them
            x, topk_ids, topk_weights = (t.clone() for t in arguments)
        adapter_ids = weights[-1] if layout.endswith("adapter_ids") else None
        if compiled and adapter_ids is not None:  # the call saves them
            adapter_ids = adapter_ids.clone()
        routing = Routing(topk_weights, topk_ids, max_tokens, adapter_ids)
        if not saves:
            out = ModularKernel.__call__(kernel, x, packed, routing)
            return out, torch.zeros(1, dtype=torch.int64)
        out, tokens, saved = kernel._forward(x, packed, routing)
    arrived = zip((tokens.x, tokens.topk_ids, tokens.topk_weights), arguments, strict=True)
    kept = [None if _same(found, given) else found for found, given in arrived]
    return out, Saved((kernel, tokens.handle, max_tokens), [*kept, *saved]).key()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and a.data_ptr() == b.data_ptr())


def _backward(
    grad: Tensor, key: Tensor, inputs: Sequence[Tensor], layout: str, asked: Sequence[int]
) -> list[Any]:
    """Return the gradients that are asked for. inputs: x, topk_ids, topk_weights and weights."""
    saved = Saved.of(key)
    kept = [inputs[i] if t is None else t for i, t in enumerate(saved.tensors)]
    kernel, *call = saved.call
    return list(kernel._backward(grad, kept, inputs[3:], layout, *call, asked, None))


class Call(torch.autograd.Function):
    """A call of a kernel. Autograd keeps the tensors, and so notices if one changes in between.

    number, layout, max_tokens, compiled: see `_forward`. buffers: see `TrainableKernel._backward`.
    tensors: x, topk_ids, topk_weights, and the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, number: Tensor, layout: str, max_tokens: int | None, compiled: bool,
        buffers: Mapping[str, Tensor] | None, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        arguments, weights = tensors[:3], tensors[3:]
        out: Tensor
        out, key = _FORWARD(*arguments, weights, number, layout, max_tokens, True, compiled)
        ctx.call, ctx.layout, ctx.buffers, kept = None, layout, buffers, [key, *arguments]
        if type(key) is Tensor:  # else it is traced
            saved = Saved.of(key)
            ctx.call, kept = saved.call, list(saved.tensors)
            kept[:3] = (a if t is None else t for a, t in zip(arguments, kept, strict=False))
        ctx.save_for_backward(*weights, *kept)
        ctx.num_weights = len(weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once, as checkpoints require
        weights, kept = tensors[: ctx.num_weights], tensors[ctx.num_weights :]
        wants_x, _, *rest = ctx.needs_input_grad[5:]
        wants = wants_x, *rest
        asked = [index for index, wanted in enumerate(wants) if wanted]
        if ctx.call is None:
            made = _BACKWARD(grad, kept[0], [*kept[1:], *weights], ctx.layout, asked)
        else:
            kernel, *call = ctx.call
            made = kernel._backward(grad, kept, weights, ctx.layout, *call, asked, ctx.buffers)
        found = dict(zip(asked, made, strict=True))
        of_x, *others = map(found.get, range(len(wants)))
        return *[None] * 5, of_x, None, *others


call: Callable[..., Tensor] = Call.apply  # which torch does not type


def _layer(*inputs: Any) -> Tensor:
    *arguments, weights, number, layout, max_tokens, saves = inputs
    if saves:
        return call(number, layout, max_tokens, True, None, *arguments, *weights)
    out: Tensor = _FORWARD(*inputs, True)[0]
    return out


def _like_x(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty(1, dtype=torch.int64, device="cpu")


def _like_inputs(
    grad: Tensor, key: Tensor, inputs: Sequence[Tensor], layout: str, asked: Sequence[int]
) -> list[Tensor]:
    x, _, *others = inputs
    made = [_like_x(x)[0], _like_x(others[0])[0], *map(torch.empty_like, others[1:])]
    return [made[index] for index in asked]


_LIBRARY: Any = torch.library.Library("moekit", "FRAGMENT")  # type: ignore[no-untyped-call]
_CALL = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weights, Tensor kernel, str layout, "
    "SymInt? max_tokens, bool saves"
)
_GRADIENTS = "(Tensor grad, Tensor key, Tensor[] inputs, str layout, int[] asked) -> Tensor[]"
_LIBRARY.define(f"moe_layer({_CALL}) -> Tensor")
_LIBRARY.impl("moe_layer", _layer, "CompositeImplicitAutograd")
for _name, _schema, _run, _fake in (
    ("moe_forward", f"({_CALL}, bool compiled) -> (Tensor, Tensor)", _forward, _like_x),
    ("moe_backward", _GRADIENTS, _backward, _like_inputs),
):
    # The replay of a CUDA graph would lose the call's saved tensors.
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # backends may use autograd
    torch.library.register_fake(f"moekit::{_name}", _fake, lib=_LIBRARY)
_NAMES = "moe_layer", "moe_forward", "moe_backward"
LAYER, _FORWARD, _BACKWARD = (getattr(torch.ops.moekit, name).default for name in _NAMES)


def show_inside(mode: type[Any]) -> None:
    """Let a dispatch mode see the operators that `moe_forward` runs, instead of `moe_forward`."""

    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        with mode:
            return _forward(*args)

    torch.library.register_torch_dispatch("moekit::moe_forward", mode, rule, lib=_LIBRARY)
