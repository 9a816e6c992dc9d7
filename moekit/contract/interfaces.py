"""The interfaces of backends, and what they exchange with the kernel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract.pending import Pending
from moekit.contract.sizes import size_text
from moekit.contract.specs import Backend, DispatcherSpec, ExpertsSpec
from moekit.contract.sums import weight_and_reduce
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights

if TYPE_CHECKING:
    from moekit.contract.shared_buffers import Lease

Quantizer = Callable[[Tensor, "Tensor | None"], "tuple[Tensor, Tensor]"]
"""A function: (x_RH, valid_rows_R or None) -> (quantized_RH, scale)."""


@dataclass(frozen=True)
class Routing:
    """The experts of each token, and their weights.

    topk_weights: (T, K) float32; may hold anything, NaN included, where the id is -1.
    topk_ids: (T, K) int32 or int64, global physical expert ids, -1 for no expert (a padding token
    has no other ids). A token names an expert at most once.
    max_tokens: the most tokens that any rank passes to this call, equal on all ranks; None if the
    caller does not know it. A dispatcher of fixed capacity then works for so many tokens only, and
    a composite of dispatchers chooses its member by it.
    adapter_ids: (T,) int32, the adapter slot of each token, -1 for none. Only in problems with
    adapters. None is allowed where there is one slot: every token then has it.
    """

    topk_weights: Tensor
    topk_ids: Tensor
    max_tokens: int | None = None
    adapter_ids: Tensor | None = None

    def most(self, capacity: int) -> int:
        """Return the tokens that a dispatcher of this capacity needs room for, at least 1."""
        return capacity if self.max_tokens is None else max(1, self.max_tokens)

    def part(self, rows: slice | Tensor, most: int) -> Routing:
        """Return the routing of these rows, in a call of at most ``most`` tokens on any rank."""
        names = None if self.adapter_ids is None else self.adapter_ids[rows]
        return Routing(self.topk_weights[rows], self.topk_ids[rows], most, names)


@dataclass(frozen=True)
class Dispatched:
    """The tokens that reached this rank, from `PrepareAndFinalize.prepare`.

    STANDARD: x (R, H); topk_ids (R, K') *local* expert ids in [0, L), -1 for assignments of other
    ranks; topk_weights (R, K') float32. K' is at most top_k, and fewer where a dispatcher sends
    several rows for a token. Rows without a local expert are padding and may hold anything, NaN
    included. NaN in another row affects only its own output, or a shared scale. Ids and weights may
    have any strides.
    BATCHED: x (L, C, H); expert_num_tokens (L,) int32, rows at or beyond it are padding; ids and
    weights are None.
    In both, x is contiguous, and may begin anywhere in its storage; where that is no multiple of 16
    bytes, the kernel copies it for the experts.
    x_scale: None for unquantized x; otherwise fp32, (R or 1, groups) or (L, C, groups) or
    (1, 1, 1), groups as in `OperandQuant.scale_shape`. A per-tensor scale may come as one scale
    per row.
    handle: what the dispatcher's `finalize` needs; others do not look at it.
    num_rows: STANDARD, int32 (1,) on the device of x, or None. Rows from it on are padding with ids
    of -1. Experts may skip them, so that a call of few tokens does not cost as much as R rows.
    adapter_ids: (R,) int32, contiguous: the adapter slot of each row, -1 for none, any value in
    rows without a local expert. Only in problems with adapters: a dispatcher that moves no
    tokens takes it from ``routing.adapter_ids``; where tokens move, the kernel sets it.
    """

    x: Tensor
    x_scale: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    expert_num_tokens: Tensor | None = None
    handle: Any = None
    num_rows: Tensor | None = None
    adapter_ids: Tensor | None = None


@dataclass(frozen=True)
class Unreduced:
    """The output of STANDARD experts before it is weighted and summed over K.

    rows_NH: (N, H) in the problem's dtype, unit stride in H; may lie in the workspace, which is the
    call's until `PrepareAndFinalize.finalize` returns.
    places_RK: (R, K') int32, contiguous: the row of each assignment, anything where the id is -1.
    None: ``r * K' + k``.
    """

    rows_NH: Tensor
    places_RK: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Adapters:
    """Low-rank deltas of this rank's experts, for S adapters, in one layout for all backends.

    For a row with adapter s, ``scaling[s] * B[s, e] @ (A[s, e] @ row)`` is added to the product of
    the row and expert e's matrix. All matrices have the problem's dtype, also over a quantized
    base. A and B of w13, or of w2, are given together or are both None.

    scaling: (S,) float32.
    w13_a: (S, L, G, r, H); G is 2 if `AdapterSlots.separate` and the experts are gated: A of gate
    and of up. Otherwise it is 1. w13_b: (S, L, W, r), W = `MoEProblem.w13_rows`, gate before up.
    Row n of B belongs to A of group ``n // (W / G)``.
    w2_a: (S, L, r, I). w2_b: (S, L, H, r).

    The last two dimensions are contiguous, and each matrix begins at a multiple of 16 bytes if its
    rows are such a multiple. The other strides are arbitrary, and 0 where experts share a matrix.
    An adapter of a smaller rank is padded with zeros. All values are finite, because kernels may
    multiply other tokens' adapters by zero. The memory keeps its address: adapters are
    replaced in place, also between replays of a CUDA graph.
    """

    scaling: Tensor
    w13_a: Tensor | None = None
    w13_b: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Adapters:
        """Return the adapters in a dtype; gradients flow."""
        return replace(self, **{name: t.to(dtype) for name, t in self.tensors().items()})

    def pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return A (S, L, G, r, in) and B of w13 or w2, or None if the matrix has no delta."""
        a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
        if a is None or b is None:
            return None
        return (a if a.dim() == 5 else a[:, :, None]), b

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by name."""
        found = {name: getattr(self, name) for name in ADAPTER_NAMES}
        return {name: t for name, t in found.items() if t is not None}


ADAPTER_NAMES = ("w13_a", "w13_b", "w2_a", "w2_b")


@dataclass(frozen=True, repr=False)
class PackedWeights:
    """Weights in a backend's own layout.

    backend: the name in its spec.
    experts: tensors with the L local experts in dim 0, so that experts can be moved.
    shared: tensors that belong to no single expert, for example a static activation scale.
    made_for: what `ModularKernel.pack` packed them for; a kernel for something else refuses them.
    adapters: deltas that the experts add, set by the caller and not by `pack`. None: no deltas.
    """

    backend: str
    experts: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    made_for: Mapping[str, object] | None = field(default=None, kw_only=True)
    adapters: Adapters | None = field(default=None, kw_only=True)

    def __getitem__(self, name: str) -> Tensor:
        return self.experts[name]

    def get(self, name: str) -> Tensor | None:
        """Return the named tensor, of `experts` or `shared`, or None."""
        found = self.experts.get(name)
        return self.shared.get(name) if found is None else found

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {**self.experts, **self.shared}

    def checksum(self) -> str:
        """Return 16 digits that are the same for equal tensors on any device; wait for it."""
        from moekit.problem.checksum import checksum

        return checksum(self.tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def __repr__(self) -> str:
        held = self.tensors()
        each = [f"{n} {tuple(t.shape)} {str(t.dtype)[6:]}" for n, t in held.items()]
        devices = {str(t.device): None for t in held.values()}
        return (
            f"{type(self).__name__}({self.backend}: {', '.join(each)}; "
            f"{size_text(self.nbytes)} on {', '.join(devices)})"
        )


class PrepareAndFinalize(Backend):
    """Moves tokens to the ranks of their experts, and the results back.

    A dispatcher that moves tokens communicates only in the group that it is given, which need not
    be WORLD. It passes ``moekit.plugin.resolve(problem, group)`` to ``super().__init__``, which
    raises on ranks that differ. Checked kernels make their collective checks in ``self.group``; if
    it is None, they make none. Where nothing moves, `moekit.compose` uses a local dispatcher
    instead.

    State belongs to the call: `prepare` puts what `finalize` needs into ``Dispatched.handle``. Two
    calls may be in flight, and finish in any order. The caller's tensors are never modified.
    """

    interface = "PrepareAndFinalize"

    # Whether `finalize` also takes ``out_TH=None``, because its library makes the output tensor.
    makes_output: bool = False
    # Multiprocessors that a transfer occupies, if that is known; benchmarks print it.
    num_sms: int | None = None
    # Seconds that `prepare` may wait on the host for another rank; None: as long as its library
    # does. A checked kernel sets it, as its ranks enter `prepare` together.
    peer_timeout: float | None = None
    # `finalize` weights and sums with it. The kernel sets it to the experts' function.
    weight_and_reduce: Callable[..., Tensor] = staticmethod(weight_and_reduce)
    # Buffers with ``nbytes`` that layers share, if it keeps any: `destroy` gives them up.
    lease: Lease[Any] | None = None

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        self.spec = spec
        self.problem = problem
        self.group = group

    @property
    def members(self) -> Sequence[PrepareAndFinalize]:
        """The dispatchers that share the calls, if this is a composite; else itself."""
        return (self,)

    def serving(self, max_tokens: int | None) -> PrepareAndFinalize:
        """Return the member that serves a call of these ``Routing.max_tokens``."""
        return self

    @abstractmethod
    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        """Quantize the tokens with ``quantize`` if it is not None, and dispatch them.

        The result may share memory with x_TH and ``routing``: the caller leaves both unchanged
        until the combine has ended.

        Args:
            x_TH: (T, H), contiguous, in the problem's dtype.
            routing: contiguous weights (T, K) float32 and ids (T, K), int32 or int64 as
                ``spec.ids_dtype`` says.
            quantize: takes x_TH and a (T,) bool mask of the tokens that have an expert, because
                only these count for a scale that tokens share. None: send unquantized tokens.
        """

    def takes_unreduced(self, dispatched: Dispatched) -> bool:
        """Return whether `finalize` also takes `Unreduced` for these tokens, and sums it itself.

        Ranks may differ in what they pass.
        """
        return False

    @abstractmethod
    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        """Combine the experts' output into ``out_TH``, write every element, and return it.

        A transfer that overlaps is launched only; y and ``dispatched`` live until the result is
        taken. Tokens without any expert get zeros.

        Args:
            y: in the problem's dtype, or float32 if `weights_in_fp32` in fp16 problems. STANDARD:
                (R, H), weighted and summed over K. BATCHED: (L, C, H), raw expert rows, padding
                undefined. STANDARD in batch-invariant problems: (R, K', H), raw expert rows,
                undefined where the id is -1. `Unreduced` if `takes_unreduced` and the experts
                return it.
            dispatched: of this call; the kernel may have replaced x and x_scale.
            out_TH: (T, H). None only if `makes_output`: then return a tensor of the library's.
        """

    def output(self, dispatched: Dispatched) -> Tensor | None:
        """Return a tensor for y that `finalize` reads without a copy, or None for no such tensor.

        The experts then write there. Called where tokens move. A class that overrides this method
        always returns a tensor, and counts it in `buffer_bytes`.
        """
        return None

    @abstractmethod
    def max_rows(self, num_tokens: int) -> int:
        """Return the most rows (STANDARD: R, BATCHED: C) for ``num_tokens`` on every rank."""

    def buffer_bytes(self) -> int:
        """Return the bytes that this dispatcher keeps allocated between calls."""
        lease = self.lease
        return int(lease.value.nbytes) if lease is not None and lease.held else 0

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a call allocates and frees, for ``num_tokens`` on every rank."""
        return 0

    def abort(self, reason: str) -> None:  # noqa: B027 (doing nothing is a valid choice)
        """Tell the other ranks that this rank's unchecked call failed before `prepare`.

        They raise PeerFailed, which names this rank. A dispatcher that does so declares ``aborts``.
        """

    def abandon(self, dispatched: Dispatched) -> None:  # noqa: B027 (as above)
        """End a call whose experts failed on some rank, in place of `finalize`.

        All ranks do if the kernel is checked, and else only the rank whose experts failed.
        """

    def destroy(self) -> None:
        """Free buffers and handles; idempotent."""
        if self.lease is not None:
            self.lease.release()


class PermuteExpertsUnpermute(Backend):
    """Runs the local experts over dispatched tokens: GEMM 1, activation, GEMM 2."""

    interface = "PermuteExpertsUnpermute"

    @staticmethod
    def quantizer(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Serve `quantize`. A backend may set a faster function of the same arguments."""
        from moekit.problem.quantize import quantize

        return quantize(*arguments)

    # Used wherever this backend's rows are weighted and summed, also in dispatchers. A backend may
    # set a faster function of the same arguments and bits.
    weight_and_reduce: Callable[..., Tensor] = staticmethod(weight_and_reduce)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        self.spec = spec
        self.problem = problem

    @abstractmethod
    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Convert weights to this backend's layout, without changing ``weights``.

        Args:
            weights: `ExpertWeights.canonical`, checked against the problem: w13 (L, 2I or I, H)
                holds gate and up in halves, w2 is (L, H, I). The result may share their memory.
        """

    @abstractmethod
    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        """Return the scratch that `apply` needs for ``rows`` rows (STANDARD: R, BATCHED: C)."""

    @abstractmethod
    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        """Write the experts' output to ``y``.

        Args:
            y: in the problem's dtype, or float32 if `weights_in_fp32` in fp16 problems.
                STANDARD, ``spec.reduces``: (R, H), weighted by ``topk_weights`` and summed over K';
                rows without a local expert are set to zero, except that rows from ``num_rows`` on
                may stay undefined.
                STANDARD otherwise: (R, K', H); rows of assignments with id -1 stay undefined.
                BATCHED: (L, C, H); rows at or beyond ``expert_num_tokens`` stay undefined.
            tokens: what arrived, quantized if ``x_scale`` is not None. Read only; y may be the
                caller's output, which shares no memory with it.
            weights: what `pack` returned, possibly with experts moved. Read only.
            workspace: the buffers that `workspace` asked for, uninitialized, which share no memory
                with the other arguments.
        """

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        """Do as `apply`, but leave the weights and the sum over K to the dispatcher.

        Called in STANDARD problems that are not batch-invariant, of experts that declare `reduces`,
        with R > 0 rows that the dispatcher `takes_unreduced`.

        Returns:
            None to be asked to `apply` this call, best before anything is computed.
        """
        return None

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantize activations (..., R, H) by the problem's scheme; return (quantized, scale).

        A static scale is ``weights.shared["a1_scale"]``, shape (1, 1).

        Args:
            valid_rows: (R,) bool. Other rows must not influence a scale that rows share, and come
                out undefined. None: all rows are valid.
        """
        activation = self.problem.quant.activation
        assert activation is not None
        static = weights.get("a1_scale") if activation.static else None
        return self.quantizer(x_RH, activation, static, valid_rows)

    def transient_bytes(self, rows: int) -> int:
        """Return the bytes that `apply` allocates outside the workspace, as libraries do."""
        return 0

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return the token counts that a warm-up for up to ``num_tokens`` must include."""
        return (num_tokens,)

    def tuning(self) -> AbstractContextManager[object]:
        """Return a context in which `apply` may search for a library's fastest kernels.

        `ModularKernel.warmup` calls within it. A `nullcontext` says that there is no such search.
        """
        return nullcontext()


@dataclass(frozen=True)
class BufferSpec:
    """A scratch buffer that an experts backend asks for.

    shape: ints of at least 0.
    dtype: any torch dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize
