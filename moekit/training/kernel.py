"""The composed layer with gradients: one autograd function around the steps of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit.contract import Dispatched, PackedWeights, PrepareAndFinalize, Routing
from moekit.contract.interfaces import PermuteExpertsUnpermute
from moekit.contract.training import TrainableDispatcher, TrainableExperts, Wanted
from moekit.discovery.answers import packed_by
from moekit.errors import BackendBroken, InvalidInput, WeightsError
from moekit.kernel import ModularKernel
from moekit.problem.weights import ExpertWeights
from moekit.runtime.calls import Observer
from moekit.runtime.device import on_device
from moekit.runtime.memory import MemoryReport


class TrainableKernel(ModularKernel):
    """A kernel whose calls can be differentiated: what `moekit.compose` makes for ``training``.

    Calls without gradients run as calls of `ModularKernel` do. In a group, every rank runs the
    backwards of its calls in the order of the other ranks, also where it has no tokens. Under
    dp_size=1 with several ranks, gradients of x and of the router weights are partial sums, as the
    output is: the caller adds them up.
    """

    dispatcher: TrainableDispatcher
    experts: TrainableExperts

    def __init__(
        self, dispatcher: PrepareAndFinalize, experts: PermuteExpertsUnpermute, **options: Any
    ) -> None:
        for part, wanted in ((dispatcher, TrainableDispatcher), (experts, TrainableExperts)):
            if not isinstance(part, wanted):
                raise BackendBroken(
                    f"the class that {part.spec.name!r} declares for training is no "
                    f"{wanted.__name__}: correct it, or name another backend"
                )
        super().__init__(dispatcher, experts, **options)

    def __call__(
        self,
        x: Tensor,
        weights: ExpertWeights | PackedWeights,
        routing: Routing,
        *,
        out: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        add_to: ExpertWeights | None = None,
    ) -> Tensor:
        """Compute the layer as `ModularKernel.__call__` does, with gradients.

        Args:
            x: (T, H) in the problem's dtype.
            weights: this rank's parameters. Gradients flow to those that require one. Frozen
                experts, of any scheme, may come from `pack`. With ``adapters`` they do, and
                gradients flow to the adapters' matrices.
            routing: gradients flow to ``topk_weights``; they are zero where the id is -1.
            out: only for calls without gradients.
            add_to: buffers of the weights' canonical shapes, in the problem's dtype or float32. The
                backward adds the weights' gradients to them, and ``.grad`` stays as it is.

        Raises:
            WeightsError: Weights of a quantized scheme require a gradient, or ``add_to`` does not
                fit. Otherwise as `ModularKernel.__call__`.
        """
        packed, tracked = self._views(weights)
        if packed.adapters is not None:
            found = packed.adapters.tensors()
            tracked |= {name: t for name, t in found.items() if t.requires_grad}
        inputs = (x, routing.topk_weights, *tracked.values())
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
            return super().__call__(x, packed, routing, out=out, shared=shared)
        if out is not None:
            raise InvalidInput("out is given, and gradients are enabled: leave it out")
        topk_weights = routing.topk_weights
        if self.problem.apply_router_weight_on_input:
            # By autograd. The kernel then scales by ones, which changes no bits.
            scale = torch.where(routing.topk_ids < 0, 0, topk_weights)  # NaN may stand there
            x, topk_weights = (x * scale).to(x.dtype), torch.ones_like(topk_weights)
        buffers = None if add_to is None else self._buffers(add_to, tracked)
        call = _Call(self, replace(routing, topk_weights=topk_weights.detach()), packed, buffers)
        with on_device(x):
            result: Tensor = _apply(call, tuple(tracked), x, topk_weights, *tracked.values())
        return result if shared is None else result + shared(x)

    def _views(
        self, weights: ExpertWeights | PackedWeights
    ) -> tuple[PackedWeights, dict[str, Tensor]]:
        """Return the weights as the experts see them, and those that require a gradient."""
        if isinstance(weights, PackedWeights):
            return weights, {}
        weights.check(self.problem)
        made, p = weights.canonical(self.problem), self.problem
        if weights.w2_bias is not None and p.parallel.tp_rank > 0:
            # Rank 0 adds the bias, and every rank gets its gradient.
            made = replace(made, w2_bias=weights.w2_bias - weights.w2_bias.detach())
        tracked = {name: t for name, t in made.tensors().items() if t.requires_grad}
        if tracked and p.quant.weight is not None:
            raise WeightsError(
                f"{', '.join(tracked)} require a gradient, and weights of the scheme "
                f"{p.quant.name} have none: freeze them, or train unquantized weights"
            )
        packed = packed_by(self.experts, made.detach())
        return replace(packed, made_for=self._made_for), tracked

    def frozen(self, weights: ExpertWeights) -> PackedWeights:
        """Return weights as calls with adapters take them: views, which require no gradient."""
        packed, tracked = self._views(weights)
        if tracked and torch.is_grad_enabled():
            raise WeightsError(
                f"{', '.join(tracked)} require a gradient below adapters: freeze them"
            )
        return packed

    def _buffers(self, given: ExpertWeights, tracked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers = given.tensors()
        for name, weight in tracked.items():
            into = buffers.get(name)
            if into is None or into.shape != weight.shape or into.device != weight.device:
                found = "missing" if into is None else f"{tuple(into.shape)} on {into.device}"
                raise WeightsError(
                    f"add_to.{name} is {found}, expected {tuple(weight.shape)} on {weight.device}"
                )
            if into.dtype not in (weight.dtype, torch.float32):
                raise WeightsError(
                    f"add_to.{name} is {into.dtype}, expected {weight.dtype} or float32"
                )
        return buffers

    def memory(self, num_tokens: int | None = None) -> MemoryReport:
        """Return what `ModularKernel.memory` does, with what a call saves for its backward."""
        report = super().memory(num_tokens)
        rows = self.dispatcher.max_rows(report.num_tokens)
        saved = self.experts.saved_bytes(rows)
        if self._moves:  # the tokens that arrived; without a transfer they are the caller's x
            saved += rows * self.problem.hidden_size * self.problem.dtype.itemsize
        return replace(report, intermediate=report.intermediate + saved)

    # -- the two directions -----------------------------------------------------------------

    def _forward(
        self, x: Tensor, weights: PackedWeights, routing: Routing
    ) -> tuple[Tensor, Dispatched, list[Tensor]]:
        """Return the output, the tokens that arrived, and what the experts saved."""
        with self._observed(x, routing) as observer:
            x_TH, routing, out, _ = self._arrange(x, weights, routing, None)
            observer.arranged()
            arriving = self.dispatcher.prepare(x_TH, routing, None)
            observer.sent()
            tokens = arriving.result()
            if self._adapted:
                tokens = self._with_adapters(tokens, routing)
            observer.arrived()
            with self._ended_by_faults(tokens, observer):
                y_RH = self._place(tokens, out, self.problem.dtype)
                saved = self.experts.forward(y_RH, tokens, weights)
                observer.computed()
            out = torch.empty_like(x_TH) if out is None else out
            combining = self.dispatcher.finalize(y_RH, tokens, out)
            observer.combining()
            return combining.result(), tokens, saved

    def _backward(
        self, call: _Call, grad: Tensor, tokens: Dispatched, saved: list[Tensor], wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Return the gradients of x, of the router weights, and of the wanted weights by name."""
        with self._observed(grad, call.routing) as observer:
            observer.arranged()
            arriving = self.dispatcher.prepare_backward(grad.contiguous(), tokens)
            observer.sent()
            grad_RH = arriving.result()
            observer.arrived()
            with self._ended_by_faults(tokens, observer):
                found = self.experts.backward_input(grad_RH, tokens, call.weights, saved, wanted)
                observer.computed()
            returning = self.dispatcher.finalize_backward(found.x, found.topk_weights, tokens)
            observer.combining()
            made: dict[str, Tensor] = {}
            try:
                if wanted.weights:  # while the rows travel
                    if call.buffers is None:
                        into = made = {n: _new(call.tracked(n)) for n in wanted.weights}
                    else:
                        into = {n: call.buffers[n] for n in wanted.weights}
                    add = call.buffers is not None
                    self.experts.backward_weight(grad_RH, tokens, saved, found.kept, into, add)
            finally:  # also after a fault: other ranks may wait for this rank's rows
                of_x, of_topk_weights = returning.result()
            return of_x, of_topk_weights, made

    @contextmanager
    def _ended_by_faults(self, tokens: Dispatched, observer: Observer) -> Iterator[None]:
        """End a call whose experts fail on some rank, as `ModularKernel` does."""
        try:
            yield
        except BaseException as error:
            observer.failed(error)  # before `abandon`, which may wait for the other ranks
            self.dispatcher.abandon(tokens)
            raise

    @contextmanager
    def _observed(self, x: Tensor, routing: Routing) -> Iterator[Observer]:
        """Tell the other ranks how a call ends. Within it, the problem alone names dtypes."""
        observer = self._calls.begin(x, routing)
        try:
            with torch.autocast(x.device.type, enabled=False):
                yield observer
        except BaseException as error:
            observer.failed(error)
            raise
        finally:
            observer.ended()


