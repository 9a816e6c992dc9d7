"""Composites: several backends of one kind as one, each serving a range of call sizes.

The name is the rule: ``triton:64|deepgemm:2048|triton`` gives calls of up to 64 tokens to triton,
calls of up to 2048 tokens to deepgemm, and larger ones to triton again. The host knows the size, so
nothing is synchronized, and a captured graph keeps its backend.

Experts count one rank's tokens: the rows of the call (STANDARD: R, BATCHED: C) over ``ep_size``.
Dispatchers count the same rows if every rank passes the call's ``max_tokens``, which are equal on
all ranks, so that all take the same member. Calls without it go to the last member.

`moekit.selection.composite_experts` and `composite_dispatchers` run the members.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from itertools import pairwise
from operator import and_
from typing import Any

from moekit.contract.specs import BackendSpec, DispatcherSpec, ExpertsSpec, SpecT
from moekit.errors import UnknownBackend
from moekit.problem import ActivationFormat, MoEProblem
from moekit.selection.tuned.choice import lookup
from moekit.selection.tuned.plan import Buckets, split


@dataclass(frozen=True, kw_only=True)
class CompositeSpec(BackendSpec):
    """A composite's spec, which declares what all members can do.

    buckets: which member serves which sizes.
    """

    members: tuple[BackendSpec, ...]
    buckets: Buckets

    def __post_init__(self) -> None:
        """Skip validation: members were validated, and the name is no identifier here."""

    @cached_property
    def bounds(self) -> tuple[list[int], list[int]]:
        """The most tokens of each range but the last, and the index of each range's member."""
        names = [member.name for member in self.members]
        most = [most for most, _ in self.buckets if most is not None]
        return most, [names.index(name) for _, name in self.buckets]

    def index(self, tokens: float) -> int:
        """Return the index of the member that serves a call of so many tokens of a rank."""
        most, serving = self.bounds
        return serving[bisect_left(most, tokens)]

    def priority_for(self, problem: MoEProblem) -> int:
        return min(member.priority_for(problem) for member in self.members)

    def unsupported(self, problem: MoEProblem) -> list[str]:
        if problem.batch_invariant:
            return [
                "is not batch-invariant: its members share the calls by their size, so a token's "
                f"bits depend on it; name one of {', '.join(m.name for m in self.members)}"
            ]
        if problem.training:
            return ["has no backward: name one of its members"]
        return [f"{why} ({m.name})" for m in self.members for why in m.unsupported(problem)]

    def load(self) -> type[Any]:
        """Import all members' classes, and return the composite's. Raises BackendBroken."""
        for member in self.members:
            member.load()
        return super().load()


