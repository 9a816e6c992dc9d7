"""Composites: several experts backends as one, each serving a range of call sizes.

The name is the rule: ``triton:64|deepgemm:2048|triton`` gives calls of up to 64 tokens to triton,
calls of up to 2048 tokens to deepgemm, and larger ones to triton again. One rank's tokens count:
the rows of the call (STANDARD: R, BATCHED: C) over ``ep_size``. The host knows them, so nothing is
synchronized, and a captured graph keeps its backend. `moekit.selection.composite_experts` runs the
members.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from moekit.contract import PermuteExpertsUnpermute
from moekit.contract.specs import ExpertsSpec
from moekit.errors import UnknownBackend
from moekit.problem import ActivationFormat, MoEProblem
from moekit.selection.tuned.choice import lookup
from moekit.selection.tuned.plan import Buckets, split


@dataclass(frozen=True, kw_only=True)
class CompositeSpec(ExpertsSpec):
    """A composite's spec, which declares what all members can do.

    buckets: which member serves which sizes.
    """

    members: tuple[ExpertsSpec, ...]
    buckets: Buckets

    def __post_init__(self) -> None:
        """Skip validation: members were validated, and the name is no identifier here."""

    def priority_for(self, problem: MoEProblem) -> int:
        return min(member.priority_for(problem) for member in self.members)

    def needs_bridge(self, format: ActivationFormat) -> bool:
        return any(member.needs_bridge(format) for member in self.members)

    def made_for(self, problem: MoEProblem) -> CompositeSpec:
        return self  # refused where experts must not reduce

    def bridged_to(self, format: ActivationFormat) -> CompositeSpec:
        seen = [member.bridged_to(format) for member in self.members]
        return replace(
            self,
            format=format,
            reduces=all(member.reduces for member in seen),
            weights_in_fp32=all(member.weights_in_fp32 for member in seen),
        )

    def native_to(self, format: ActivationFormat) -> CompositeSpec:
        """Return the composite in ``format``: it bridges members that have another one itself."""
        return self.bridged_to(format)

    def unsupported(self, problem: MoEProblem) -> list[str]:
        if problem.batch_invariant:
            return [
                "is not batch-invariant: its members share the calls by their size, so a token's "
                f"bits depend on it; name one of {', '.join(m.name for m in self.members)}"
            ]
        if problem.training:
            return ["has no backward: name one of its members"]
        reasons = [f"{why} ({m.name})" for m in self.members for why in m.unsupported(problem)]
        return reasons + self.unsupported_behind(self.format)

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

    def load(self) -> type[PermuteExpertsUnpermute]:
        """Import all members' classes, and return the composite's. Raises BackendBroken."""
        for member in self.members:
            member.load()
        return super().load()


def members(experts: ExpertsSpec) -> tuple[ExpertsSpec, ...]:
    """Return the members of a composite, or the single backend."""
    return experts.members if isinstance(experts, CompositeSpec) else (experts,)


def composite(name: str, find: Callable[[str], ExpertsSpec]) -> CompositeSpec:
    """Return the composite of that name, in its first member's format.

    Args:
        name: the rule, as in ``triton:64|deepgemm``.
        find: returns the spec of a member's name.

    Raises UnknownBackend for a name that is not a rule, and what ``find`` raises.
    """
    buckets = _parse(name)
    members = tuple(find(member) for member in dict.fromkeys(name for _, name in buckets))

    def common(what: str) -> frozenset[str]:
        return frozenset.intersection(*(frozenset(getattr(m, what)) for m in members))

    made = CompositeSpec(
        name=name,
        target="moekit.selection.composite_experts:CompositeExperts",
        format=members[0].format,
        reduces=False,
        dtypes=common("dtypes"),
        schemes=common("schemes"),
        devices=members[0].devices,  # `unsupported` asks every member for the problem's device
        requires=tuple(dict.fromkeys(r for m in members for r in m.requires)),
        graph_safe=all(m.graph_safe for m in members),
        deterministic=all(m.deterministic for m in members),
        activations=common("activations"),
        silu_clamp=all(m.silu_clamp for m in members),
        bias=all(m.bias for m in members),
        takes_quantized=all(m.takes_quantized for m in members),
        takes_unquantized=True,  # `apply` quantizes for members that do not
        movable=all(m.movable for m in members),
        members=members,
        buckets=buckets,
    )
    return made.bridged_to(made.format)


def _parse(name: str) -> Buckets:
    """Return the buckets of a name, whose bounds must rise."""
    if re.fullmatch(r"([a-z][a-z0-9_]*:\d{1,12}\|)+[a-z][a-z0-9_]*", name):
        bounds = [most or 0 for most, _ in split(name)[:-1]]
        if all(a < b for a, b in pairwise([0, *bounds])):
            return split(name)
    raise UnknownBackend(
        f"experts {name!r} is not a composite: give backends with the largest number of tokens "
        "that each but the last serves, in rising order, for example 'triton:64|deepgemm'"
    )