@dataclass(frozen=True)
class _Call:
    """A call's arguments that autograd does not watch."""

    kernel: TrainableKernel
    routing: Routing
    weights: PackedWeights
    buffers: Mapping[str, Tensor] | None

    def tracked(self, name: str) -> Tensor:
        adapters = self.weights.adapters
        found = None if adapters is None else adapters.tensors().get(name)
        return self.weights[name] if found is None else found


def _new(like: Tensor) -> Tensor:
    """Return contiguous memory of a shape, in which experts may share matrices."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


class _Layer(torch.autograd.Function):
    """A call of a kernel. Autograd keeps the tensors, and so sees if one is changed in between."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        names: tuple[str, ...],
        x: Tensor,
        topk_weights: Tensor,
        *tracked: Tensor,
    ) -> Tensor:
        routing = replace(call.routing, topk_weights=topk_weights)
        result, tokens, saved = call.kernel._forward(x, call.weights, routing)
        ctx.call, ctx.names, ctx.handle = call, names, tokens.handle
        weights, adapters = call.weights.experts.values(), call.weights.adapters
        stack = () if adapters is None else adapters.tensors().values()
        arrived = tokens.x, tokens.topk_ids, tokens.topk_weights, tokens.adapter_ids
        ctx.save_for_backward(*arrived, *weights, *stack, *saved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, ids, topk_weights, adapter_ids, *rest = ctx.saved_tensors
        call: _Call = ctx.call
        weights, adapters = dict(zip(call.weights.experts, rest, strict=False)), None
        rest = rest[len(weights) :]
        if (held := call.weights.adapters) is not None:
            stack: dict[str, Any] = dict(zip(held.tensors(), rest, strict=False))
            adapters, rest = replace(held, **stack), rest[len(stack) :]
        packed = replace(call.weights, experts=weights, adapters=adapters)
        call = replace(call, weights=packed)
        tokens = Dispatched(
            x_RH, None, ids, topk_weights, handle=ctx.handle, adapter_ids=adapter_ids
        )
        _, _, wants_x, wants_topk, *wants = ctx.needs_input_grad
        # All ranks send the same kinds of gradients.
        moves = call.kernel.dispatcher.spec.moves_tokens
        named = frozenset(name for name, asked in zip(ctx.names, wants, strict=True) if asked)
        wanted = Wanted(wants_x or moves, wants_topk or moves, named)
        made_x, made_topk, made = call.kernel._backward(call, grad, tokens, rest, wanted)
        inputs = (made_x if wants_x else None, made_topk if wants_topk else None)
        return None, None, *inputs, *(made.get(name) for name in ctx.names)


_apply: Callable[..., Tensor] = _Layer.apply  # which torch does not type
