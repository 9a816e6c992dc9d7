"""The composed MoE layer.

`ModularKernel.__call__` is the data flow of a call, top to bottom:

    tokens -> PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply
           -> PrepareAndFinalize.finalize -> out

Shape suffixes: T tokens on this rank, K top-k, H hidden size, R dispatched rows, L local experts,
C capacity of the batched layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moekit.contract import (
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Unreduced,
)
from moekit.contract.explanation import Explanation
from moekit.contract.pending import InFlight, Pending
from moekit.contract.sums import BY_EXPERTS, Sums, output_dtype
from moekit.discovery.answers import packed_by
from moekit.problem.problem import summary
from moekit.problem.weights import ExpertWeights
from moekit.runtime import checks
from moekit.runtime.calls import Calls, Observer
from moekit.runtime.checks import check_call, check_shared, check_tokens
from moekit.runtime.device import elsewhere, on_device
from moekit.runtime.rows import ALIGNMENT, aligned, quantize_dispatched, quantized_by
from moekit.runtime.workspace import Scratch, Workspace, layout_of, settle

if TYPE_CHECKING:
    from moekit.runtime.memory import MemoryReport

_T = TypeVar("_T")
_MAX_LAYOUTS = 1024
_NONE = Scratch(())
_NOTHING = None, None  # neither a result nor a fault


class ModularKernel:
    """One dispatcher and one experts backend, composed.

    `sums` is the one party that applies the router weights and sums over K. Experts never see
    apply_router_weight_on_input: this class scales the tokens and passes weights of one.

    Args:
        dispatcher, experts: of one format; `moekit.compose` inserts a bridge where they differ.
        workspace: scratch memory, shared with other layers; default: the process-wide one.
        explanation: why these two were chosen.
        checked: verify ids and weights by value on every call. Where tokens move, also make four
            collective checks a call: when it starts, when its dispatch is launched, when its
            experts are launched, and when its combine is launched. If a rank fails, the others
            raise PeerFailed with its reason; if a rank does not come within ``peer_timeout``
            seconds, they raise PeerFailed with its number. Both happen before they wait for tokens
            that never arrive, unless the dispatcher waits within `prepare`: then it names the
            missing ranks itself within ``peer_timeout``, or its library's timeout ends the wait. A
            failure that leaves tokens in flight poisons the group: later checked calls in it raise
            as well. Checks synchronize with the device, so the default is True on the CPU only.
        peer_timeout: seconds to wait for another rank in a collective check.
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
        checks.check_parts(dispatcher, experts, peer_timeout)
        self.problem = experts.problem
        self.dispatcher = dispatcher
        self.experts = experts
        self.explanation = explanation
        self.workspace = workspace or Workspace.default()
        self.checked = self.problem.device.type == "cpu" if checked is None else checked
        for member in dispatcher.members:
            member.weight_and_reduce = experts.weight_and_reduce
            if self.checked:
                member.peer_timeout = peer_timeout
        offered = type(dispatcher).takes_unreduced is not PrepareAndFinalize.takes_unreduced
        self.sums = Sums.of(self.problem, experts.spec, offered)
        self._calls = Calls(dispatcher.spec.name, experts.spec.name)
        if dispatcher.group is not None or dispatcher.spec.moves_tokens:
            from moekit.runtime.group_calls import GroupCalls

            self._calls = GroupCalls(dispatcher, experts.spec.name, peer_timeout, self.checked)
        self._made_for = checks.weights_of(self.problem)
        self._layout = lru_cache(_MAX_LAYOUTS)(lambda rows: layout_of(*experts.workspace(rows)))
        taken = dispatcher.spec.ids_dtype
        self._ids_dtype = None if taken == "any" else getattr(torch, taken)
        self._fused = experts.spec.fused
        self._moves = dispatcher.spec.moves_tokens and not self._fused
        self._adapted = self.problem.adapters is not None
        self._on_accelerator = self.problem.device.type != "cpu"
        self._output_dtype = output_dtype(self.problem, experts.spec, dispatcher.spec)
        quantizes = quantized_by(self.problem, dispatcher.spec, experts.spec)
        self._sends_quantized = quantizes == "sender"
        activation = self.problem.quant.activation
        self._quantizes_arrivals = activation is not None and not experts.spec.takes_unquantized

    def __repr__(self) -> str:
        names = self.experts.spec.name
        names = f"{names} (fused)" if self._fused else f"{self.dispatcher.spec.name} + {names}"
        checked = ", checked" * self.checked
        return (
            f"ModularKernel({names}: {summary(self.problem)}, summed by {self.sums.value}{checked})"
        )

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Check this rank's weights and convert them to the experts' layout, on every stream.

        Raises:
            WeightsError: lists everything that is missing or misshapen; also raised for tensors
                that require a gradient while gradients are enabled.
        """
        (weights := checks.detached(weights)).check(self.problem)
        with on_device(weights.w13):
            packed = packed_by(self.experts, weights.canonical(self.problem)._map(aligned))
            settle(weights.w13.device)
        return replace(packed, made_for=self._made_for)

    @torch.no_grad()
    def repack_(
        self,
        packed: PackedWeights,
        new: ExpertWeights | PackedWeights,
        *,
        experts: Sequence[int] | Tensor | None = None,
        checksum: str | None = None,
        name: str = "experts",
    ) -> None:
        """Write new weights into the memory of packed ones, which CUDA graphs may have captured.

        No call may run meanwhile. If `pack` kept the tensors that it was given, they change too.

        Args:
            packed: the result of `pack`.
            new: weights as `pack` takes them, on any device, or packed ones. If the problem has a
                scheme, weights of 16 or 32 bits are quantized to it.
            experts: the positions of these experts among this rank's L, if ``new`` has only some.
            checksum: ``new.checksum()`` at the source, compared before anything is written.
            name: the layer's name, for errors.

        Raises:
            WeightsError: ``new`` does not fit. The error names the layer and each tensor, and
                ``packed`` is unchanged.
        """
        from moekit.runtime.repack import repack

        repack(self.experts, self._made_for, packed, new, experts, checksum, name)

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
        """Compute the layer: x (T, H) -> (T, H), both in the problem's dtype.

        Under dp_size=1 with several ranks the result is this rank's partial sum.

        Args:
            weights: from `pack`.
            out: (T, H), written and returned if given; it must not overlap x.
            shared: shared experts, called with x while tokens are in flight; their (T, H) result
                is added.

        Raises:
            InvalidInput: An argument does not fit the problem.
            CapacityExceeded: There are more tokens than max_num_tokens.
            WeightsError: The weights are of another backend or problem.
            PeerFailed: Another rank failed or did not come.
        """
        if self._on_accelerator and elsewhere(x) is not None:
            with on_device(x):
                return self(x, weights, routing, out=out, shared=shared)
        observer = self._calls.begin(x, routing)
        try:
            x_TH, routing, out, quantize = self._arrange(x, weights, routing, out)
            observer.arranged()
            arriving = self.dispatcher.prepare(x_TH, routing, quantize)
            observer.sent()
            extra, fault = _NOTHING if shared is None else _tried(check_shared, shared, x)
            tokens = arriving.result()
            if self._adapted:
                tokens = self._with_adapters(tokens)
            observer.arrived()
            y, tokens, scratch = self._apply(tokens, weights, out, fault, observer)
            combining = self._finalize(y, tokens, scratch, x_TH, out)
            observer.combining()
            result = combining.result()
        except BaseException as error:
            observer.failed(error)
            raise
        finally:
            observer.ended()
        return result if extra is None else result.add_(extra)

    def start(
        self,
        x: Tensor,
        weights: PackedWeights,
        routing: Routing,
        *,
        out: Tensor | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> InFlight:
        """Launch the dispatch and return at once.

        ``.run()`` of the result runs the experts and launches the combine. ``.result()`` waits for
        the output, and runs what was not run.

        Several calls may be in flight: run them, and take their results, in the order in which
        they were started. Start two micro-batches before running either one, and their transfers
        overlap with compute: start, start, run, run, result, result. x must stay unchanged until
        the result is taken. Where tokens move, all ranks must start and run their calls in one
        order; checked kernels raise if they do not.

        Args:
            meanwhile: ``.run()`` calls it while tokens are in flight; if it raises, so does the
                call, on all ranks.

        Raises: as a call does; PeerFailed also from ``.run()`` and ``.result()``.
        """
        call = partial(self._start, x, weights, routing, out, meanwhile)
        if not self._on_accelerator:
            return InFlight(call())
        run = _at(x, call)
        return InFlight(lambda: Pending(partial(_at, x, _at(x, run).result)))

    def _start(
        self,
        x: Tensor,
        weights: PackedWeights,
        routing: Routing,
        out: Tensor | None,
        meanwhile: Callable[[], object] | None,
    ) -> Callable[[], Pending[Tensor]]:
        """Launch the dispatch, as `__call__` does. Return what launches the rest."""
        observer = self._calls.begin(x, routing)
        try:
            x_TH, routing, out, quantize = self._arrange(x, weights, routing, out)
            observer.arranged()
            arriving = self.dispatcher.prepare(x_TH, routing, quantize)
            observer.sent()
        except BaseException as error:
            observer.failed(error)
            raise
        finally:
            observer.ended()

        def run() -> Pending[Tensor]:
            observer.resumed()
            try:
                _, fault = _NOTHING if meanwhile is None else _tried(meanwhile)
                tokens = arriving.result()
                if self._adapted:
                    tokens = self._with_adapters(tokens)
                observer.arrived()
                y, tokens, scratch = self._apply(tokens, weights, out, fault, observer)
                combining = self._finalize(y, tokens, scratch, x_TH, out)
                observer.combining()
            except BaseException as error:
                observer.failed(error)
                raise
            finally:
                observer.ended()
            # The combine reads what is held, until the output has arrived.
            return Pending(lambda held=(x_TH, y, tokens): combining.result())  # type: ignore[misc]

        return run

    def abort(self, error: Exception, max_tokens: int | None = None) -> None:
        """Make the other ranks raise PeerFailed with ``error``: this rank has no next call.

        max_tokens: of the other ranks' calls.
        """
        self._calls.abort(error, max_tokens)

    def _arrange(
        self, x: Tensor, weights: PackedWeights, routing: Routing, out: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor | None, Quantizer | None]:
        """Check the arguments. Return what the dispatcher takes: x, routing, out, and how it
        quantizes x."""
        check_call(
            self.problem, self.experts, x, weights, routing, out, self.checked, self._made_for
        )  # fmt: skip
        if out is None and not self._moves:  # the experts write there
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, topk_weights, topk_ids = x.contiguous(), routing.topk_weights, routing.topk_ids
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()
        if self.problem.apply_router_weight_on_input:
            x = (x * topk_weights).to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        if self._ids_dtype not in (None, topk_ids.dtype):
            topk_ids = topk_ids.to(self._ids_dtype)
        topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
        if topk_weights is not routing.topk_weights or topk_ids is not routing.topk_ids:
            routing = replace(routing, topk_weights=topk_weights, topk_ids=topk_ids)
        if self._adapted:
            from moekit.runtime.adapters import with_ids

            routing = with_ids(routing, weights.adapters, self.problem)
        if not self._sends_quantized:
            return x, routing, out, None
        return x, routing, out, lambda rows, valid: self.experts.quantize(rows, weights, valid)

    def _with_adapters(self, tokens: Dispatched) -> Dispatched:
        """Return the tokens that arrived with the adapter of each row."""
        from moekit.runtime.adapters import arrived

        return arrived(tokens, self.problem)

    def _apply(
        self,
        tokens: Dispatched,
        weights: PackedWeights,
        out: Tensor | None,
        fault: BaseException | None,
        observer: Observer,
    ) -> tuple[Tensor | Unreduced, Dispatched, Scratch]:
        """Launch the experts. Return their output, the tokens as they saw them, and their scratch.

        fault: what ends the call, and was raised while the tokens were in flight.
        """
        scratch = _NONE
        try:
            if fault is not None:
                raise fault
            if tokens.x.data_ptr() % ALIGNMENT:
                tokens = replace(tokens, x=tokens.x.clone())
            if self._quantizes_arrivals and tokens.x_scale is None:
                tokens = quantize_dispatched(self.experts, tokens, weights)
            if tokens.x.numel() or self._fused:  # another rank may have tokens for this one
                layout = self._layout(tokens.x.shape[-2])
                scratch = self.workspace.take(layout, tokens.x.device)
            if self._fused:
                observer.ready()
            y = self._output(tokens, weights, scratch, out)
            observer.computed()
        except BaseException as error:  # this rank's fault, or another rank's
            scratch.give_back()
            # Other ranks must hear of a fault before `abandon`, where they may wait for this rank.
            observer.failed(error)
            self.dispatcher.abandon(tokens)
            raise
        return y, tokens, scratch

    def _output(
        self, tokens: Dispatched, weights: PackedWeights, scratch: Scratch, out: Tensor | None
    ) -> Tensor | Unreduced:
        """Return the experts' output in the form that `sums` states."""
        some, ids, sums = scratch is not _NONE, tokens.topk_ids, self.sums
        if some and sums is Sums.BY_EXPERTS_OR_DISPATCHER:
            if self.dispatcher.takes_unreduced(tokens):
                rows = self.experts.apply_unreduced(tokens, weights, scratch)
                if rows is not None:
                    return rows
        if ids is None or sums in BY_EXPERTS:  # (L, C, H), or (R, H)
            y = self._place(tokens, out, self._output_dtype)
            if some:
                self.experts.apply(y, tokens, weights, scratch)
            return y
        shape = (*ids.shape, self.problem.hidden_size)
        y_RKH = torch.empty(shape, dtype=self._output_dtype, device=tokens.x.device)
        if some:
            self.experts.apply(y_RKH, tokens, weights, scratch)
        if sums is Sums.BY_DISPATCHER:
            return y_RKH
        y = self._place(tokens, out, self.problem.dtype)
        if some:
            assert tokens.topk_weights is not None
            self.experts.weight_and_reduce(y_RKH.flatten(0, 1), ids, tokens.topk_weights, y)
        return y

    def _place(self, tokens: Dispatched, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return memory for what the dispatcher takes, (R, H) or (L, C, H)."""
        x, ids, offered = tokens.x, tokens.topk_ids, None
        if self._moves:
            offered = self.dispatcher.output(tokens)
        elif (ids is not None or self._fused) and out is not None and len(out) == len(x):
            # Without transfer, the experts write the caller's output directly.
            offered = out if out.is_contiguous() and not out.data_ptr() % ALIGNMENT else None
        if offered is not None:
            return offered
        shape = (*x.shape[:-1], self.problem.hidden_size)  # x may be packed
        return torch.empty(shape, dtype=dtype, device=x.device)

    def _finalize(
        self,
        y: Tensor | Unreduced,
        tokens: Dispatched,
        scratch: Scratch,
        x_TH: Tensor,
        out: Tensor | None,
    ) -> Pending[Tensor]:
        """Launch the combine, and give back the scratch, where `Unreduced` rows lie until then."""
        try:
            if out is None and not self.dispatcher.makes_output:
                out = torch.empty_like(x_TH)
            combining = self.dispatcher.finalize(y, tokens, out)  # type: ignore[arg-type]
            assert isinstance(combining, Pending), "finalize must return a Pending"
            return combining
        finally:
            scratch.give_back()

    # -- around calls -----------------------------------------------------------------------

    def memory(self, num_tokens: int | None = None) -> MemoryReport:
        """Return the bytes needed when every rank passes ``num_tokens`` tokens.

        num_tokens: default: problem.max_num_tokens; InvalidInput is raised if there is neither.
        """
        from moekit.runtime.memory import MemoryReport

        tokens = self.problem.max_num_tokens if num_tokens is None else num_tokens
        return MemoryReport.of(self.dispatcher, self.experts, check_tokens(tokens))

    def warmup(
        self, weights: PackedWeights, num_tokens: int, *, ids_dtype: Any = None, above: int = 0
    ) -> None:
        """Run calls of 1, 2, 4 ... and ``num_tokens`` random tokens.

        This grows the workspace, and compiles what compiles at first use, for every size up to
        ``num_tokens`` (kernels that change with the size change at most once per factor of two).
        Calls that take over a second are logged with their time. Collective: every rank must call
        it with the same arguments.

        Args:
            ids_dtype: the torch.dtype of all calls' ids; by default they may be int32 and int64.
            above: make no calls of so many tokens or fewer, except ``num_tokens``. It has no
                effect on libraries that time their kernels in these calls.

        Raises:
            PeerFailed: A rank warms up for another number of tokens, or did not come.
        """
        from moekit.runtime.warmup import warm_up

        warm_up(self, weights, check_tokens(num_tokens), ids_dtype, above)

    def destroy(self) -> None:
        """Free the dispatcher's buffers; idempotent."""
        self.dispatcher.destroy()


def _tried(
    function: Callable[..., _T], *args: object
) -> tuple[_T, None] | tuple[None, BaseException]:
    """Return what the function returns, and what it raises: it runs while tokens are in flight,
    which must arrive all the same."""
    try:
        return function(*args), None
    except BaseException as error:
        return None, error


def _at(x: Tensor, part: Callable[[], _T]) -> _T:
    """Run a part of a call on the device of x, in any thread."""
    with on_device(x):
        return part()
