"""A stack of adapters in fixed memory: they are loaded, replaced and dropped in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moekit.contract import Adapters, PackedWeights
from moekit.errors import InvalidInput, WeightsError
from moekit.lora.adapter import Adapter
from moekit.problem import MoEProblem
from moekit.runtime.adapters import shapes


class Stack:
    """The adapters of a layer on one rank. Captured CUDA graphs see every change.

    `load` and `drop` write on the current stream: call them on the stream of the layer's calls. If
    a token names an empty slot, its output is NaN, and a checked kernel raises an error.

    Args:
        problem: a problem with ``adapters``.
        experts: as in `Adapter.local`.
    """

    def __init__(
        self,
        problem: MoEProblem,
        device: torch.device | str,
        experts: Sequence[int] | None = None,
    ) -> None:
        if problem.adapters is None:
            raise InvalidInput("the problem has no room: set adapters=AdapterSlots() in it")
        self.problem, self.experts, self.room = problem, experts, problem.adapters
        self.slots: dict[str, int] = {}
        named = shapes(problem).items()
        made = {n: torch.zeros(shape, dtype=problem.dtype, device=device) for n, shape in named}
        empty = torch.full((self.room.count,), torch.nan, dtype=torch.float32, device=device)
        self.adapters = Adapters(empty, **made)

    def on(self, packed: PackedWeights) -> PackedWeights:
        """Return packed weights with these adapters."""
        return replace(packed, adapters=self.adapters)

    @torch.no_grad()
    def load(self, name: str, adapter: Adapter) -> int:
        """Copy an adapter of the whole layer to a slot, and return the slot.

        It replaces an adapter of the same name. Raises WeightsError, which lists everything that
        does not fit, and InvalidInput if no slot is free.
        """
        mine, faults = adapter.local(self.problem, self.experts), []
        if adapter.rank > self.room.rank:
            faults.append(f"its rank is {adapter.rank}, and there is room for {self.room.rank}")
        if mine.w13_a is not None and mine.w13_a.shape[1] == 2 and not self.room.separate:
            faults.append("gate and up have an A each: set AdapterSlots(separate=True)")
        dtype, given = self.problem.dtype, mine.tensors()
        for which, values in given.items():
            if not bool(values.to(dtype).isfinite().all()):  # zeros times them spoil other tokens
                faults.append(f"{which} has NaN or infinite values as {dtype}")
        if faults:
            raise WeightsError(f"the adapter {name!r} does not fit: {'; '.join(faults)}")
        free = set(range(self.room.count)) - set(self.slots.values())
        if name not in self.slots and not free:
            raise InvalidInput(f"all {self.room.count} slots are taken: drop one before {name!r}")
        slot = self.slots[name] if name in self.slots else min(free)
        for which, into in self.adapters.tensors().items():
            into[slot].zero_()
            if (t := given.get(which)) is not None:
                rows = t.shape[-2] if which.endswith("a") else None
                into[slot][..., :rows, : t.shape[-1]] = t  # shared matrices are broadcast
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
        """Return ``Routing.adapter_ids`` for the adapter's name of each token, None for none."""
        ids = [-1 if name is None else self.slot(name) for name in names]
        return torch.tensor(ids, dtype=torch.int32, device=self.adapters.scaling.device)
