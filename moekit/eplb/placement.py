"""Which expert each physical slot holds, and what that means for the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.problem import MoEProblem, partition


@dataclass(frozen=True)
class Placement:
    """The logical expert (0..E-1) of each of P physical slots.

    Rank r of ep_size holds the contiguous slots ``slots(r)``. Every expert has a slot, and no rank
    holds an expert twice unless it has more slots than there are experts.
    Raises InvalidInput naming everything that is wrong.
    """

    physical_to_logical: tuple[int, ...]
    num_experts: int
    ep_size: int

    @classmethod
    def default(cls, problem: MoEProblem) -> Placement:
        """Where experts are after loading: replicas repeat the first experts."""
        slots = range(problem.num_physical_experts)
        held = tuple(problem.logical_expert(p) for p in slots)
        return cls(held, problem.num_experts, problem.parallel.ep_size)

    def __post_init__(self) -> None:
        E, held, faults = self.num_experts, self.physical_to_logical, []
        if outside := sorted({e for e in held if not 0 <= e < E}):
            faults.append(f"slots hold {outside[:8]}, which are no expert of 0..{E - 1}")
        if missing := sorted(set(range(E)) - set(held)):
            faults.append(f"{len(missing)} experts have no slot: {missing[:8]}")
        if len(held) < self.ep_size:
            faults.append(f"{len(held)} slots do not give each of {self.ep_size} ranks one")
        for rank in range(self.ep_size):
            mine = [held[slot] for slot in self.slots(rank)]
            twice = sorted(e for e, count in Counter(mine).items() if count > 1)
            if twice and len(mine) <= E:
                faults.append(f"rank {rank} holds experts {twice[:8]} more than once")
        if faults:
            raise InvalidInput(f"not a placement of {E} experts: {'; '.join(faults)}")

    def with_experts(self, physical_to_logical: Tensor | Sequence[int], source: str) -> Placement:
        """The same slots and ranks with other experts, as ``source`` gave them: P integers."""
        wanted = f"{source}: want {len(self.physical_to_logical)} logical ids, one a slot"
        try:
            held = torch.as_tensor(physical_to_logical).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidInput(f"{wanted}, got {physical_to_logical!r}") from error
        integer = not held.is_floating_point() and held.dtype is not torch.bool
        if tuple(held.shape) != (len(self.physical_to_logical),) or not integer:
            raise InvalidInput(f"{wanted}, got shape {tuple(held.shape)} of {held.dtype}")
        try:
            return replace(self, physical_to_logical=tuple(held.tolist()))
        except InvalidInput as error:
            raise InvalidInput(f"{source}: {error}; nothing was moved") from None

    def slots(self, rank: int) -> range:
        """Physical ids of the slots of a rank."""
        return partition(len(self.physical_to_logical), self.ep_size, rank)

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """The logical experts of a rank's slots."""
        slots = self.slots(rank)
        return self.physical_to_logical[slots.start : slots.stop]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each slot."""
        return tuple(rank for rank in range(self.ep_size) for _ in self.slots(rank))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical_to_logical):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    def logical_to_physical(self, device: torch.device | str = "cpu") -> Tensor:
        """`replicas` as `moekit.to_physical` takes them: (E, P - E + 1) int64, -1 past the last.

        The shape depends on E and P alone, so one table can be overwritten by the next.
        """
        width = len(self.physical_to_logical) - self.num_experts + 1
        padded = [[*slots, *[-1] * (width - len(slots))] for slots in self.replicas]
        return torch.tensor(padded, dtype=torch.int64, device=device)

    def rank_loads(self, load_E: Tensor) -> Tensor:
        """Tokens per rank (ep_size,) float64, an expert's load (E,) being spread over its slots."""
        copies = torch.tensor([len(slots) for slots in self.replicas])
        load_P = (load_E.cpu().double() / copies)[list(self.physical_to_logical)]
        shares = load_P.split([len(self.slots(rank)) for rank in range(self.ep_size)])
        return torch.stack([share.sum() for share in shares])

    def imbalance(self, load_E: Tensor) -> float:
        """Heaviest rank's load over the mean: 1 is perfect, ep_size the worst."""
        loads = self.rank_loads(load_E)
        return float(loads.max() / loads.mean()) if float(loads.sum()) > 0 else 1.0
