"""Policies: from the experts' load to a placement."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moekit.eplb.placement import Placement
from moekit.errors import InvalidProblem, NameClash, UnknownBackend


class Policy(Protocol):
    """Chooses the expert of every slot."""

    def __call__(self, load_E: Tensor, current: Placement) -> Tensor | Sequence[int]:
        """load_E: tokens per logical expert, (E,) float64 on the CPU, the same on every rank.

        Returns P logical ids, one a slot, and the same ones on every rank.
        """


@dataclass(frozen=True)
class Balanced:
    """Replicates the experts that are heaviest per replica, then packs them onto ranks.

    num_groups, num_nodes: hierarchical balancing. Consecutive experts form equal groups (those of
    grouped top-k), consecutive ranks equal nodes; each node gets as many groups as any other, and
    replicates and packs the experts of its groups only, so that a token's experts are on few
    nodes. The default is one node: every expert can go everywhere.

    Experts stay on the rank, and in the slot, where they are whenever that changes no rank's load.
    A result that is no better than ``current`` is not taken.
    """

    num_groups: int = 1
    num_nodes: int = 1

    def __call__(self, load_E: Tensor, current: Placement) -> Sequence[int]:
        load: list[float] = load_E.tolist()
        E, ep = current.num_experts, current.ep_size
        self._check(current)
        node_ranks = ep // self.num_nodes
        group_of = [e * self.num_groups // E for e in range(E)]
        group_load = [0.0] * self.num_groups
        for expert, group in enumerate(group_of):
            group_load[group] += load[expert]
        nodes = _pack(
            list(enumerate(group_load)), [self.num_groups // self.num_nodes] * self.num_nodes
        )
        ranks = [current.on_rank(rank) for rank in range(ep)]
        node_held = [
            [group_of[e] for held in ranks[n * node_ranks : (n + 1) * node_ranks] for e in held]
            for n in range(self.num_nodes)
        ]
        placed: list[int] = []
        for node, groups in enumerate(_nearest(nodes, node_held)):
            held = ranks[node * node_ranks : (node + 1) * node_ranks]
            sizes = [len(experts) for experts in held]
            members = [e for e in range(E) if group_of[e] in groups]
            copies = _replicate({e: load[e] for e in members}, sum(sizes), most=node_ranks)
            items = [(e, load[e] / n) for e, n in copies.items() for _ in range(n)]
            for before, experts in zip(held, _nearest(_pack(items, sizes), held), strict=True):
                placed += _in_place(experts, before)
        proposal = current.with_experts(placed, type(self).__name__)
        better = proposal.rank_loads(load_E).max() < current.rank_loads(load_E).max()
        return placed if better else current.physical_to_logical

    def _check(self, current: Placement) -> None:
        E, ep, P = current.num_experts, current.ep_size, len(current.physical_to_logical)
        for what, total, parts in (
            ("num_groups and the number of experts", E, self.num_groups),
            ("num_nodes and num_groups", self.num_groups, self.num_nodes),
            ("num_nodes and ep_size", ep, self.num_nodes),
            ("num_nodes and the number of slots", P, self.num_nodes),
        ):
            if parts < 1 or total % parts:
                raise InvalidProblem(
                    f"{what} do not fit: {total} does not divide into {parts} equal parts; "
                    "correct them, or use the policy 'global'"
                )


_FACTORIES: dict[str, Callable[..., Policy]] = {}


def register_policy(name: str, factory: Callable[..., Policy]) -> None:
    """Makes ``policy(name, **options)`` return ``factory(**options)``; raises NameClash."""
    if name in _FACTORIES:
        raise NameClash(f"a policy named {name!r} is registered already; choose another name")
    _FACTORIES[name] = factory


def policy(name: str, **options: object) -> Policy:
    """The named policy: ``"global"``, ``"hierarchical"`` (num_groups, num_nodes), registered ones.

    Raises UnknownBackend for another name.
    """
    if name not in _FACTORIES:
        raise UnknownBackend(f"no policy named {name!r}; there are: {', '.join(_FACTORIES)}")
    return _FACTORIES[name](**options)


register_policy("global", lambda: Balanced())
register_policy("hierarchical", Balanced)


def _replicate(load: dict[int, float], slots: int, most: int) -> dict[int, int]:
    """Copies of each expert, ``slots`` in all; ``most`` of one unless that leaves slots empty."""
    most = max(most, -(-slots // len(load)))
    copies = dict.fromkeys(load, 1)
    heaviest = [(-weight, 1, expert) for expert, weight in load.items()]
    heapq.heapify(heaviest)
    for _ in range(slots - len(load)):
        _, count, expert = heapq.heappop(heaviest)
        copies[expert] = count + 1
        if count + 1 < most:
            heapq.heappush(heaviest, (-load[expert] / (count + 1), count + 1, expert))
    return copies


def _pack(items: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[list[int]]:
    """(key, weight) pairs into bins of exactly ``sizes`` items: heaviest first, to the lightest
    bin with room that has no item of that key."""
    bins: list[list[tuple[float, int]]] = [[] for _ in sizes]
    totals = [0.0] * len(sizes)
    for key, weight in sorted(items, key=lambda item: (-item[1], item[0])):
        room = [b for b, size in enumerate(sizes) if len(bins[b]) < size]
        apart = [b for b in room if all(key != other for _, other in bins[b])]
        target = min(apart or room, key=lambda b: totals[b])
        if not apart:
            # Every bin with room has the key: one without it swaps its lightest fitting item.
            here = {other for _, other in bins[target]}
            swaps = [
                (item, b)
                for b, content in enumerate(bins)
                if all(key != other for _, other in content)
                for item in content
                if item[1] not in here
            ]
            if swaps:  # else slots outnumber experts, and a bin must hold one twice
                item, source = min(swaps)
                bins[source].remove(item)
                bins[target].append(item)
                totals[source] -= item[0]
                totals[target] += item[0]
                target = source
        bins[target].append((weight, key))
        totals[target] += weight
    return [[key for _, key in content] for content in bins]


def _nearest(bins: list[list[int]], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """The bins in the order in which most of their keys are where they were.

    Bins trade places only with bins of their size, as places differ in nothing else.
    """
    common = sorted(
        (-len(set(content) & set(held[place])), place, b)
        for b, content in enumerate(bins)
        for place in range(len(bins))
        if len(content) == len(bins[place])
    )
    order: dict[int, int] = {}
    taken: set[int] = set()
    for _, place, b in common:
        if place not in order and b not in taken:
            order[place] = b
            taken.add(b)
    return [bins[order[place]] for place in range(len(bins))]


def _in_place(experts: Sequence[int], before: Sequence[int]) -> list[int]:
    """``experts`` in an order that leaves those of ``before`` in their slots."""
    new = list(experts)
    slots: list[int | None] = []
    for expert in before:
        slots.append(expert if expert in new else None)
        if expert in new:
            new.remove(expert)
    return [new.pop(0) if expert is None else expert for expert in slots]