@dataclass(frozen=True, kw_only=True)
class CompositeDispatcherSpec(CompositeSpec, DispatcherSpec):
    """A composite of dispatchers of one format."""

    members: tuple[DispatcherSpec, ...]

    def unsupported(self, problem: MoEProblem) -> list[str]:
        reasons = super().unsupported(problem)
        if len({member.format for member in self.members}) > 1:
            listed = ", ".join(f"{m.name} is {m.format.value}" for m in self.members)
            reasons.append(f"its members must dispatch to the same layout of tokens: {listed}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class CompositeExpertsSpec(CompositeSpec, ExpertsSpec):
    """A composite of experts backends, of both formats."""

    members: tuple[ExpertsSpec, ...]

    def needs_bridge(self, format: ActivationFormat) -> bool:
        return any(member.needs_bridge(format) for member in self.members)

    def made_for(self, problem: MoEProblem) -> CompositeExpertsSpec:
        return self  # refused where experts must not reduce

    def bridged_to(self, format: ActivationFormat) -> CompositeExpertsSpec:
        seen = [member.bridged_to(format) for member in self.members]
        return replace(
            self,
            format=format,
            reduces=all(member.reduces for member in seen),
            weights_in_fp32=all(member.weights_in_fp32 for member in seen),
        )

    def native_to(self, format: ActivationFormat) -> CompositeExpertsSpec:
        """Return the composite in ``format``: it bridges members that have another one itself."""
        return self.bridged_to(format)

    def unsupported(self, problem: MoEProblem) -> list[str]:
        return super().unsupported(problem) or self.unsupported_behind(self.format)

    def unsupported_behind(self, format: ActivationFormat) -> list[str]:
        if len({member.bridged_to(format).reduces for member in self.members}) == 1:
            return []
        return ["some of its members sum over top-k, and some do not"]

    def notes(self, problem: MoEProblem) -> list[str]:
        found = lookup(problem)
        held = math.inf if found is None else found.held([m.name for m in self.members])
        if held == math.inf:
            memory = "how often the weights are held is known when they are packed (extra_bytes)"
        else:
            memory = "weights held " + ("once" if held < 1.005 else f"{held:.2f} times")
        return [memory, *(note for member in self.members for note in member.notes(problem))]


def members(experts: ExpertsSpec) -> tuple[ExpertsSpec, ...]:
    """Return the members of a composite, or the single backend."""
    return experts.members if isinstance(experts, CompositeExpertsSpec) else (experts,)


def composite(name: str, find: Callable[[str], SpecT]) -> SpecT:
    """Return the composite of that name, in its first member's format.

    Args:
        name: the rule, as in ``triton:64|deepgemm``.
        find: returns the spec of a member's name: dispatchers, or experts.

    Raises UnknownBackend for a name that is not a rule, and what ``find`` raises.
    """
    buckets = _parse(name)
    members: Any = tuple(find(member) for member in dict.fromkeys(name for _, name in buckets))
    if fused := [member.name for member in members if member.fused]:
        raise UnknownBackend(f"{name!r} is not a composite: {fused[0]} is a fused kernel")
    facts = _common(members) | {"name": name, "members": members, "buckets": buckets}
    made: Any
    if isinstance(members[0], DispatcherSpec):
        facts["target"] = "moekit.selection.composite_dispatchers:CompositeDispatcher"
        facts["ids_dtype"] = "any"  # `prepare` converts ids to what a member takes
        made = CompositeDispatcherSpec(**facts)
    else:
        facts["target"] = "moekit.selection.composite_experts:CompositeExperts"
        facts["takes_unquantized"] = True  # `apply` quantizes for members that do not
        made = CompositeExpertsSpec(**facts)
        made = made.bridged_to(made.format)
    return made  # type: ignore[no-any-return]


def _parse(name: str) -> Buckets:
    """Return the buckets of a name, whose bounds must rise."""
    if re.fullmatch(r"([a-z][a-z0-9_]*:\d{1,12}\|)+[a-z][a-z0-9_]*", name):
        bounds = [most or 0 for most, _ in split(name)[:-1]]
        if all(a < b for a, b in pairwise([0, *bounds])):
            return split(name)
    raise UnknownBackend(
        f"{name!r} is not a composite: give rising numbers of tokens, as in 'triton:64|deepgemm'"
    )


def _common(members: Sequence[BackendSpec]) -> dict[str, Any]:
    """Return the facts that hold for all members; functions and limits are left to each."""
    first = members[0]
    facts: dict[str, Any] = {
        "format": first.format,
        "devices": first.devices,  # `unsupported` asks every member for the problem's device
        "requires": tuple(dict.fromkeys(each for m in members for each in m.requires)),
    }
    for field in fields(first):
        values = [getattr(member, field.name) for member in members]
        if field.name in ("moves_tokens", "needs_capacity"):
            facts[field.name] = any(values)
        elif type(values[0]) is bool:
            facts[field.name] = all(values)
        elif isinstance(values[0], Set):
            facts[field.name] = reduce(and_, values)
    return facts | {"batch_invariant": False}  # members differ in bits
