"""Scratch memory: what experts ask for, the arena that serves it, and the account of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.problem import ActivationFormat

if TYPE_CHECKING:
    from moekit.kernel import PermuteExpertsUnpermute, PrepareAndFinalize
    from moekit.plugins import DispatcherSpec, ExpertsSpec
    from moekit.problem import MoEProblem


@dataclass(frozen=True)
class BufferSpec:
    """A scratch buffer an experts backend asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Where buffers lie in an arena: what a backend asks for again and again, computed once."""

    def __init__(self, specs: Sequence[BufferSpec]) -> None:
        self._specs = tuple(specs)
        self.nbytes = Workspace.nbytes_for(specs)
        # The arena they were laid out in last, and how.
        self.held: tuple[Tensor, list[Tensor]] | None = None

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The buffers, as disjoint parts of ``buffer`` (uint8)."""
        views, offset = [], 0
        for spec in self._specs:
            views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
            offset += Workspace.nbytes_for([spec])
        return views


class Workspace:
    """One growing arena per device, shared by every layer that runs on the same stream.

    Growing during graph capture is refused, and a buffer that was handed out while capturing is
    kept alive for the replays. Kernels that run at the same time on different streams need a
    Workspace each.
    """

    _ALIGN = 256
    _default: Workspace | None = None

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}
        self._captured: list[Tensor] = []
        self._holders: WeakSet[Layout] = WeakSet()

    @classmethod
    def default(cls) -> Workspace:
        """The process-wide arena."""
        if cls._default is None:
            cls._default = cls()
        return cls._default

    @classmethod
    def nbytes_for(cls, specs: Sequence[BufferSpec]) -> int:
        return sum(-(-s.nbytes // cls._ALIGN) * cls._ALIGN for s in specs)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())

    def take(self, wanted: Layout | Sequence[BufferSpec], device: torch.device) -> list[Tensor]:
        """Disjoint uninitialised tensors, valid until the next `take`."""
        layout = wanted if isinstance(wanted, Layout) else Layout(wanted)
        buffer = self._buffers.get(device)
        capturing = is_capturing(device)
        if buffer is None or buffer.nbytes < layout.nbytes:
            if capturing:
                raise InvalidInput(
                    f"the workspace must grow to {layout.nbytes} bytes while a graph is being "
                    "captured; run the largest call once (kernel.warmup(num_tokens)) before "
                    "capturing"
                )
            for holder in self._holders:  # or a buffer that was outgrown is not freed
                holder.held = None
            self._holders.clear()
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            self._buffers[device] = buffer
        if capturing and not any(b is buffer for b in self._captured):
            self._captured.append(buffer)
        held = layout.held
        if held is None or held[0] is not buffer:
            held = layout.held = buffer, layout.views(buffer)
            self._holders.add(layout)
        return held[1]


@cache
def _probe(device_type: str) -> Callable[[], bool]:
    module = None if device_type == "cpu" else torch.get_device_module(device_type)
    return getattr(module, "is_current_stream_capturing", lambda: False)


def output_dtype(
    problem: MoEProblem, experts: ExpertsSpec, dispatcher: DispatcherSpec | None = None
) -> torch.dtype:
    """The dtype of the experts' output ``y``; the dispatcher counts if it applies the weights."""
    taken = dispatcher is None or dispatcher.weights_in_fp32 or not dispatcher.applies_weights
    wide = experts.weights_in_fp32 and not experts.reduces and taken
    return torch.float32 if wide and problem.dtype == torch.float16 else problem.dtype


def is_capturing(device: torch.device) -> bool:
    return bool(_probe(device.type)())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes a kernel needs besides its weights and the caller's own tensors.

    workspace: the shared arena; intermediate: the experts' output and other tensors allocated
    per call; buffers: what the dispatcher keeps.
    """

    num_tokens: int
    workspace: int
    intermediate: int
    buffers: int

    @classmethod
    def of(
        cls, dispatcher: PrepareAndFinalize, experts: PermuteExpertsUnpermute, num_tokens: int
    ) -> MemoryReport:
        """Of a kernel of these two when every rank passes ``num_tokens``."""
        p, batched = experts.problem, experts.spec.format is ActivationFormat.BATCHED
        rows = dispatcher.max_rows(num_tokens)
        output_bytes = p.hidden_size * output_dtype(p, experts.spec, dispatcher.spec).itemsize
        slab = rows * p.num_local_experts if batched else rows
        # The experts write where the dispatcher reads, if it gives a place, or the caller's output
        # where nothing moves and rows are tokens.
        stays = not dispatcher.spec.moves_tokens and not batched and rows == num_tokens
        row_bytes = output_bytes if batched else p.hidden_size * p.dtype.itemsize
        intermediate = 0 if dispatcher.offers_output or stays else slab * row_bytes
        if not batched and not experts.spec.reduces:
            # y_RKH, and weight_and_reduce's fp32 sum with its two temporaries
            intermediate += rows * p.top_k * output_bytes + 3 * rows * p.hidden_size * 4
        if p.quant.activation is not None:
            # the quantized copy of the rows, and fp32 on the way to it
            intermediate += slab * p.hidden_size * 10
        return cls(
            num_tokens=num_tokens,
            workspace=Workspace.nbytes_for(experts.workspace(rows)),
            intermediate=intermediate
            + dispatcher.transient_bytes(num_tokens)
            + experts.transient_bytes(rows),
            buffers=dispatcher.buffer_bytes(),
        )

    @property
    def total(self) -> int:
        return self.workspace + self.intermediate + self.buffers
