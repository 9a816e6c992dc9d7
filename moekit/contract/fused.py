"""Fused kernels: backends that are a layer's dispatcher and its experts at once."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from moekit.contract.specs import CHECK_FAILED, REASONS, DispatcherSpec, ExpertsSpec
from moekit.errors import InvalidInput
from moekit.problem import ActivationFormat, MoEProblem
from moekit.untrusted.code import Fault


@dataclass(frozen=True, kw_only=True)
class FusedSpec(DispatcherSpec, ExpertsSpec):
    """The facts that a FusedKernel declares: the facts of a dispatcher and of experts.

    moves_tokens: it exchanges tokens where they must move. Unless `check` refuses them, it also
        serves problems in which every token stays on its rank.
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
