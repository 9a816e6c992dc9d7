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

    Its weights are 0 and its ids -1: the kernel computes both.

    logits: (T, E), contiguous, of any float dtype.
    how: a `moekit.layer.router.RoutingConfig` for which ``spec.routes`` returns no reasons.
    """

    logits: Tensor = field(kw_only=True)
    how: Any = field(kw_only=True)

    @classmethod
    def of(cls, logits: Tensor, how: object, top_k: int) -> RouterLogits:
        """Return the logits as an argument of a call."""
        weights = logits.new_zeros((len(logits), top_k), dtype=torch.float32)
        return cls(weights, torch.full_like(weights, -1, dtype=torch.int32), logits=logits, how=how)

    def part(self, rows: slice | Tensor, most: int) -> RouterLogits:
        return replace(self, **vars(super().part(rows, most)), logits=self.logits[rows])


class FusedKernel(PrepareAndFinalize, PermuteExpertsUnpermute):
    """A backend that moves tokens, runs the experts and sends the results back, all in `run`.

    moekit constructs it as it constructs a dispatcher, and calls it on every rank, also without
    tokens. Where no token moves, ``group`` is None, and `run` computes this rank's experts only.
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
            x_TH: (T, H), as in `PrepareAndFinalize.prepare`. Read only.
            weights: what `pack` returned, possibly with experts moved. Read only.
            routing: as in `prepare`; RouterLogits only if ``spec.routes`` returns no reasons.
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
