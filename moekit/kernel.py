"""The composed MoE layer. Read top to bottom, this file is the data flow.

    tokens -> PrepareAndFinalize.prepare -> PermuteExpertsUnpermute.apply
           -> PrepareAndFinalize.finalize -> out

Shape suffixes: T tokens on this rank, K top-k, H hidden size, I intermediate size on this rank,
L local experts, R dispatched rows, C rows of a batched expert's slab.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from moekit import checks, quant
from moekit.answers import packed_by
from moekit.checks import check_call, check_function, check_shared, check_tokens, weights_of
from moekit.errors import InvalidInput, PeerFailed, WeightsError
from moekit.group import Together, named, turn_in
from moekit.overlap import InFlight as InFlight
from moekit.overlap import Pending as Pending
from moekit.problem import ActivationFormat, MoEProblem
from moekit.weights import ExpertWeights
from moekit.workspace import BufferSpec as BufferSpec
from moekit.workspace import Layout, output_dtype, settle
from moekit.workspace import MemoryReport as MemoryReport
from moekit.workspace import Workspace as Workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from moekit.plugins import DispatcherSpec, ExpertsSpec
    from moekit.select import Explanation

logger = logging.getLogger("moekit")

_MAX_LAYOUTS = 1024
_ALONE = nullcontext()

# (x_RH, valid_rows_R or None) -> (quantized_RH, scale)
Quantizer = Callable[[Tensor, "Tensor | None"], "tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    topk_weights: (T, K) float32, anything (even NaN) where the id is -1. topk_ids: (T, K) int32 or
    int64, global physical expert ids, -1 for "no expert" (all of a padding token's ids are -1). A
    token names an expert at most once.
    """

    topk_weights: Tensor
    topk_ids: Tensor


@dataclass(frozen=True)
class Dispatched:
    """The tokens that reached this rank, as `PrepareAndFinalize.prepare` hands them over.

    STANDARD: x (R, H); topk_ids (R, K') *local* expert ids in [0, L), -1 where the slot is not
    for this rank; topk_weights (R, K') float32. Rows with no local expert are padding and may
    hold anything, NaN included. NaN in another row spoils only its own output, or a shared scale.
    BATCHED: x (L, C, H); expert_num_tokens (L,) int32, rows at or beyond it are padding; ids and
    weights are None.
    x_scale: None for unquantized x; else fp32, (R or 1, groups) or (L, C, groups) or (1, 1, 1),
    groups as in `OperandQuant.scale_shape`. A per-tensor scale may come as one scale per row.
    handle: the dispatcher's own, for finalize.
    """

    x: Tensor
    x_scale: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    expert_num_tokens: Tensor | None = None
    handle: Any = None


@dataclass(frozen=True)
class PackedWeights:
    """Weights in a backend's own layout.

    backend: its spec's name.
    experts: tensors with the L local experts in dim 0, so that experts can be moved.
    shared: what belongs to no single expert (a static activation scale, say).
    made_for: what `ModularKernel.pack` packed them for; a kernel for something else refuses them.
    """

    backend: str
    experts: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    made_for: tuple[object, ...] | None = field(default=None, kw_only=True)

    def __getitem__(self, name: str) -> Tensor:
        return self.experts[name]

    def get(self, name: str) -> Tensor | None:
        """The named tensor, per-expert or shared, or None."""
        found = self.experts.get(name)
        return self.shared.get(name) if found is None else found

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.experts.values(), *self.shared.values()))


