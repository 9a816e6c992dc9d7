"""Several experts backends as one: every call goes to the one that is fastest for its size.

The name is the rule: ``triton:64|deepgemm:2048|triton`` gives calls of up to 64 tokens to triton,
up to 2048 to deepgemm, and larger ones to triton again. Without numbers (``triton|deepgemm``) the
tuned table divides the sizes. Tokens are those of one rank: the rows of the call (STANDARD: R,
BATCHED: C) over ``ep_size``. The host knows them, so nothing is synchronized, and a captured graph
keeps its backend. `moekit.backends.composite_experts` runs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from moekit.contract import PermuteExpertsUnpermute
from moekit.discovery.specs import ExpertsSpec
from moekit.errors import UnknownBackend
from moekit.problem import ActivationFormat, MoEProblem
from moekit.selection import tuned as tune


@dataclass(frozen=True, kw_only=True)
class CompositeSpec(ExpertsSpec):
    """What all members can do. buckets: empty if the tuned table is to divide the sizes."""

    members: tuple[ExpertsSpec, ...]
    buckets: tune.Buckets

    def __post_init__(self) -> None:
        """Members were validated when they were made; the name is no identifier here."""

    def seen_from(self, format: ActivationFormat) -> CompositeSpec:
        """The same behind a dispatcher of this format, each member bridged where it must be."""
        return replace(
            self,
            format=format,
            reduces=all(_reduces(m, format) for m in self.members),
            weights_in_fp32=all(weights_in_fp32(m, format) for m in self.members),
        )

    def divide(self, problem: MoEProblem) -> tune.Buckets:
        """Who serves which sizes; empty if there are no measurements to tell."""
        if self.buckets:
            return self.buckets
        found, names = tune.lookup(problem), [m.name for m in self.members]
        curves = {} if found is None else found.curves("local", names)
        if found is None or len(curves) < len(names):
            return ()
        made = tune.plan(curves, found.high)
        return () if made is None else made.buckets

    def memory_note(self, problem: MoEProblem) -> str:
        """What the weights of all members take together, for people."""
        found = tune.lookup(problem)
        held = math.inf if found is None else found.held("local", [m.name for m in self.members])
        if held == math.inf:
            return "what the weights take in all is known when they are packed (extra_bytes)"
        return f"weights held {held:.2f} times"

    def unsupported(self, problem: MoEProblem) -> list[str]:
        reasons = [f"{why} ({m.name})" for m in self.members for why in m.unsupported(problem)]
        if not self.reduces and any(_reduces(m, self.format) for m in self.members):
            reasons.append("some of its members sum over top-k, and some do not")
        if not reasons and not self.divide(problem):
            names = "|".join(f"{m.name}:{64 << 2 * i}" for i, m in enumerate(self.members[:-1]))
            reasons.append(
                "no measurement of all its members says which is best where: run `python -m moekit "
                f"tune --select`, or say it, as in {names}|{self.members[-1].name}"
            )
        return reasons

    def load(self) -> type[PermuteExpertsUnpermute]:
        """As any spec; BackendBroken too when a member does not load."""
        for member in self.members:
            member.load()
        return super().load()


def weights_in_fp32(experts: ExpertsSpec, format: ActivationFormat) -> bool:
    """`BackendSpec.weights_in_fp32`, seen from a dispatcher of this format: slabs come without
    weights, so that what reduces behind a bridge rounds before they apply."""
    return experts.weights_in_fp32 and not (experts.reduces and format is ActivationFormat.BATCHED)


def _reduces(member: ExpertsSpec, format: ActivationFormat) -> bool:
    """Seen from a dispatcher of this format: a bridge from slabs to rows sums."""
    return format is ActivationFormat.STANDARD and (member.reduces or member.format is not format)


def composite(name: str, find: Callable[[str], ExpertsSpec]) -> CompositeSpec:
    """The composite of that name, in its first member's format; ``find`` knows the members.

    Raises UnknownBackend for a name that makes no sense, and what ``find`` raises.
    """
    parts = [re.fullmatch(r"([a-z][a-z0-9_]*)(?::(\d{1,12}))?", part) for part in name.split("|")]
    matches = [part for part in parts if part is not None]
    bounds = [int(part[2]) for part in matches if part[2]]
    rising = all(a < b for a, b in zip([0, *bounds], bounds, strict=False))
    complete = len(bounds) == len(parts) - 1 and matches[-1:] and not matches[-1][2]
    if len(matches) < max(2, len(parts)) or not rising or not (complete or not bounds):
        raise UnknownBackend(
            f"experts {name!r}: want backends with the most tokens that each but the last serves, "
            "rising, as in 'triton:64|deepgemm'; or no numbers at all, to go by measurement"
        )
    members = tuple(find(part) for part in dict.fromkeys(part[1] for part in matches))
    buckets = tuple(zip((*bounds, None), (p[1] for p in matches), strict=True)) if bounds else ()

    def common(what: str) -> frozenset[str]:
        return frozenset.intersection(*(frozenset(getattr(m, what)) for m in members))

    made = CompositeSpec(
        name=name,
        target="moekit.backends.composite_experts:CompositeExperts",
        format=members[0].format,
        reduces=False,
        dtypes=common("dtypes"),
        schemes=common("schemes"),
        devices=members[0].devices,  # where others do not run, `unsupported` says so
        requires=tuple(dict.fromkeys(r for m in members for r in m.requires)),
        priority=min(m.priority for m in members),
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
    return made.seen_from(made.format)
