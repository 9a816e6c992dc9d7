"""The composed MoE layer. Read top to bottom, this file is the data flow.

    tokens -> PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply
           -> PrepareAndFinalize.finalize -> out

Shape suffixes: T tokens on this rank, K top-k, H hidden size, I intermediate size on this rank,
L local experts, R dispatched rows, C rows of a batched expert's slab.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moekit.contract import (
    BufferSpec as BufferSpec,
)
from moekit.contract import (
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    output_dtype,
)
from moekit.discovery.answers import packed_by
from moekit.errors import InvalidInput, PeerFailed, WeightsError
from moekit.problem import ActivationFormat
from moekit.problem.weights import ExpertWeights
from moekit.runtime import checks
from moekit.runtime.checks import (
    check_call,
    check_function,
    check_shared,
    check_tokens,
    weights_of,
)
from moekit.runtime.group import Together, named, turn_in
from moekit.runtime.memory import MemoryReport
from moekit.runtime.overlap import InFlight, Pending
from moekit.runtime.workspace import Layout, Workspace, settle

if TYPE_CHECKING:
    from moekit.selection.explanation import Explanation

logger = logging.getLogger("moekit")

_MAX_LAYOUTS = 1024
_ALONE = nullcontext()


def quantize_dispatched(
    experts: PermuteExpertsUnpermute, tokens: Dispatched, weights: PackedWeights
) -> Dispatched:
    """Tokens that travelled unquantized, as ``experts`` that take no such ones want them."""
    if tokens.topk_ids is not None:
        valid = (tokens.topk_ids >= 0).any(dim=1)
        x, scale = experts.quantize(tokens.x, weights, valid)
        return replace(tokens, x=x, x_scale=scale)
    assert tokens.expert_num_tokens is not None
    L, C, H = tokens.x.shape
    valid = torch.arange(C, device=tokens.x.device) < tokens.expert_num_tokens[:, None]
    x, scale = experts.quantize(tokens.x.view(L * C, H), weights, valid.view(-1))
    scale = scale.view(1, 1, 1) if scale.shape[0] == 1 else scale.view(L, C, scale.shape[1])
    return replace(tokens, x=x.view(L, C, x.shape[1]), x_scale=scale)


def weight_and_reduce(y_RKH: Tensor, tokens: Dispatched, out_RH: Tensor) -> Tensor:
    """``out[r] = sum_k weight[r, k] * y[r, k]`` over slots with an expert, in fp32, in order of k.

    y (R, K, H) with undefined slots where the id is -1; out (R, H), every element written.
    """
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    total = torch.zeros(out_RH.shape, dtype=torch.float32, device=out_RH.device)
    for k in range(y_RKH.shape[1]):
        used = tokens.topk_ids[:, k, None] >= 0
        total += torch.where(used, y_RKH[:, k].float() * tokens.topk_weights[:, k, None], 0.0)
    return out_RH.copy_(total)


class _Started(NamedTuple):
    """A call that has been dispatched: x as it was sent; out if that is known."""

    number: str
    x: Tensor
    out: Tensor | None
    weights: PackedWeights
    arriving: Pending[Dispatched]


class ModularKernel:
    """One dispatcher and one experts backend, composed.

    Formats must agree (`moekit.compose` inserts a bridge where they do not). Exactly one party
    applies the router weights and sums over K: the dispatcher if it ``applies_weights``, else the
    experts if they ``reduces``, else this class. Experts never see apply_router_weight_on_input:
    the token is scaled here, and the weights handed on are ones.

    checked: verify ids and weights by value on every call and, where tokens move, let all ranks
    agree four times a call: to start it, and after `prepare` was launched; when the experts are
    launched, and after `finalize` was. One that failed makes the others raise PeerFailed with its
    reason, and one that is silent for ``peer_timeout`` seconds is named, both before this rank
    waits for what never comes. (A dispatcher that waits within `prepare` does so first: there it
    names the missing itself, or its library's timeout ends it.) Where a failure leaves tokens on
    their way, later checked calls in that group raise, too. Costs host synchronizations, so the
    default is on for the CPU only.
    """

    def __init__(
        self,
        dispatcher: PrepareAndFinalize,
        experts: PermuteExpertsUnpermute,
        *,
        workspace: Workspace | None = None,
        explanation: Explanation | None = None,
        checked: bool | None = None,
        peer_timeout: float = 60.0,
    ) -> None:
        checks.check_parts(dispatcher, experts, workspace, checked, peer_timeout)
        self.problem = dispatcher.problem
        self.dispatcher = dispatcher
        self.experts = experts
        self.explanation = explanation
        self.workspace = workspace or Workspace.default()
        self.checked = self.problem.device.type == "cpu" if checked is None else checked
        self._name, self._agreement = named(dispatcher.group, peer_timeout, self.checked)
        self._turn = turn_in(dispatcher.group)
        self._made_for = weights_of(self.problem)
        self._layouts: dict[int, Layout] = {}
        self._ids_dtype = {"int32": torch.int32, "int64": torch.int64}[dispatcher.spec.ids_dtype]
        activation = self.problem.quant.activation
        self._moves = dispatcher.spec.moves_tokens
        # What experts return goes to the dispatcher as it is.
        self._reduced = experts.spec.reduces or experts.spec.format is ActivationFormat.BATCHED
        self._output_dtype = output_dtype(self.problem, experts.spec, dispatcher.spec)
        self._quantizes_itself = activation is None or experts.spec.takes_unquantized
        self._sends_quantized = (
            activation is not None
            and experts.spec.takes_quantized
            and self.problem.quant.name in dispatcher.spec.wire_schemes
        )

    # -- weights ----------------------------------------------------------------------------

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """This rank's weights, checked against the problem and converted to the experts' layout.

        They are ready on every stream. Raises WeightsError listing everything that is missing or
        misshapen, and while gradients are enabled for tensors that require one.
        """
        if not isinstance(weights, ExpertWeights):
            raise WeightsError(f"pack() wants moekit.ExpertWeights, not {type(weights).__name__}")
        (weights := checks.detached(weights)).check(self.problem)
        packed = packed_by(self.experts, weights.canonical(self.problem))
        settle(weights.w13.device)
        return replace(packed, made_for=self._made_for)

    # -- calls ------------------------------------------------------------------------------

    def __call__(
        self,
        x: Tensor,
        weights: PackedWeights,
        routing: Routing,
        *,
        out: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x (T, H) -> (T, H), both in the problem's dtype.

        out: written if given; it must not overlap x. shared: shared experts, run on x while
        tokens travel; its (T, H) result is added. Under dp_size=1 with several ranks the result
        is this rank's partial sum.
        """
        if self._agreement is None and not self._moves:
            return self._call_alone(x, weights, routing, out, shared)
        with self._turn:
            started = self._start(x, weights, routing, out)
            if shared is None:
                combining, _sent = self._run(started, None)
                return combining.result()
            extra: list[Tensor] = []
            combining, _sent = self._run(started, lambda: extra.append(check_shared(shared, x)))
            return combining.result().add_(extra[0])

    def start(
        self,
        x: Tensor,
        weights: PackedWeights,
        routing: Routing,
        *,
        out: Tensor | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> InFlight:
        """Dispatches and returns at once. ``.run()`` runs the experts and sets off their output,
        ``.result()`` waits for it, after ``.run()`` if that was not called.

        meanwhile: ``.run()`` calls it while tokens travel; if it raises, so does the call, on all
        ranks.

        Several calls may be in flight: run them, and take their results, in the order they were
        started. Of two micro-batches, tokens of the second travel while the first one's experts
        run, and results of the first while the second's do: start, start, run, run, result, result.
        x must stay unchanged until the result is taken. Where tokens move, all ranks must start
        and run their calls in one order; checked kernels tell if they do not.
        """
        started = self._start(x, weights, routing, out)

        def run() -> Pending[Tensor]:
            combining, sent = self._run(started, meanwhile)

            def arrive(kept: object = sent) -> Tensor:
                return combining.result()

            return Pending(arrive)

        return InFlight(run)

    def _start(
        self, x: Tensor, weights: PackedWeights, routing: Routing, out: Tensor | None
    ) -> _Started:
        moves = self._moves
        # Where nothing moves, ranks hold the same tokens.
        same = "" if self._agreement is None or moves else f" with x {tuple(x.shape)}"
        with self._together("start", same, self.dispatcher.abort if moves else None):
            x, routing, out = self._arrange(x, weights, routing, out)
        # All ranks number a call alike, so that they notice when they are at different calls.
        number = "" if self._agreement is None else f" (started at step {self._agreement.step})"
        quantizer = self._quantizer_before_dispatch(weights) if self._sends_quantized else None
        with self._together("dispatch", number, moving=moves):
            arriving = self.dispatcher.prepare(x, routing, quantizer)
        return _Started(number, x, out, weights, arriving)

    def _call_alone(
        self,
        x: Tensor,
        weights: PackedWeights,
        routing: Routing,
        out: Tensor | None,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """`_start` and `_run` with nobody to wait for or to agree with, in less host time."""
        sent, routing, out = self._arrange(x, weights, routing, out)
        assert out is not None
        quantizer = self._quantizer_before_dispatch(weights) if self._sends_quantized else None
        tokens = self.dispatcher.prepare(sent, routing, quantizer).result()
        extra = None if shared is None else check_shared(shared, x)
        if tokens.x_scale is None and not self._quantizes_itself:
            tokens = quantize_dispatched(self.experts, tokens, weights)
        y = self._run_experts(tokens, weights, out)
        result = self.dispatcher.finalize(y, tokens, out).result()
        return result if extra is None else result.add_(extra)

    def _arrange(
        self, x: Tensor, weights: PackedWeights, routing: Routing, out: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor | None]:
        """x and routing, checked, as the dispatcher takes them; and out, if that is known."""
        check_call(
            self.problem, self.experts, x, weights, routing, out, self.checked, self._made_for
        )  # fmt: skip
        if out is None and not self._moves:  # the experts write there
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, topk_weights, topk_ids = x.contiguous(), routing.topk_weights, routing.topk_ids
        if self.problem.apply_router_weight_on_input:
            x = (x * topk_weights).to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        if topk_ids.dtype != self._ids_dtype:
            topk_ids = topk_ids.to(self._ids_dtype)
        topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
        if topk_weights is not routing.topk_weights or topk_ids is not routing.topk_ids:
            routing = Routing(topk_weights, topk_ids)
        return x, routing, out

    def abort(self, error: Exception) -> None:
        """This rank cannot start its next call: the others raise PeerFailed with ``error``."""
        together = self._together("start", "", self.dispatcher.abort)
        with suppress(type(error), PeerFailed), together:
            raise error

    def _run(
        self, call: _Started, meanwhile: Callable[[], object] | None
    ) -> tuple[Pending[Tensor], object]:
        """The experts' output on its way back, and what must live until it has arrived."""
        number, x, out, weights, arriving = call
        tokens: Dispatched | None = None
        try:
            with self._together("run the experts of", number):
                try:
                    if meanwhile is not None:
                        check_function("meanwhile", meanwhile)()
                finally:  # what travels must arrive
                    tokens = arriving.result()
                if tokens.x_scale is None and not self._quantizes_itself:
                    tokens = quantize_dispatched(self.experts, tokens, weights)
                y = self._run_experts(tokens, weights, out)
        except BaseException:
            if tokens is not None:
                self.dispatcher.abandon(tokens)
            raise
        with self._together("combine", number, moving=self._moves):
            if out is None:
                combining = self.dispatcher.finalize_new(y, tokens, x)
            else:
                combining = self.dispatcher.finalize(y, tokens, out)
        return combining, (y, tokens)

    def _together(
        self,
        step: str,
        more: str = "",
        otherwise: Callable[[str], None] | None = None,
        *,
        moving: bool = False,
    ) -> AbstractContextManager[None]:
        if self._agreement is None and otherwise is None:
            return _ALONE
        what = f"{step} a call of {self._name}{more}"
        return Together(self._agreement, what, otherwise, moving=moving)

    def _run_experts(
        self, tokens: Dispatched, weights: PackedWeights, out: Tensor | None
    ) -> Tensor:
        dtype, device = self._output_dtype, tokens.x.device
        shape = torch.Size((*tokens.x.shape[:-1], self.problem.hidden_size))  # x may be packed
        reduced = self.dispatcher.output(tokens)
        if reduced is None and not self._moves and out is not None:
            # Without transfer, the experts write the caller's output directly.
            reduced = out if out.is_contiguous() and out.shape == shape else None
        if reduced is None:
            kept = dtype if self._reduced else self.problem.dtype
            reduced = torch.empty(shape, dtype=kept, device=device)
        if 0 in shape[:-1]:
            return reduced
        rows = shape[-2]
        y = reduced
        if not self._reduced:
            assert tokens.topk_ids is not None
            y = torch.empty((rows, tokens.topk_ids.shape[1], shape[-1]), dtype=dtype, device=device)
        scratch = self.workspace.take(self._layouts.get(rows) or self._layout(rows), device)
        try:
            self.experts.apply(y, tokens, weights, scratch)
        finally:
            scratch.give_back()
        return reduced if self._reduced else weight_and_reduce(y, tokens, reduced)

    def _layout(self, rows: int) -> Layout:
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        layout = self._layouts[rows] = Layout(self.experts.workspace(rows))
        return layout

    # -- quantization: before the transfer if both sides can, else after, else by the experts ----

    def _quantizer_before_dispatch(self, weights: PackedWeights) -> Quantizer:
        return lambda x_RH, valid_R: self.experts.quantize(x_RH, weights, valid_R)

    def memory(self, num_tokens: int | None = None) -> MemoryReport:
        """Bytes needed when every rank passes ``num_tokens`` (default: problem.max_num_tokens)."""
        tokens = self.problem.max_num_tokens if num_tokens is None else num_tokens
        if tokens is None:
            raise InvalidInput(
                "memory() needs a token count: pass num_tokens, or set max_num_tokens"
            )
        return MemoryReport.of(self.dispatcher, self.experts, check_tokens(tokens))

    def warmup(self, weights: PackedWeights, num_tokens: int) -> None:
        """Runs calls of 1, 2, 4 ... and ``num_tokens`` random tokens.

        Grows the workspace, and compiles what compiles at first use, for every size up to
        ``num_tokens`` (kernels that change with the size change at most once per factor of two).
        Calls that take over a second are logged with the time they took. Collective: every rank
        must call it with the same ``num_tokens``.
        """
        num_tokens, device = check_tokens(num_tokens), checks.device_of(weights)
        powers = (1 << n for n in range(num_tokens.bit_length()))
        sizes = sorted({*powers, *self.experts.largest_calls(num_tokens)})
        with self.experts.tuning():
            for step, tokens in enumerate(sizes):
                begin = time.perf_counter()
                self._random_call(weights, tokens, device)
                if (seconds := time.perf_counter() - begin) > 1:
                    logger.info("moekit: warm-up %d of %d (%d tokens) took %.1f s",
                                step + 1, len(sizes), tokens, seconds)  # fmt: skip

    def _random_call(self, weights: PackedWeights, tokens: int, device: torch.device) -> None:
        p = self.problem
        x = torch.randn(tokens, p.hidden_size, dtype=p.dtype, device=device)
        ids = torch.arange(tokens * p.top_k, device=device) % p.num_physical_experts
        ids = ids.view(tokens, p.top_k)
        self(x, weights, Routing(torch.ones_like(ids, dtype=torch.float32), ids))

    def destroy(self) -> None:
        """Frees the dispatcher's buffers; idempotent."""
        self.dispatcher.destroy()