class PrepareAndFinalize(ABC):
    """Moves tokens to the ranks of their experts, and the results back.

    It talks only in the group it is given, which need not be WORLD, and passes
    ``moekit.group.resolve(problem, group)`` to ``super().__init__``: ranks that differ raise there,
    and checked kernels agree in ``self.group``; where that is None, no rank checks another.
    State belongs to the call: `prepare` puts what `finalize` needs into ``Dispatched.handle``. Two
    calls may be in flight, and finish in any order; the caller's tensors are never modified.
    """

    # Multiprocessors that a transfer occupies, where that is known; benchmarks print it.
    num_sms: int | None = None

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        self.spec = spec
        self.problem = problem
        self.group = group

    @abstractmethod
    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        """Quantizes with ``quantize`` (None: leave as it is) and dispatches.

        x_TH is contiguous, in the problem's dtype; ids are contiguous, of ``spec.ids_dtype``.
        """

    @abstractmethod
    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        """Combines the experts' output into ``out_TH`` and returns it. Every element is written.

        What overlaps is launched and returns; y and ``dispatched`` live until the result is taken.
        y: BATCHED (L, C, H) raw expert rows, padding undefined; STANDARD (R, H) weighted and summed
        over K. In the problem's dtype, or `output_dtype`. Tokens without any expert get zeros.
        """

    def finalize_new(self, y: Tensor, dispatched: Dispatched, x_TH: Tensor) -> Pending[Tensor]:
        """`finalize` into a new tensor like x_TH, for libraries that bring their own."""
        return self.finalize(y, dispatched, torch.empty_like(x_TH))

    @property
    def offers_output(self) -> bool:
        """Whether `output` gives a place, so that the experts' output takes no other memory."""
        return False

    def output(self, dispatched: Dispatched) -> Tensor | None:
        """Where `finalize` reads y from without copying it, shaped as it takes it; None: anywhere.

        The experts then write there. It is counted in `buffer_bytes`.
        """
        return None

    @abstractmethod
    def max_rows(self, num_tokens: int) -> int:
        """Most rows (STANDARD: R, BATCHED: C) when every rank passes ``num_tokens`` tokens."""

    def buffer_bytes(self) -> int:
        """Bytes this dispatcher keeps allocated between calls."""
        return 0

    def transient_bytes(self, num_tokens: int) -> int:
        """Bytes that one call allocates and frees, for ``num_tokens`` on every rank."""
        return 0

    def abort(self, reason: str) -> None:  # noqa: B027 (doing nothing is a valid choice)
        """Tells the other ranks that this rank's unchecked call failed before `prepare`: they raise
        PeerFailed, which names this rank. One that does so declares ``aborts``."""

    def abandon(self, dispatched: Dispatched) -> None:  # noqa: B027 (likewise)
        """The experts failed on some rank: no rank will call `finalize` for these tokens."""

    def destroy(self) -> None:  # noqa: B027 (likewise)
        """Frees buffers and handles; idempotent."""


class PermuteExpertsUnpermute(ABC):
    """Runs the local experts over dispatched tokens: GEMM 1, activation, GEMM 2."""

    # For `quantize`: a backend's own function of the same arguments may be faster.
    quantizer: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(quant.quantize)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        self.spec = spec
        self.problem = problem

    @property
    def slabs(self) -> bool:
        """Whether tokens lie in slabs with room for each token once, on one side or inside."""
        return self.spec.format is ActivationFormat.BATCHED

    @abstractmethod
    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Converts to this backend's layout, once. Pure: ``weights`` stay as they are.

        ``weights`` are checked against the problem, and w13 holds gate and up in halves.
        """

    @abstractmethod
    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        """Scratch that `apply` needs for at most ``rows`` rows (STANDARD: R, BATCHED: C)."""

    @abstractmethod
    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        """Writes the experts' output to ``y`` (the problem's dtype, or `output_dtype`).

        STANDARD, ``spec.reduces``: y (R, H), weighted by ``topk_weights`` and summed over K'; rows
        with no local expert are set to zero.
        STANDARD otherwise: y (R, K', H), slots with id -1 left undefined.
        BATCHED: y (L, C, H), rows at or beyond ``expert_num_tokens`` left undefined.
        ``workspace`` is what `workspace` asked for, uninitialised.
        """

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantizes activations (..., R, H) as the problem's scheme wants: (quantized, scale).

        A static scale is ``weights.shared["a1_scale"]``, shape (1, 1). ``valid_rows`` (R,) bool:
        rows outside it must not influence a scale that rows share, and come out undefined.
        """
        activation = self.problem.quant.activation
        assert activation is not None
        static = weights.get("a1_scale") if activation.static else None
        return self.quantizer(x_RH, activation, static, valid_rows)

    def transient_bytes(self, rows: int) -> int:
        """Bytes `apply` allocates outside the workspace (a library's own buffers)."""
        return 0

    def tuning(self) -> AbstractContextManager[object]:
        """Calls of `apply` within it may search for a library's fastest kernels: warm-up's do."""
        return nullcontext()


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
        sizes = sorted({*(1 << n for n in range(num_tokens.bit_length())), num_tokens})
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
