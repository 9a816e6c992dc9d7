"""The library's objects. Each serves one call at a time, so every in-flight call takes a *lane*.

All layers of one shape share lanes, which are created when first needed; calls that run one after
another need one lane. Creation is collective: all ranks start their calls in the same order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError
from moekit.plugin import CallBuffers, SharedBuffers, exchange, farewell, gpu_fault, round_up

from .layout import Layout, Wire

logger = logging.getLogger("moekit")

# How long to wait for other ranks before freeing memory that they may still write to. Only the end
# of their last kernel is missing then, so a rank that takes longer has failed.
_PATIENCE = 10.0


def lane_bytes(at: Layout, wire: Wire, dtype: torch.dtype) -> int:
    """Return the device memory of a lane: the library's `AllToAllIntraNode`s, and the output."""
    sent = round_up(wire.row_bytes + 4 * wire.scales + 4, 16)
    rows = at.tokens * at.slabs
    returned = round_up(4 * at.hidden_size, 16)
    peer = 16 + round_up(4 * at.slabs, 16) + rows * max(sent, returned)
    indices = 6 * 4 * rows * at.ranks + 4 * at.slabs * at.ranks * 2 + 4 * at.tokens
    y = at.slabs * at.slab_rows * at.hidden_size * dtype.itemsize
    return at.rounds * (at.ranks * peer + indices) + y


@dataclass(frozen=True)
class Lane:
    """Hold the library's objects and the output buffer of one call."""

    objects: tuple[Any, ...]  # pplx_kernels.AllToAll, one per round
    y_SCH: Tensor  # the experts' output for each library expert of this rank; zero for spares


class Lanes:
    """The lanes of all layers with one group, layout, dtype and wire format."""

    def __init__(
        self, library: Any, group: dist.ProcessGroup, layout: Layout, wire: Wire,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Create the first lane; collective. ``library`` is the class AllToAll."""
        self._library, self._group, self._layout, self._wire = library, group, layout, wire
        self._dtype, self._device = dtype, device
        self.calls = CallBuffers(self._make, group, most=None)

    @property
    def lane_bytes(self) -> int:
        return lane_bytes(self._layout, self._wire, self._dtype)

    @property
    def nbytes(self) -> int:
        return len(self.calls.all) * self.lane_bytes

    def free(self) -> None:
        """Free all lanes. Collective, with a short timeout for ranks that failed."""
        fault = gpu_fault(self.calls.stream, _PATIENCE)
        if why := farewell(self._group, "pplx's buffers", fault, _PATIENCE):
            logger.warning("freeing pplx's buffers without the other ranks: %s", why)
        for each in (each for lane in self.calls.all for each in lane.objects):
            if fault:  # freeing would wait for the GPU; the end of the process frees
                each.destroy = lambda: None
            else:
                each.destroy()
        self.calls.all.clear()

    def _make(self) -> Lane:
        self._check_room()
        at, wire = self._layout, self._wire
        objects = tuple(
            self._library.intranode(
                max_num_tokens=at.tokens,
                num_experts=at.ranks * at.slabs,
                experts_per_token=at.top_k,
                rank=at.rank,
                world_size=at.ranks,
                dp_size=1,
                hidden_dim=at.hidden_size,
                hidden_dim_bytes=wire.row_bytes,
                hidden_dim_scale_bytes=4 * wire.scales,
                group_name=self._group.group_name,
            )
            for _ in range(at.rounds)
        )
        shape = (at.slabs, at.slab_rows, at.hidden_size)
        y_SCH = torch.zeros(shape, dtype=self._dtype, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        # No rank may write to memory that its owner is still clearing.
        dist.all_reduce(torch.zeros(1), group=self._group)
        return Lane(objects, y_SCH)

    def _check_room(self) -> None:
        """Check the free memory of all ranks, as the library ends the process when it gets none."""
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "pplx's buffers cannot be created while a CUDA graph is captured: run the same "
                "calls once before (kernel.warmup)"
            )
        needed, (free, _) = self.lane_bytes, torch.cuda.mem_get_info()
        if free < needed:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
        everyone = map(int, exchange("make pplx's buffers", str(free), self._group))
        if small := {rank: room for rank, room in enumerate(everyone) if room < needed}:
            raise BackendError(
                f"pplx needs {needed:,} bytes for buffers, but these ranks have less free: "
                f"{small}; lower max_num_tokens"
            )


# All layers of the process share this.
shared: SharedBuffers[Lanes] = SharedBuffers(Lanes.free)
