"""The interface of fused kernels, and the router's logits as their argument."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract.fused import FusedSpec
from moekit.contract.interfaces import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
)
from moekit.contract.pending import Pending
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class RouterLogits(Routing):
    """The router's logits, for a call whose kernel chooses the experts itself.

    Weights are 0 and ids -1 in the place of what the kernel computes.

    logits: (T, E), contiguous, of any float dtype.
    how: a `moekit.layer.router.RoutingConfig` that ``spec.routes`` has no reasons against.
    """

    logits: Tensor = field(kw_only=True)
    how: Any = field(kw_only=True)

    @classmethod
    def of(cls, logits: Tensor, how: object, top_k: int) -> RouterLogits:
        """Return the logits as an argument of a call."""
        weights = logits.new_zeros((len(logits), top_k), dtype=torch.float32)
        return cls(weights, torch.full_like(weights, -1, dtype=torch.int32), logits=logits, how=how)

    def part(self, rows: slice, most: int) -> RouterLogits:
        return replace(self, **vars(super().part(rows, most)), logits=self.logits[rows])


class FusedKernel(PrepareAndFinalize, PermuteExpertsUnpermute):
    """Moves tokens, runs the experts and brings the results home, all in `run`.

    It is made as a dispatcher, and called on every rank, also where there are no tokens. Where no
    token moves, ``group`` is None, and `run` computes this rank's experts only.
    """

    interface = "FusedKernel"

    spec: FusedSpec

    def __init__(
        self, spec: FusedSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        PrepareAndFinalize.__init__(self, spec, problem, group)

    @abstractmethod
    def run(
        self,
        out_TH: Tensor,
        x_TH: Tensor,
        weights: PackedWeights,
        routing: Routing,
        workspace: Sequence[Tensor],
    ) -> None:
        """Write the layer's output to ``out_TH``, every element.

        Args:
            out_TH: (T, H), contiguous, in the problem's dtype.
            x_TH: (T, H), as `PrepareAndFinalize.prepare` takes it. Read only.
            weights: what `pack` returned, possibly with experts moved. Read only.
            routing: as `prepare` takes it; RouterLogits only if ``spec.routes`` allows it.
            workspace: the buffers that `workspace` asked for, uninitialized.
        """

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        """Return the scratch that `run` needs for ``rows`` tokens on every rank."""
        return ()

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        return Pending.ready(Dispatched(x_TH, handle=routing))

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        self.run(y, tokens.x, weights, tokens.handle, workspace)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        return Pending.ready(out_TH if y is out_TH else out_TH.copy_(y))
