"""Run a composite: each call goes to one of several experts backends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from moekit.backends.bridge import bridge
from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    Unreduced,
)
from moekit.contract.adapters import AdapterExperts
from moekit.contract.specs import ExpertsSpec
from moekit.contract.sums import weight_and_reduce
from moekit.discovery.answers import packed_by
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.runtime.checks import overlap
from moekit.runtime.rows import quantize_dispatched
from moekit.runtime.workspace import Workspace
from moekit.selection.composite import CompositeExpertsSpec

logger = logging.getLogger("moekit")


@dataclass(frozen=True, repr=False)
class CompositeWeights(PackedWeights):
    """The members' packed weights.

    ``experts`` and ``shared`` list each piece of memory once, so that experts move in all members.
    """

    members: tuple[PackedWeights, ...] = ()

    @property
    def extra_bytes(self) -> int:
        """Return by how many bytes they exceed the largest member's."""
        return self.nbytes - max(member.nbytes for member in self.members)


class CompositeExperts(AdapterExperts):
    """STANDARD or BATCHED, as the spec says; members of the other format are bridged."""

    spec: CompositeExpertsSpec

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        assert isinstance(spec, CompositeExpertsSpec)
        super().__init__(spec, problem)
        made = (replace(m, target=m.target_for(problem) or m.target) for m in spec.members)
        self.members = [bridge(m.load(), m, problem, spec.format) for m in made]
        self._most, self._serving = spec.bounds
        for member in self.members:
            if member.weight_and_reduce is not weight_and_reduce:  # the same bits, faster
                self.weight_and_reduce = member.weight_and_reduce

    def member(self, rows: int) -> PermuteExpertsUnpermute:
        """Return the member that serves a call of ``rows`` rows (STANDARD: R, BATCHED: C)."""
        return self.members[self._index(rows)]

    def _index(self, rows: int) -> int:
        return self.spec.index(rows / self.problem.parallel.ep_size)

    def pack(self, weights: ExpertWeights) -> CompositeWeights:
        """Pack for every member; members that keep the tensors as they are share them."""
        dense = {name: t.contiguous() for name, t in weights.tensors().items()}
        weights = replace(weights, **dense)  # type: ignore[arg-type]
        packed = _merge(self.spec.name, [packed_by(m, weights) for m in self.members])
        if packed.extra_bytes:
            logger.info(
                "moekit: %s: packed weights take %.3g GB, %.3g GB more than one backend's",
                self.spec.name, packed.nbytes / 1e9, packed.extra_bytes / 1e9,
            )  # fmt: skip
        return packed

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantize by the member that serves as many rows.

        Any member may quantize: the row format depends only on the scheme.
        """
        assert isinstance(weights, CompositeWeights)
        index = self._index(x_RH.shape[0])
        return self.members[index].quantize(x_RH, weights.members[index], valid_rows)

    def largest_calls(self, num_tokens: int) -> list[int]:
        """Return the calls that each member names among the sizes that it serves."""
        parallel = self.problem.parallel
        most = (m * parallel.ep_size // parallel.dp_size for m in self._most)
        ends = [0, *(t for t in most if t < num_tokens), num_tokens]
        calls = {num_tokens}
        for index, (start, end) in zip(self._serving, pairwise(ends), strict=False):
            calls.update(t for t in self.members[index].largest_calls(end) if t > start)
        return sorted(calls, reverse=True)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        """Return the serving member's buffers, and one more, so that all smaller calls fit too."""
        own = self.member(rows).workspace(rows)
        needs = [Workspace.nbytes_for(m.workspace(most)) for m, most in self._uses(rows)]
        return *own, BufferSpec((max(needs) - Workspace.nbytes_for(own),), torch.uint8)

    def transient_bytes(self, rows: int) -> int:
        return max(member.transient_bytes(most) for member, most in self._uses(rows))

    def _uses(self, rows: int) -> Iterator[tuple[PermuteExpertsUnpermute, int]]:
        """Yield the members that serve calls of up to ``rows`` rows, and the most rows of each."""
        size = self.problem.parallel.ep_size
        for bucket, index in enumerate(self._serving):
            yield self.members[index], min([rows, *(m * size for m in self._most[bucket:][:1])])
            if bucket < len(self._most) and rows <= self._most[bucket] * size:
                return

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        member, taken, own, scratch = self._of_member(tokens, weights, workspace)
        member.apply(y, taken, own, scratch)

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        member, taken, own, scratch = self._of_member(tokens, weights, workspace)
        return member.apply_unreduced(taken, own, scratch)

    def _of_member(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> tuple[PermuteExpertsUnpermute, Dispatched, PackedWeights, Sequence[Tensor]]:
        """Return the member that serves a call, and the call as it takes it."""
        assert isinstance(weights, CompositeWeights)
        index = self._index(tokens.x.shape[-2])
        member, own = self.members[index], weights.members[index]
        if weights.adapters is not None:
            own = replace(own, adapters=weights.adapters)
        quantizes = self.problem.quant.activation is not None and tokens.x_scale is None
        if quantizes and not member.spec.takes_unquantized:
            tokens = quantize_dispatched(member, tokens, own)
        return member, tokens, own, workspace[:-1]

    @contextmanager
    def tuning(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.tuning())
            yield


def _merge(name: str, packed: Sequence[PackedWeights]) -> CompositeWeights:
    kept: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    members = []
    for member in packed:
        own, others = dict(member.experts), list(kept.values())
        for key, tensor in member.experts.items():
            if any(_same_experts(tensor, other) for other in others):
                continue
            if any(overlap(tensor, other) for other in others):
                # It overlaps another tensor in part: they cannot move as one.
                own[key] = tensor.clone()
            kept[f"{member.backend}.{key}"] = own[key]
        for key, tensor in member.shared.items():
            if all(tensor.data_ptr() != other.data_ptr() for other in shared.values()):
                shared[f"{member.backend}.{key}"] = tensor
        members.append(replace(member, experts=own))
    return CompositeWeights(name, kept, shared, tuple(members))


def _same_experts(a: Tensor, b: Tensor) -> bool:
    """Return whether both are views of the same memory, expert by expert, in any shape."""
    place_a, place_b = (
        (t.data_ptr(), t.nbytes, t.stride(0) * t.itemsize if t.shape[0] > 1 else 0) for t in (a, b)
    )
    return place_a == place_b and a.numel() > 0
