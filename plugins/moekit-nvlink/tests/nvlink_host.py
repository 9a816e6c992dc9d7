"""All ranks of a layer in this process: their buffers lie side by side, and steps interleave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import triton_interpreter  # noqa: F401 (patches triton)
from moekit_nvlink.buffers import Buffer, Lost
from moekit_nvlink.kernels.flags import COMBINE
from moekit_nvlink.settings import Settings
from moekit_nvlink.transfer import AssignmentTransfer, RowTransfer

import moekit
from moekit.plugin import Dispatched, Routing

_RAISED_BY_TEST = 2  # in the lower half of a flag; kernels raise 0


def problems(
    ep: int, tp: int, experts: int, top_k: int, hidden: int, capacity: int, copies: int = 1, **more
):
    return [
        moekit.MoEProblem(
            num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=32 * tp,
            max_num_tokens=capacity, device="cpu",
            parallel=moekit.ParallelConfig(
                ep_size=ep, ep_rank=rank // tp, tp_size=tp, tp_rank=rank % tp,
                dp_size=ep * tp // copies,
            ),
            **{"dtype": torch.bfloat16, **more},
        )
        for rank in range(ep * tp)
    ]  # fmt: skip


@dataclass
class Flight:
    """A call of all ranks that has been dispatched."""

    place: int
    arrived: list[Dispatched]
    tokens: list[int] = field(default_factory=list)


class Host:
    """Every call gets poisoned memory, and all ranks take each step in a random order."""

    def __init__(self, layer, batched: bool, programs: int = 3, seed: int = 0):
        kind = AssignmentTransfer if batched else RowTransfer
        self.layer = layer
        self.ranks = [kind.of(p, Settings(programs)) for p in layer]
        self.layout, self._random = self.ranks[0].layout, random.Random(seed)
        self.sets: list[list[Buffer]] = []
        self.lost = [Lost.of(len(layer), torch.device("cpu")) for _ in layer]

    def open(self) -> None:
        """Add a buffer of every rank."""
        at = self.layout
        memory = [torch.zeros(at.nbytes, dtype=torch.uint8) for _ in self.layer]
        for each in memory:
            each[at.ids : at.weights] = 0xFF
        addresses = [each.data_ptr() for each in memory]
        self.sets.append(
            [
                Buffer.of(m, addresses, lost, at.chunks)
                for m, lost in zip(memory, self.lost, strict=True)
            ]
        )

    def _poison(self, buffer: Buffer) -> None:
        """Only ids and flags outlive a call."""
        at = self.layout
        buffer.bytes[: at.ids] = 0xFF
        buffer.bytes[at.weights : at.flags] = 0xFF

    def _take(self, steps) -> None:
        for step in range(len(steps[0])):
            for rank in self._random.sample(range(len(steps)), len(steps)):
                steps[rank][step]()

    def dispatch(self, xs, routings: list[Routing], scales=None, place: int = 0) -> Flight:
        """Dispatch in the buffers of ``place``. Copies of a batch get the same tokens."""
        while len(self.sets) <= place:
            self.open()
        copies = self.ranks[0].ranks.copies
        steps, arrived = [], []
        for i, transfer in enumerate(self.ranks):
            buffer, b = self.sets[place][i], i // copies
            self._poison(buffer)
            scale = None if scales is None else scales[b]
            each, tokens = transfer.send(buffer, xs[b], scale, routings[b])
            steps.append(each())
            arrived.append(tokens)
        self._take(steps)
        return Flight(place, arrived, [len(xs[i // copies]) for i in range(len(self.layer))])

    def combine(
        self, flight: Flight, work, leave=(), refused=False, grads=None
    ) -> list[torch.Tensor]:
        """Let ``work(rank, tokens, y)`` write y, combine, and return each rank's output.

        leave: ranks whose experts leave the sum to the combine: there ``work`` returns Unreduced.
        refused: whether a rank makes the call NaN. grads: (T, K) of each rank, get the sums of the
        router gradients, which ``work`` also writes.
        """
        buffers, steps, outs = self.sets[flight.place], [], []
        for i, (transfer, tokens) in enumerate(zip(self.ranks, flight.arrived, strict=True)):
            y = transfer.output(tokens.handle)
            y.fill_(float("nan"))
            rows = work(i, tokens, y)
            p = self.layer[i]
            outs.append(torch.full((flight.tokens[i], p.hidden_size), float("nan"), dtype=p.dtype))
            if i in leave:
                steps.append(transfer.reduce(tokens.handle, rows, outs[-1]))
            else:
                # The sums are one step, and the combine the next one.
                before = [lambda: None] if leave else []
                sums = None if grads is None else grads[i]
                steps.append(before + transfer.gather(tokens.handle, outs[-1], sums))
        number, flags = int(buffers[0].epoch) + 1, [self.flags(each) for each in buffers]
        told = [int(each.refused) for each in buffers]
        assert any(told) == refused
        for mine in flags:  # the first rank would wait endlessly for the others
            mine[COMBINE.value :] = number << 32 | _RAISED_BY_TEST
        self._take(steps)
        for i, mine in enumerate(flags):
            want = [[number << 32 | each for each in told]] * self.layout.chunks
            assert mine[COMBINE.value :].tolist() == want, f"rank {i}: a flag is missing"
            assert int(buffers[i].epoch) == number and not buffers[i].counters.any()
            assert not buffers[i].refused.any()
            assert not self.lost[i].ranks.any()
        return outs

    def flags(self, buffer: Buffer) -> torch.Tensor:
        """Return the flags (phases, ranks) in a buffer."""
        return buffer.region(
            self.layout.flags, (2 + self.layout.chunks, len(self.layer)), torch.int64
        )
