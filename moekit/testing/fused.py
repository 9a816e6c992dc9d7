"""The kits for fused kernels: the cases of experts on one rank, of dispatchers on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moekit.contract.fused import FusedSpec
from moekit.contract.fused_kernel import FusedKernel, RouterLogits
from moekit.layer.router import Router, RoutingConfig
from moekit.problem import DeviceSpec
from moekit.testing import cases, interface
from moekit.testing.base import Sizes
from moekit.testing.calls import call, pack
from moekit.testing.diagnose import assert_right
from moekit.testing.dispatchers import DispatcherConformance
from moekit.testing.experts import ExpertsConformance
from moekit.testing.ranks import Job

# Ways of choosing experts. The kit leaves out ways that the spec's `routes` refuses.
_WAYS: tuple[dict[str, Any], ...] = (
    {}, {"renormalize": False}, {"scoring_func": "sigmoid"},
    {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    {"num_expert_group": 2, "topk_group": 1},
)  # fmt: skip


def _not_apart() -> None:
    pytest.skip("a fused kernel moves tokens and computes: there is nothing between the two")


class FusedConformance(ExpertsConformance):
    """The kit for fused kernels where no token moves. Subclass it with ``backend = "name"``."""

    _interface = FusedKernel  # type: ignore[assignment]

    def _names(self) -> dict[str, str]:
        return {"experts": self.backend, "dispatcher": self.backend}

    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        more = {"max_num_tokens": 2048} if self._spec().needs_capacity else {}  # type: ignore[attr-defined]
        return [{**sizes, **more} for sizes in super()._sizes(scheme, device)]

    def test_sums_left_to_the_dispatcher(self) -> None:
        _not_apart()

    def test_router_logits(self) -> None:
        """The kernel chooses the experts as `moekit.route` does, in every way that it declares."""
        spec, problem = self._spec(), self._problem()
        assert isinstance(spec, FusedSpec)
        ways = [RoutingConfig(**way) for way in _WAYS]
        if not (ways := [way for way in ways if not spec.unsupported_routing(way)]):
            self._skip("the spec's `routes` takes none of the kit's ways of choosing experts")
        kernel = self._compose(problem)
        weights = cases.random_weights(problem)
        packed = pack(kernel, weights)
        for how in ways:
            router = Router(how, problem.num_experts, problem.top_k)
            for num_tokens in (0, 1, self._T):
                case = cases.make_case(problem, num_tokens, weights=weights)
                draw = cases.generator("logits", num_tokens)
                logits = torch.randn(num_tokens, problem.num_experts, generator=draw).to(case.x)
                case = replace(case, routing=router(case.x, logits, None, True))
                taken = RouterLogits.of(logits, how, problem.top_k)
                out = call(kernel, packed, replace(case, routing=taken))
                assert_right(out, case, f"experts chosen by {how} of {num_tokens} tokens")


class FusedRanksConformance(DispatcherConformance):
    """The kit for fused kernels that move tokens. Subclass it as `DispatcherConformance`."""

    _interface = FusedKernel  # type: ignore[assignment]

    def _names(self) -> dict[str, str]:
        return {"experts": self.backend, "dispatcher": self.backend}

    @property
    def _main(self) -> dict[str, Any]:
        return {**super()._main, "parallel": self._parallel(2)}  # some kernels need several ranks

    def _job(self, world: int, **changes: Any) -> Job:
        return super()._job(world, **{**changes, "experts": self.backend})

    def test_outputs_beyond_float16(self, ends: int) -> None:
        if not self._spec().weights_in_fp32:
            self._skip("the spec does not declare weights_in_fp32")
        super().test_outputs_beyond_float16(ends)

    def test_graph_capture(self, world: int) -> None:
        self._needs("graph_safe")
        if self._device().type != "cuda":
            self._skip("CUDA graphs need a CUDA device")
        self._check(world, interface.graph_of_calls, 21)

    def test_each_assignment_is_delivered_once(self) -> None:  # type: ignore[override]
        _not_apart()

    def test_many_assignments(self) -> None:  # type: ignore[override]
        _not_apart()

    def test_wide_rows(self) -> None:  # type: ignore[override]
        _not_apart()
