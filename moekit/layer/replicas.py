"""The placement of experts on physical slots, and the choice of a replica for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import InvalidInput, InvalidProblem
from moekit.problem import MoEProblem, partition
from moekit.runtime.checks import ID_DTYPES, check_ids, check_tensor, check_tokens
from moekit.untrusted.arguments import shown

# Odd multipliers with random bits for a hash modulo 2**64 of a token's position and its expert.
_TOKEN, _EXPERT, _MIX = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x369DEA0F31A53F85


def to_physical(routing: Routing, replicas: Tensor, offset: int = 0) -> Routing:
    """Replace logical expert ids by physical ids, spreading tokens over each expert's replicas.

    A hash of the token's position in the batch and of the expert picks the replica, so a regular
    pattern of tokens favours none of them: of n tokens, each of M replicas receives about n / M.
    The result depends on the arguments only, and nothing synchronizes with the device.

    Args:
        routing: Weights (T, K) and logical ids (T, K); -1 stands for no expert.
        replicas: (E, M) int32 or int64, the physical ids of each logical expert's replicas,
            padded with -1.
        offset: The number of this token batch. Different batches start with different replicas;
            ranks that hold the same tokens must pass the same number.

    Returns:
        The same weights with physical ids.

    Raises:
        InvalidInput: An argument has the wrong type, shape, dtype or values.
    """
    ids, offset = routing.topk_ids, check_tokens(offset, "offset")
    for name, table in (("topk_ids", ids), ("replicas", replicas)):
        check_tensor(name, table)
        if table.dim() != 2 or table.dtype not in ID_DTYPES:
            raise InvalidInput(
                f"{name} must have two dimensions and dtype int32 or int64 (got {shown(table)})"
            )
    replicas = replicas.to(ids.device, ids.dtype)
    counts = (replicas >= 0).sum(dim=1)
    if replicas.device.type == "cpu":
        if bool((counts == 0).any()):
            missing = int((counts == 0).nonzero()[0])
            raise InvalidInput(f"logical expert {missing} has no replica: every expert needs one")
        check_ids(ids, len(replicas))
    logical = ids.clamp(min=0)
    # Experts start with different replicas, so the assignments of one token do not all go to the
    # first ones. Batches of one token are spread by ``offset`` alone, which is exactly even.
    turn = logical + offset
    if len(ids) > 1:
        token = torch.arange(len(ids), device=ids.device)[:, None]
        hashed = torch.add(token * _TOKEN, logical.long(), alpha=_EXPERT)
        turn = turn + ((hashed ^ hashed >> 32) * _MIX >> 33)
    replica = turn % counts[logical]
    physical = replicas[logical, replica]
    return replace(routing, topk_ids=torch.where(ids < 0, ids, physical))


def check_replicas(replicas: Tensor, problem: MoEProblem, device: torch.device) -> None:
    """Raise InvalidInput unless ``replicas`` is a table that a layer of ``problem`` can use."""
    check_tensor("replicas", replicas)
    shaped = replicas.dim() == 2 and replicas.shape[0] == problem.num_experts
    if not shaped or replicas.dtype not in ID_DTYPES:
        raise InvalidInput(
            f"replicas must be ({problem.num_experts}, M) of int32 or int64, one row of physical "
            f"ids for each expert (got {tuple(replicas.shape)} {replicas.dtype})"
        )
    if replicas.device != device:
        raise InvalidInput(f"replicas must be on {device} (got {replicas.device}): move them")
    end = problem.num_physical_experts
    outside = ((replicas < -1) | (replicas >= end)).any()
    if bool(outside | (replicas < 0).all(dim=1).any()):
        raise InvalidInput(
            f"replicas must hold physical ids 0..{end - 1}, at least one in each row, padded "
            "with -1"
        )


@dataclass(frozen=True)
class Placement:
    """The logical expert (0..E-1) of each of P physical slots; rank r holds ``slots(r)``.

    A physical slot is a place for one expert's weights. Every expert has at least one slot, and a
    rank may hold several copies of an expert. Raises InvalidInput naming everything that is wrong.
    """

    physical_to_logical: tuple[int, ...]
    num_experts: int
    ep_size: int

    @classmethod
    def default(cls, problem: MoEProblem, strategy: str = "linear") -> Placement:
        """Return the placement after loading.

        "linear" gives each rank a contiguous share, and replicas repeat the first experts;
        "round_robin" puts expert e on rank ``e % ep_size``. The first ranks hold the remainder.
        Raises InvalidProblem for another strategy, or "round_robin" with redundant experts.
        """
        experts, ranks = problem.num_experts, problem.parallel.ep_size
        if strategy == "linear":
            slots = range(problem.num_physical_experts)
            return cls(tuple(map(problem.logical_expert, slots)), experts, ranks)
        if strategy != "round_robin":
            raise InvalidProblem(
                f"expert_placement_strategy={shown(strategy)}: it must be linear or round_robin"
            )
        if problem.num_redundant_experts:
            raise InvalidProblem(
                "expert_placement_strategy='round_robin' places no replicas (got "
                f"num_redundant_experts={problem.num_redundant_experts}): use 'linear'"
            )
        held = (expert for rank in range(ranks) for expert in range(rank, experts, ranks))
        return cls(tuple(held), experts, ranks)

    def __post_init__(self) -> None:
        E, held, faults = self.num_experts, self.physical_to_logical, []
        if not (1 <= E <= len(held) and 1 <= self.ep_size <= len(held)):
            raise InvalidInput(
                f"{len(held)} slots cannot hold {shown(E)} experts on {shown(self.ep_size)} ranks"
            )
        if outside := sorted({e for e in held if not 0 <= e < E}):
            faults.append(f"slots hold {outside[:8]}, but experts are 0..{E - 1}")
        if missing := sorted(set(range(E)) - set(held)):
            faults.append(f"{len(missing)} experts have no slot: {missing[:8]}")
        if faults:
            raise InvalidInput(f"not a placement of {E} experts: {'; '.join(faults)}")

    def slots(self, rank: int) -> range:
        """Return the physical ids of a rank's slots: a contiguous share, see `partition`."""
        return partition(len(self.physical_to_logical), self.ep_size, rank)

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the logical experts of a rank's slots."""
        return tuple(self.physical_to_logical[slot] for slot in self.slots(rank))

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
        """Return `replicas` for `moekit.to_physical`: (E, P - E + 1) int64, -1 past the last."""
        width = len(self.physical_to_logical) - self.num_experts + 1
        padded = [[*slots, *[-1] * (width - len(slots))] for slots in self.replicas]
        return torch.tensor(padded, dtype=torch.int64, device=device)

    def rank_loads(self, load_E: Tensor) -> Tensor:
        """Return the tokens of each rank, (ep_size,) float64, if replicas share them evenly."""
        shape = (self.num_experts,)
        check_tensor("load_E", load_E)
        if load_E.shape != shape or load_E.is_complex():
            raise InvalidInput(
                f"load_E is {shown(load_E)}, expected a tensor {shape} of real numbers"
            )
        copies = torch.tensor([len(slots) for slots in self.replicas], device="cpu")
        load_P = (load_E.cpu().double() / copies)[list(self.physical_to_logical)]
        loads = torch.zeros(self.ep_size, dtype=torch.float64, device="cpu")
        return loads.index_add_(0, torch.tensor(self.rank_of, device="cpu"), load_P)

    def imbalance(self, load_E: Tensor) -> float:
        """Return the heaviest rank's load over the mean: from 1 (balanced) to ep_size."""
        loads = self.rank_loads(load_E)
        return float(loads.max() / loads.mean()) if float(loads.sum()) > 0 else 1.0
