"""Adapters in fixed memory, which calls name by slot: loaded, replaced and dropped in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moekit.contract import Adapters, PackedWeights
from moekit.errors import InvalidInput, WeightsError
from moekit.lora.adapter import Adapter
from moekit.problem import MoEProblem
from moekit.runtime.adapters import shapes


class Stack:
    """The adapters of a layer on one rank. CUDA graphs that were captured with it see changes.

    Writes are copies on the current stream: load and drop where calls are launched.
    A token that names an empty slot gets NaN, and an error from a checked kernel.

    Args:
        problem: with ``adapters``.
        experts: as in `Adapter.local`.
        shared: names of the matrices that all experts share (``w13_a``, ``w2_b``). They are kept
            once, and other adapters are refused.
    """

    def __init__(
        self,
        problem: MoEProblem,
        device: torch.device | str,
        experts: Sequence[int] | None = None,
        shared: Iterable[str] = (),
    ) -> None:
        if problem.adapters is None:
            raise InvalidInput("the problem has no room: set adapters=AdapterSlots() in it")
        self.problem, self.experts, self.shared = problem, experts, frozenset(shared)
        self.slots: dict[str, int] = {}
        wanted = shapes(problem)
        if unknown := self.shared - wanted.keys():
            raise InvalidInput(f"shared names {sorted(unknown)}, expected of {sorted(wanted)}")
        made = {}
        for name, (count, experts_, *rest) in wanted.items():
            held = 1 if name in self.shared else experts_
            zeros = torch.zeros(count, held, *rest, dtype=problem.dtype, device=device)
            made[name] = zeros.expand(count, experts_, *rest)
        scaling = torch.full((problem.adapters.count,), torch.nan, device=device)
        self.adapters = Adapters(scaling.float(), **made)

    def on(self, packed: PackedWeights) -> PackedWeights:
        """Return packed weights with these adapters."""
        return replace(packed, adapters=self.adapters)

    @torch.no_grad()
    def load(self, name: str, adapter: Adapter) -> int:
        """Copy an adapter of the whole layer, or of this rank's name, to a slot, and return it.

        An adapter of that name is replaced. Raises WeightsError, which lists what does not fit, and
        InvalidInput if no slot is free.
        """
        slots = self.problem.adapters
        assert slots is not None
        mine = adapter.local(self.problem, self.experts)
        faults = []
        if adapter.rank > slots.rank:
            faults.append(f"its rank is {adapter.rank}, and there is room for {slots.rank}")
        if mine.w13_a is not None and mine.w13_a.shape[1] == 2 and not slots.separate:
            faults.append("gate and up have an A each: set AdapterSlots(separate=True)")
        faults += [
            f"its experts do not share {n}" for n, t in mine.tensors().items()
            if n in self.shared and len(t) != 1
        ]  # fmt: skip
        if faults:
            raise WeightsError(f"the adapter {name!r} does not fit: {'; '.join(faults)}")
        free = set(range(slots.count)) - set(self.slots.values())
        if name not in self.slots and not free:
            raise InvalidInput(f"all {slots.count} slots hold an adapter: drop one before {name!r}")
        slot = self.slots[name] if name in self.slots else min(free)
        held, given = self.adapters.tensors(), mine.tensors()
        for which, into in held.items():
            into = into[slot, :1] if which in self.shared else into[slot]
            into.zero_()
            if (t := given.get(which)) is not None:
                rank = t.shape[-1 if which.endswith("b") else -2]
                room = into[..., :rank] if which.endswith("b") else into[..., :rank, :]
                room.copy_(t)  # A that gate and up share, and what experts share, broadcasts
        self.adapters.scaling[slot] = adapter.scaling
        self.slots[name] = slot
        return slot

    def drop(self, name: str) -> None:
        """Free the slot of an adapter."""
        self.adapters.scaling[self.slot(name)] = torch.nan
        del self.slots[name]

    def slot(self, name: str) -> int:
        """Return the slot of an adapter. Raises InvalidInput, which lists the loaded ones."""
        if name not in self.slots:
            raise InvalidInput(f"there is no adapter {name!r} (loaded: {sorted(self.slots)})")
        return self.slots[name]

    def ids(self, names: Sequence[str | None]) -> Tensor:
        """Return ``Routing.adapter_ids`` for the adapter of each token, None for none."""
        ids = [-1 if name is None else self.slot(name) for name in names]
        return torch.tensor(ids, dtype=torch.int32, device=self.adapters.scaling.device)
