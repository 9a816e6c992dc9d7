"""The contract between the kernel and its backends: what a backend author reads.

A dispatcher implements `PrepareAndFinalize`, an experts backend `PermuteExpertsUnpermute`. They
exchange `Routing`, `Dispatched` and `PackedWeights`.

Shape suffixes: T tokens on this rank, K top-k, H hidden size, I intermediate size on this rank,
L local experts, R dispatched rows, C rows that one expert of the batched layout can hold.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from moekit.discovery.specs import Backend, DispatcherSpec, ExpertsSpec
from moekit.problem import MoEProblem, quant
from moekit.problem.weights import ExpertWeights
from moekit.runtime.overlap import Pending
from moekit.runtime.units import size_text

if TYPE_CHECKING:
    import torch.distributed as dist

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


@dataclass(frozen=True, repr=False)
class PackedWeights:
    """Weights in a backend's own layout.

    backend: the name in its spec.
    experts: tensors with the L local experts in dim 0, so that experts can be moved.
    shared: tensors that belong to no single expert, for example a static activation scale.
    made_for: what `ModularKernel.pack` packed them for; a kernel for something else refuses them.
    """

    backend: str
    experts: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    made_for: tuple[object, ...] | None = field(default=None, kw_only=True)

    def __getitem__(self, name: str) -> Tensor:
        return self.experts[name]

    def get(self, name: str) -> Tensor | None:
        """Return the named tensor, of `experts` or `shared`, or None."""
        found = self.experts.get(name)
        return self.shared.get(name) if found is None else found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (*self.experts.values(), *self.shared.values()))

    def __repr__(self) -> str:
        held = {**self.experts, **self.shared}
        each = [f"{n} {tuple(t.shape)} {str(t.dtype)[6:]}" for n, t in held.items()]
        devices = {str(t.device): None for t in held.values()}
        return (
            f"{type(self).__name__}({self.backend}: {', '.join(each)}; "
            f"{size_text(self.nbytes)} on {', '.join(devices)})"
        )


class PrepareAndFinalize(Backend):
    """Moves tokens to the ranks of their experts, and the results back.

    It talks only in the group it is given, which need not be WORLD, and passes
    ``moekit.plugin.resolve(problem, group)`` to ``super().__init__``: ranks that differ
    raise there, and checked kernels agree in ``self.group``; where that is None, no rank checks
    another. State belongs to the call: `prepare` puts what `finalize` needs into
    ``Dispatched.handle``. Two calls may be in flight, and finish in any order; the caller's
    tensors are never modified.
    """

    interface = "PrepareAndFinalize"

    # Whether `finalize` also takes ``out_TH=None``, because its library makes the output tensor.
    makes_output: bool = False
    # Multiprocessors that a transfer occupies, if that is known; benchmarks print it.
    num_sms: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in {"finalize_new", "offers_output"} & set(vars(cls)):
            warnings.warn(
                f"{cls.__qualname__}.{name} is not used any more: set makes_output if finalize "
                "takes out_TH=None, and override output to offer memory for y",
                DeprecationWarning,
                stacklevel=2,
            )

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
        """Combine the experts' output into ``out_TH``, write every element, and return it.

        A transfer that overlaps is launched only; y and ``dispatched`` live until the result is
        taken. Tokens without any expert get zeros.

        Args:
            y: in the problem's dtype, or `output_dtype`. STANDARD: (R, H), weighted and summed over
                K. BATCHED: (L, C, H), raw expert rows, padding undefined.
            out_TH: (T, H). None only if `makes_output`: then return a tensor of the library's.
        """

    def output(self, dispatched: Dispatched) -> Tensor | None:
        """Return a tensor for y that `finalize` reads without a copy, or None for no such tensor.

        The experts then write there. A class that overrides this method always returns a tensor,
        and counts it in `buffer_bytes`.
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


class PermuteExpertsUnpermute(Backend):
    """Runs the local experts over dispatched tokens: GEMM 1, activation, GEMM 2."""

    interface = "PermuteExpertsUnpermute"

    # For `quantize`: a backend's own function of the same arguments may be faster.
    quantizer: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(quant.quantize)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        self.spec = spec
        self.problem = problem

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

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return the token counts that a warm-up for up to ``num_tokens`` must include."""
        return (num_tokens,)

    def tuning(self) -> AbstractContextManager[object]:
        """Calls of `apply` within it may search for a library's fastest kernels: warm-up's do."""
        return nullcontext()


@dataclass(frozen=True)
class BufferSpec:
    """A scratch buffer an experts backend asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def offers_output(dispatcher: PrepareAndFinalize) -> bool:
    """Return whether the experts write to `PrepareAndFinalize.output` of this dispatcher."""
    return type(dispatcher).output is not PrepareAndFinalize.output


def output_dtype(
    problem: MoEProblem, experts: ExpertsSpec, dispatcher: DispatcherSpec | None = None
) -> torch.dtype:
    """The dtype of the experts' output ``y``; the dispatcher counts if it applies the weights."""
    taken = dispatcher is None or dispatcher.weights_in_fp32 or not dispatcher.applies_weights
    wide = experts.weights_in_fp32 and not experts.reduces and taken
    return torch.float32 if wide and problem.dtype == torch.float16 else problem.dtype
