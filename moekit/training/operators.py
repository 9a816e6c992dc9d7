"""A differentiated call as operators, for selective checkpoints, torch.compile and profilers.

    moe_layer        the call as torch.compile traces it: the autograd function `Call`
    moe_forward      its forward, which returns the output and a key: int64 (1,) on the CPU
    moe_backward     its backward in compiled code, which finds by the key what the forward saved

What a call saves lives as long as the key's storage, so whoever keeps the outputs of `moe_forward`
keeps it. In eager mode autograd keeps the saved tensors instead, where its hooks see them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit.contract import Routing
from moekit.errors import MoekitError
from moekit.runtime.device import on_device

_kernels: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of `TrainableKernel`
_numbers = itertools.count()


def register(kernel: Any) -> Tensor:
    """Return the number of a kernel. As a tensor it is no constant of compiled code.

    So the layers of a model share the code of one, if each of them is compiled.
    """
    _kernels[number := next(_numbers)] = kernel
    return torch.tensor(number)


class Saved(bytearray):
    """What a call saves. Its bytes are the storage of its key.

    tensors: x, topk_ids and topk_weights as they arrived, then what the experts saved. None stands
    for an argument of the call: autograd keeps it, and compiled code may overwrite it later.
    """

    by_address: WeakValueDictionary[int, Saved] = WeakValueDictionary()

    def __init__(self, kernel: Any, handle: Any, max_tokens: int | None, tensors: list[Any]) -> None:
        super().__init__(8)
        self.call, self.tensors = (kernel, handle, max_tokens), tensors

    def key(self) -> Tensor:
        made = torch.frombuffer(self, dtype=torch.int64)
        self.by_address[made.data_ptr()] = self
        return made

    @classmethod
    def of(cls, key: Tensor) -> Saved:
        found = cls.by_address.get(key.data_ptr())
        if found is None:
            raise MoekitError(
                "what this call saved for its backward is freed: its key was copied, so let hooks "
                "on saved tensors leave int64 tensors on the CPU as they are"
            )
        return found


def _forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    number: Tensor,
    layout: str,
    max_tokens: int | None,
    saves: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel with a number.

    layout: the weights' names, see `TrainableKernel.named`.
    compiled: the caller may overwrite its tensors before the backward.
    """
    kernel, arguments = _kernels[int(number)], (x, topk_ids, topk_weights)
    with on_device(x):
        packed = kernel.named(weights, layout)
        if not saves:
            routing = Routing(topk_weights, topk_ids, max_tokens=max_tokens)
            return kernel.infer(x, packed, routing), torch.zeros(1, dtype=torch.int64)
        if compiled and kernel.moves:  # the handle may keep them
            topk_weights, topk_ids = topk_weights.clone(), topk_ids.clone()
        routing = Routing(topk_weights, topk_ids, max_tokens=max_tokens)
        out, tokens, saved = kernel.forward(x, packed, routing)
    tensors: list[Any] = [tokens.x, tokens.topk_ids, tokens.topk_weights, *saved]
    if not kernel.moves:
        same = zip(tensors, arguments, strict=False)
        tensors[:3] = [None if _same(found, given) else found for found, given in same]
    if compiled:
        taken = {t.untyped_storage().data_ptr() for t in (*arguments, *weights)}
        tensors = [t.clone() if t is not None and t.untyped_storage().data_ptr() in taken else t
                   for t in tensors]
    return out, Saved(kernel, tokens.handle, max_tokens, tensors).key()


def _same(a: Tensor, b: Tensor) -> bool:
    form = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return a is b or (form and a.data_ptr() == b.data_ptr())


def _backward(
    grad: Tensor,
    key: Tensor,
    arguments: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: str,
    asked: Sequence[int],
    top_k: int,
) -> list[Tensor]:
    """Return the gradients that are asked for, by their index in (x, topk_weights, *weights)."""
    saved = Saved.of(key)
    filled = [t if t is not None else arguments[i] for i, t in enumerate(saved.tensors)]
    return _gradients(saved.call, grad, filled, weights, layout, asked, None)


def _gradients(
    call: tuple[Any, Any, int | None],
    grad: Tensor,
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: str,
    asked: Sequence[int],
    buffers: Any,
) -> list[Any]:
    kernel, handle, max_tokens = call
    names = layout.replace(";", ",").split(",")
    with on_device(grad):
        of_x, of_topk, made = kernel.backward(
            grad, kernel.named(weights, layout), tensors, handle, max_tokens,
            (0 in asked, 1 in asked), [names[i - 2] for i in asked if i > 1], buffers,
        )  # fmt: skip
    return [of_x if i == 0 else of_topk if i == 1 else made.get(names[i - 2]) for i in asked]


class Call(torch.autograd.Function):
    """A call of a kernel. Autograd keeps the tensors, and so sees if one is changed in between."""

    @staticmethod
    def forward(
        ctx: Any,
        number: Tensor,
        layout: str,
        max_tokens: int | None,
        moves: bool,
        compiled: bool,
        buffers: Any,
        *tensors: Tensor,
    ) -> Tensor:
        (x, topk_ids, topk_weights), weights = tensors[:3], tensors[3:]
        out, key = FORWARD(
            x, topk_ids, topk_weights, weights, number, layout, max_tokens, True, compiled
        )
        ctx.layout, ctx.buffers, ctx.top_k = layout, buffers, topk_ids.shape[1]
        ctx.call, kept = None, [key, *(() if moves else tensors[:3])]  # the key is traced
        if type(key) is Tensor:
            saved = Saved.of(key)
            ctx.call, kept = saved.call, list(saved.tensors)
            kept[:3] = [tensors[i] if t is None else t for i, t in enumerate(kept[:3])]
        ctx.save_for_backward(*weights, *kept)
        ctx.counted = len(weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # once, as checkpoints require
        weights, kept = tensors[: ctx.counted], tensors[ctx.counted :]
        wants_x, _, *wants = ctx.needs_input_grad[6:]
        wants = [wants_x, *wants]
        asked = [index for index, wanted in enumerate(wants) if wanted]
        if ctx.call is None:
            key, *arguments = kept
            made = BACKWARD(grad, key, arguments, weights, ctx.layout, asked, ctx.top_k)
        else:
            made = _gradients(ctx.call, grad, kept, weights, ctx.layout, asked, ctx.buffers)
        by_index = dict(zip(asked, made, strict=True))
        of_x, of_topk, *of_weights = (by_index.get(index) for index in range(len(wants)))
        return *[None] * 6, of_x, None, of_topk, *of_weights


def _layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    number: Tensor,
    layout: str,
    max_tokens: int | None,
    moves: bool,
    saves: bool,
) -> Tensor:
    tensors = x, topk_ids, topk_weights, *weights
    if saves:
        return call(number, layout, max_tokens, moves, True, None, *tensors)
    out: Tensor = FORWARD(*tensors[:3], weights, number, layout, max_tokens, False, True)[0]
    return out


_CALL = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weights, Tensor kernel, str layout, SymInt? max_tokens"
_LIBRARY = torch.library.Library("moekit", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(schema: str, run: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    # What a call saves would be lost in the replay of a CUDA graph.
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # backends may use autograd
    torch.library.register_fake(f"moekit::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.moekit, name).default


def _like_x(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty(1, dtype=torch.int64, device="cpu")


def _like_inputs(grad: Tensor, *rest: Any) -> list[Tensor]:
    _, _, weights, _, asked, top_k = rest
    of_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
    of_topk = grad.new_empty((grad.shape[0], top_k), dtype=torch.float32)
    made = [of_x, of_topk, *map(torch.empty_like, weights)]
    return [made[index] for index in asked]


FORWARD = _operator(
    f"moe_forward({_CALL}, bool saves, bool compiled) -> (Tensor, Tensor)", _forward, _like_x
)
BACKWARD = _operator(
    "moe_backward(Tensor grad, Tensor key, Tensor[] arguments, Tensor[] weights, str layout, "
    "int[] asked, int top_k) -> Tensor[]",
    _backward, _like_inputs,
)  # fmt: skip


def show_inside(mode: type[Any]) -> None:
    """Let a dispatch mode see what `moe_forward` runs, in its place."""

    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        with mode:
            return _forward(*args)

    torch.library.register_torch_dispatch("moekit::moe_forward", mode, rule, lib=_LIBRARY)


_LIBRARY.define(f"moe_layer({_CALL}, bool moves, bool saves) -> Tensor")
_LIBRARY.impl("moe_layer", _layer, "CompositeImplicitAutograd")
LAYER = torch.ops.moekit.moe_layer.default
call: Callable[..., Tensor] = Call.apply  # which torch does not type
