"""Fused kernels: backends that are a layer's dispatcher and its experts at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from moekit.contract.specs import CHECK_FAILED, REASONS, DispatcherSpec, ExpertsSpec
from moekit.errors import InvalidInput
from moekit.problem import ActivationFormat, MoEProblem
from moekit.untrusted.code import Fault


@dataclass(frozen=True, kw_only=True)
class FusedSpec(DispatcherSpec, ExpertsSpec):
    """The facts that a FusedKernel declares: the facts of a dispatcher and of experts.

    moves_tokens: it exchanges tokens where they must move. It also serves problems in which every
        token stays on its rank.
    routes: a function that takes a `moekit.layer.router.RoutingConfig`, and returns the reasons why
        the kernel cannot choose experts in this way. None: the kernel never chooses experts. Every
        kernel takes a Routing as well.

    A fused kernel takes unquantized tokens in the STANDARD format, and sums over K in every
    problem. It has no backward. moekit does not pad sizes for it: `check` refuses the sizes that
    its kernels cannot compute.
    """

    kind = "fused kernel"
    interface = "FusedKernel"
    fused = True

    format: ActivationFormat = ActivationFormat.STANDARD
    schemes: Set[str] = frozenset({"none"})
    reduces: bool = True
    takes_quantized: bool = False
    moves_tokens: bool = False
    routes: Callable[[Any], list[str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {
            "format": ActivationFormat.STANDARD, "reduces": True, "takes_quantized": False,
            "takes_unquantized": True, "training": None, "multiples": None,
            "wire_schemes": frozenset(),
        }  # fmt: skip
        for name, value in fixed.items():
            if (given := getattr(self, name)) != value:
                raise InvalidInput(f"{self.name}: {name}={given!r}: a fused kernel has {value!r}")

    def unsupported(self, problem: MoEProblem) -> list[str]:
        if problem.adapters is not None:
            return ["does not take adapters (LoRA)"]
        return super().unsupported(problem)

    def unsupported_routing(self, how: Any) -> list[str]:
        """Return every reason why the kernel does not choose experts as a RoutingConfig says."""
        if self.routes is None:
            return ["it takes ids, and chooses no experts"]
        try:
            return list(self._asked("routes", how, REASONS))
        except Fault as fault:
            return [f"{CHECK_FAILED}: {fault}"]

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        specs = DispatcherSpec, ExpertsSpec
        return [why for each in specs for why in each._unsupported_features(self, problem)]

    def made_for(self, problem: MoEProblem) -> FusedSpec:
        """Return the spec for ``problem``, without ``moves_tokens`` if no token moves."""
        return self if problem.parallel.moves_tokens else replace(self, moves_tokens=False)


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

    def part(self, rows: slice, most: int) -> RouterLogits:
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
