"""The composed layer with gradients: the steps of a call, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moekit.contract import Dispatched, PackedWeights, PrepareAndFinalize, Routing
from moekit.contract.interfaces import Adapters, PermuteExpertsUnpermute
from moekit.contract.training import TrainableDispatcher, TrainableExperts, Wanted
from moekit.discovery.answers import packed_by
from moekit.errors import BackendBroken, InvalidInput, WeightsError
from moekit.kernel import ModularKernel
from moekit.problem.weights import ExpertWeights
from moekit.runtime.calls import Observer
from moekit.runtime.checks import check_weights
from moekit.runtime.memory import MemoryReport
from moekit.training import operators


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
        self._checked: object = None  # the form of the last weights
        self._number = operators.register(self)

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
                experts, of any scheme, may come from `pack`. In problems with adapters they must,
                and gradients flow to the adapters' matrices.
            routing: gradients flow to ``topk_weights``; they are zero where the id is -1.
            out: only for calls without gradients.
            add_to: buffers of the weights' canonical shapes, in the problem's dtype or float32. The
                backward adds the weights' gradients to them, and ``.grad`` stays as it is.

        Raises:
            WeightsError: Weights of a quantized scheme require a gradient, or ``add_to`` does not
                fit. Otherwise as `ModularKernel.__call__`.
        """
        try:
            held, layout, tracked = self._views(weights)
        except WeightsError as error:  # the other ranks must not wait for this one
            self.abort(error, routing.max_tokens)
            raise
        if isinstance(weights, PackedWeights) and routing.adapter_ids is not None:
            held, layout = [*held, routing.adapter_ids], f"{layout};adapter_ids"
        inputs = (x, routing.topk_weights, *tracked.values())
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        compiles = torch.compiler.is_compiling()
        if not (saves or compiles):
            if not isinstance(weights, PackedWeights):
                weights = self._packed(held, layout)
            return super().__call__(x, weights, routing, out=out, shared=shared)
        if out is not None:
            raise InvalidInput("out is given, and gradients are enabled: leave it out")
        topk_weights = routing.topk_weights
        if self.problem.apply_router_weight_on_input:
            # By autograd. The kernel then scales by ones, which changes no bits.
            scale = torch.where(routing.topk_ids < 0, 0, topk_weights)  # NaN may stand there
            x, topk_weights = (x * scale).to(x.dtype), torch.ones_like(topk_weights)
        ids, most = routing.topk_ids, routing.max_tokens
        if compiles:
            if add_to is not None:
                raise InvalidInput("torch.compile does not trace add_to: call in eager mode")
            result: Tensor = operators.LAYER(
                x, ids, topk_weights, held, self._number, layout, most, saves
            )
        else:
            buffers = None if add_to is None else self._buffers(add_to, tracked)
            result = operators.call(
                self._number, layout, most, False, buffers, x, ids, topk_weights, *held
            )
        return result if shared is None else result + shared(x)

    def _views(
        self, weights: ExpertWeights | PackedWeights
    ) -> tuple[list[Tensor], str, dict[str, Tensor]]:
        """Return weights and layout as `_packed` takes them, and those that require a gradient."""
        if isinstance(weights, PackedWeights):
            check_weights(weights, self.experts.spec.name, self._made_for)
            stack: dict[str, Tensor] = {}
            adapters = weights.adapters
            if adapters is not None:
                if adapters.scaling.requires_grad:
                    raise WeightsError("scaling requires a gradient, and has none: scale B instead")
                stack = {"scaling": adapters.scaling, **adapters.tensors()}
            parts = weights.experts, weights.shared, stack
            layout = ";".join(map(",".join, parts))
            tracked = {name: t for name, t in stack.items() if t.requires_grad}
            return [t for part in parts for t in part.values()], layout, tracked
        p, given, compiles = self.problem, weights.tensors(), torch.compiler.is_compiling()
        form = weights.interleaved, [(n, t.shape, t.dtype, t.device) for n, t in given.items()]
        if compiles or form != self._checked or p.quant.weight is not None:  # which has values
            weights.check(p)
        if not compiles:  # which traces no mutation
            self._checked = form
        made = weights.canonical(p)
        if weights.w2_bias is not None and p.parallel.tp_rank > 0:
            # Rank 0 adds the bias, and every rank gets its gradient.
            made = replace(made, w2_bias=weights.w2_bias - weights.w2_bias.detach())
        held = given if made is weights else made.tensors()
        tracked = {name: t for name, t in held.items() if t.requires_grad}
        if tracked and p.quant.weight is not None:
            raise WeightsError(
                f"{', '.join(tracked)} require a gradient, and weights of the scheme "
                f"{p.quant.name} have none: freeze them, or train unquantized weights"
            )
        return list(held.values()), ",".join(held), tracked

    def _packed(self, held: Sequence[Tensor], layout: str) -> PackedWeights:
        """Return weights, without autograd, as the experts see them.

        layout: names of canonical weights, as in "w13,w2"; or names of packed weights, of tensors
            that all experts share, and of adapters, as in "w13,w2;scale;scaling,w2_a,w2_b". The
            adapters' ids may follow.
        """
        left = (t.detach() for t in held)
        parts: list[Any] = [dict(zip(names, left, strict=False)) for names in _names(layout)]
        if len(parts) == 1:
            made = packed_by(self.experts, ExpertWeights(**parts[0]))
            return replace(made, made_for=self._made_for)
        experts, shared, stack = parts[:3]
        adapters = Adapters(**stack) if stack else None
        name, made_for = self.experts.spec.name, self._made_for
        return PackedWeights(name, experts, shared, made_for=made_for, adapters=adapters)

    def frozen(self, weights: ExpertWeights) -> PackedWeights:
        """Return weights for calls with adapters: views that require no gradient."""
        held, layout, tracked = self._views(weights)
        if tracked and torch.is_grad_enabled():
            raise WeightsError(
                f"{', '.join(tracked)} require a gradient below adapters: freeze them"
            )
        return self._packed(held, layout)

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
                tokens = self._with_adapters(tokens)
            observer.arrived()
            with self._ended_by_faults(tokens, observer):
                y_RH = self._place(tokens, out, self.problem.dtype)
                saved = self.experts.forward(y_RH, tokens, weights)
                if tokens.adapter_ids is not None:
                    saved = [tokens.adapter_ids, *saved]
                observer.computed()
            out = torch.empty_like(x_TH) if out is None else out
            combining = self.dispatcher.finalize(y_RH, tokens, out)
            observer.combining()
            return combining.result(), tokens, saved

    def _backward(
        self,
        grad: Tensor,
        kept: Sequence[Tensor],
        held: Sequence[Tensor],
        layout: str,
        handle: Any,
        max_tokens: int | None,
        asked: Sequence[int],
        buffers: Mapping[str, Tensor] | None,
    ) -> list[Tensor | None]:
        """Return the gradients that are asked for; None where they are added to buffers.

        kept: x, topk_ids and topk_weights as they arrived, and the tensors that the experts saved.
        asked: indices into (x, topk_weights, *weights).
        """
        x_RH, ids, topk_weights, *saved = kept
        adapter_ids = saved.pop(0) if self._adapted else None
        tokens = Dispatched(x_RH, None, ids, topk_weights, handle=handle, adapter_ids=adapter_ids)
        weights, all_names = self._packed(held, layout), list(chain(*_names(layout)))
        names = [all_names[index - 2] for index in asked if index > 1]
        # All ranks send the same kinds of gradients.
        wanted = Wanted(0 in asked or self._moves, 1 in asked or self._moves, frozenset(names))
        routing = Routing(topk_weights, ids, max_tokens=max_tokens)
        with self._observed(grad, routing) as observer:
            observer.arranged()
            arriving = self.dispatcher.prepare_backward(grad.contiguous(), tokens)
            observer.sent()
            grad_RH = arriving.result()
            observer.arrived()
            with self._ended_by_faults(tokens, observer):
                found = self.experts.backward_input(grad_RH, tokens, weights, saved, wanted)
                observer.computed()
            returning = self.dispatcher.finalize_backward(found.x, found.topk_weights, tokens)
            observer.combining()
            made: dict[str, Tensor] = {}
            try:
                if names:  # while the rows travel
                    if buffers is None:
                        stack = {} if weights.adapters is None else weights.adapters.tensors()
                        like = {**weights.experts, **stack}
                        into = made = {name: _new(like[name]) for name in names}
                    else:
                        into = {name: buffers[name] for name in names}
                    add = buffers is not None
                    self.experts.backward_weight(grad_RH, tokens, saved, found.kept, into, add)
            finally:  # also after a fault: other ranks may wait for this rank's rows
                of_x, of_topk_weights = returning.result()
            by_index = {0: of_x, 1: of_topk_weights}
            return [by_index[i] if i < 2 else made.get(all_names[i - 2]) for i in asked]

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
            kind = x.device.type
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IS:
                yield observer
        except BaseException as error:
            observer.failed(error)
            raise
        finally:
            observer.ended()


_AS_IS = nullcontext()


def _new(like: Tensor) -> Tensor:
    """Return contiguous memory of the shape of ``like``, in which experts may share matrices."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _names(layout: str) -> list[list[str]]:
    """Return the names of each part of a layout."""
    return [names.split(",") if names else [] for names in layout.split(";")]
