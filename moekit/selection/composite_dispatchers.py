"""Run a composite: each call goes to one of several dispatchers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing, Unreduced
from moekit.contract.pending import Pending
from moekit.contract.specs import DispatcherSpec
from moekit.discovery.answers import create
from moekit.problem import MoEProblem
from moekit.selection.composite import CompositeDispatcherSpec


class _Call(NamedTuple):
    """An in-flight call: the member that serves it, and that member's handle."""

    member: PrepareAndFinalize
    handle: object


class CompositeDispatcher(PrepareAndFinalize):
    """Dispatchers of one format in one group; each call is its member's from begin to end."""

    spec: CompositeDispatcherSpec

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        assert isinstance(spec, CompositeDispatcherSpec)
        self._members: list[PrepareAndFinalize] = []
        try:
            for each in spec.members:
                self._members.append(create(each.load(), each, problem, group))
        except BaseException:
            self.destroy()
            raise
        super().__init__(spec, problem, self._members[0].group)
        self.makes_output = all(member.makes_output for member in self._members)
        # Tokens of a rank, as tuned tables count them, for each token that a rank passes.
        self._share = problem.parallel.dp_size / problem.parallel.ep_size

    @property
    def members(self) -> Sequence[PrepareAndFinalize]:
        return self._members

    def serving(self, max_tokens: int | None) -> PrepareAndFinalize:
        tokens = math.inf if max_tokens is None else max_tokens * self._share
        return self._members[self.spec.index(tokens)]

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        member = self.serving(routing.max_tokens)
        taken = member.spec.ids_dtype
        if taken != "any":
            routing = replace(routing, topk_ids=routing.topk_ids.to(getattr(torch, taken)))
        arriving = member.prepare(x_TH, routing, quantize)

        def arrive() -> Dispatched:
            tokens = arriving.result()
            return replace(tokens, handle=_Call(member, tokens.handle))

        return Pending(arrive)

    def takes_unreduced(self, dispatched: Dispatched) -> bool:
        member, tokens = _of_member(dispatched)
        return member.takes_unreduced(tokens)

    def output(self, dispatched: Dispatched) -> Tensor | None:
        member, tokens = _of_member(dispatched)
        return member.output(tokens)

    def finalize(
        self, y: Tensor | Unreduced, dispatched: Dispatched, out_TH: Tensor
    ) -> Pending[Tensor]:
        member, tokens = _of_member(dispatched)
        return member.finalize(y, tokens, out_TH)  # type: ignore[arg-type]

    def abandon(self, dispatched: Dispatched) -> None:
        member, tokens = _of_member(dispatched)
        member.abandon(tokens)

    def max_rows(self, num_tokens: int) -> int:
        return max(member.max_rows(num_tokens) for member in self._members)

    def transient_bytes(self, num_tokens: int) -> int:
        return max(member.transient_bytes(num_tokens) for member in self._members)

    def buffer_bytes(self) -> int:
        return sum(member.buffer_bytes() for member in self._members)

    def destroy(self) -> None:
        for member in self._members:
            member.destroy()


def _of_member(dispatched: Dispatched) -> tuple[PrepareAndFinalize, Dispatched]:
    """Return the member that serves a call, and the tokens as it dispatched them."""
    call: _Call = dispatched.handle
    return call.member, replace(dispatched, handle=call.handle)
