"""Policies: choose a placement from the load of the experts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moekit.errors import InvalidInput, InvalidProblem
from moekit.layer.replicas import Placement

Policy = Callable[[Tensor, Placement], "Tensor | Sequence[int]"]
"""(load_E, current placement) -> the logical expert of each of P physical experts.

load_E are tokens of each logical expert, (E,) float64 on the CPU. All ranks must return the same.
"""


@dataclass(frozen=True)
class Balanced:
    """Replicate the experts with the most load per replica, then pack all of them onto ranks.

    Replicas of an expert go to different ranks, unless the hottest rank has less load otherwise.
    Experts keep their rank and their place on it if that changes no rank's load.

    Args:
        num_groups: Groups of consecutive experts, as in grouped top-k.
        num_nodes: Nodes of consecutive ranks. Every node holds the same number of groups, and
            replicates and packs their experts only, so a token's experts are on few nodes. With
            one node, an expert may be on any rank.

    Raises:
        InvalidProblem: When called: experts, ranks or replicas do not divide into the groups and
            nodes.
    """

    num_groups: int = 1
    num_nodes: int = 1

    def __call__(self, load_E: Tensor, current: Placement) -> Sequence[int]:
        """Return the logical expert of each physical expert; see `Policy`."""
        load: list[float] = load_E.tolist()
        E, P, ep = current.num_experts, len(current.physical_to_logical), current.ep_size
        G, N = self.num_groups, self.num_nodes
        if min(G, N) < 1 or E % G or G % N or ep % N or (N > 1 and P % ep):
            raise InvalidProblem(
                f"{E} experts and {P} physical experts on {ep} ranks do not divide into "
                f"num_groups={G} on num_nodes={N}; correct these, or use Balanced()"
            )
        members = [range(g * E // G, (g + 1) * E // G) for g in range(G)]
        ranks = [current.on_rank(rank) for rank in range(ep)]
        nodes = [ranks[n * ep // N : (n + 1) * ep // N] for n in range(N)]
        weights = {group: sum(load[e] for e in members[group]) for group in range(G)}
        groups_of = _nearest(
            _pack(dict.fromkeys(weights, 1), weights, [G // N] * N),
            [[e * G // E for rank in node for e in rank] for node in nodes],
        )
        placed: list[int] = []
        for node, groups in zip(nodes, groups_of, strict=True):
            sizes = [len(rank) for rank in node]
            bins = _place({e: load[e] for group in groups for e in members[group]}, sizes)
            for rank, experts in zip(node, _nearest(bins, node), strict=True):
                placed += _in_place(experts, rank)
        return placed


def improve(policy: Policy, load_E: Tensor, now: Placement, min_gain: float = 0.0) -> Placement:
    """Return the policy's placement if it lowers the load of the hottest rank, else ``now``.

    Args:
        load_E: Tokens of each logical expert, (E,).
        min_gain: The fraction by which the hottest rank's load must fall.

    Raises:
        InvalidInput: The policy returned no placement of the same experts.
    """
    now.rank_loads(load_E)  # raises for a wrong load_E
    held = torch.as_tensor(policy(load_E.clone(), now), device="cpu").tolist()
    if len(held) != (slots := len(now.physical_to_logical)):
        raise InvalidInput(f"the policy returned {len(held)} ids, expected one for each of {slots}")
    proposal = replace(now, physical_to_logical=tuple(held))
    before, after = (float(p.rank_loads(load_E).max()) for p in (now, proposal))
    return proposal if after < before * (1 - min_gain) else now


def _place(load: Mapping[int, float], sizes: Sequence[int]) -> list[list[int]]:
    """Return bins of ``sizes`` experts, with replicas of an expert in different bins or not.

    Keeping replicas apart can need one more or one less than fits, so both are tried.
    """
    found: list[list[list[int]]] = []
    heaviest: list[float] = []
    for apart in (True, False):
        copies = _replicate(load, sizes, apart)
        shares = {e: load[e] / count for e, count in copies.items()}
        found.append(_pack(copies, shares, sizes, apart))
        heaviest.append(max(sum(shares[e] for e in held) for held in found[-1]))
    return found[heaviest[1] < heaviest[0] * (1 - 1e-9)]


def _replicate(load: Mapping[int, float], sizes: Sequence[int], apart: bool) -> dict[int, int]:
    """Return the number of replicas of each expert that fill bins of ``sizes``.

    apart: at most one replica of an expert in each bin, if that fills them.
    """
    slots = sum(sizes)
    most = max(len(sizes), -(-slots // len(load))) if apart else slots
    copies = dict.fromkeys(load, 1)
    heaviest = [(-weight, 1, expert) for expert, weight in load.items()]
    heapq.heapify(heaviest)
    for _ in range(slots - len(load)):
        _, count, expert = heapq.heappop(heaviest)
        copies[expert] = count + 1
        if count + 1 < most:
            heapq.heappush(heaviest, (-load[expert] / (count + 1), count + 1, expert))
    return copies


def _pack(
    copies: Mapping[int, int], weight: Mapping[int, float], sizes: Sequence[int], apart: bool = True
) -> list[list[int]]:
    """Put the heaviest keys first into the lightest bin; apart: into one without a copy."""
    bins: list[list[int]] = [[] for _ in sizes]
    totals = [0.0] * len(sizes)
    for key in sorted(copies, key=lambda key: (-weight[key], key)):
        for _ in range(copies[key]):
            room = [b for b, size in enumerate(sizes) if len(bins[b]) < size]
            target = min(room, key=lambda b: (apart and key in bins[b], totals[b]))
            if (
                apart
                and key in bins[target]
                and (
                    gifts := [
                        (weight[other], other, b)
                        for b, keys in enumerate(bins)
                        for other in keys
                        if key not in keys and other not in bins[target]
                    ]
                )
            ):  # every bin with room has the key, so another bin makes room
                given, other, giver = min(gifts)
                bins[giver].remove(other)
                bins[target].append(other)
                totals[target] += given
                totals[giver] -= given
                target = giver
            bins[target].append(key)
            totals[target] += weight[key]
    return bins


def _nearest(bins: list[list[int]], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """Reorder equally large bins so that many keys stay where they are ``held``."""
    common = [
        (-len(set(keys) & set(held[place])), place, b)
        for b, keys in enumerate(bins)
        for place in range(len(bins))
        if len(keys) == len(bins[place])
    ]
    order: dict[int, int] = {}
    for _, place, b in sorted(common):
        if place not in order and b not in order.values():
            order[place] = b
    return [bins[order[place]] for place in range(len(bins))]


def _in_place(experts: Sequence[int], before: Sequence[int]) -> list[int]:
    """Reorder ``experts`` so that experts of ``before`` keep their index."""
    left = list(experts)
    slots: list[int | None] = []
    for expert in before:
        slots.append(expert if expert in left else None)
        if expert in left:
            left.remove(expert)
    return [left.pop() if expert is None else expert for expert in slots]
