"""The dispatcher kit: every token to each of its experts once, and the results back."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from moekit.kernel import PrepareAndFinalize
from moekit.plugins import DispatcherSpec
from moekit.problem import DTYPES, ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig
from moekit.quant import SCHEMES, WIRE_SCHEMES
from moekit.specs import CHECK_FAILED
from moekit.testing import cases, interface, ranks
from moekit.testing.base import Conformance, Sizes
from moekit.testing.calls import check_negative_controls
from moekit.testing.distributed import RankPool
from moekit.testing.ranks import Call, Job

# Numbers of ranks to test with, up to 8, instead of the classes' own: "2,8".
WORLD_SIZES_VARIABLE = "MOEKIT_TEST_WORLD_SIZES"
# "1": more ranks than devices share them. Slow, and not what every library can.
SHARE_VARIABLE = "MOEKIT_TEST_SHARE_DEVICES"

_QUANTIZED_INPUT = sorted(n for n, s in SCHEMES.items() if s.activation is not None)

# Tokens per rank, for the last ranks: two ranks take the last two numbers of four.
_COUNTS = {
    "even": (9, 9, 9, 9),
    "uneven": (3, 1, 9, 17),
    "empty_rank": (7, 0, 0, 11),
    "only_first_ranks": (5, 2, 6, 0),
    "one_each": (1, 1, 1, 1),
    "one_in_all": (0, 0, 0, 1),
    "none": (0, 0, 0, 0),
}


@cache
def _pools() -> dict[tuple[int, str], RankPool]:
    return {}


def _pool(world_size: int, device_type: str) -> RankPool:
    """A pool that serves all tests of the run; a new one if a rank of the last one got lost."""
    pools, key = _pools(), (world_size, device_type)
    if key not in pools or pools[key].closed:
        pools[key] = RankPool(world_size, device_type, timeout=60 if device_type == "cpu" else 180)
    return pools[key]


def _sizes(hidden: int, tokens: int, intermediate: int = 32) -> Sizes:
    return {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_num_tokens": tokens,
    }


def _asked_sizes(asked: str) -> tuple[int, ...]:
    parts = [part.strip() for part in asked.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 8 for part in parts):
        raise pytest.UsageError(
            f"{WORLD_SIZES_VARIABLE}={asked!r}: want numbers of ranks from 1 to 8, as in 2,8"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


class DispatcherConformance(Conformance):
    """Subclass it with ``backend = "name"``; see `Conformance` for the other settings.

    world_sizes: numbers of ranks to test with; on accelerators, those for which there are devices,
    unless ranks may share them. MOEKIT_TEST_WORLD_SIZES and MOEKIT_TEST_SHARE_DEVICES change both.
    Dispatchers that move no tokens run in this process, as ranks that hold the same tokens.
    """

    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "world" in metafunc.fixturenames:
            asked = os.environ.get(WORLD_SIZES_VARIABLE)
            sizes = _asked_sizes(asked) if asked else self.world_sizes
            metafunc.parametrize("world", sizes, ids=lambda n: f"{n}ranks")

    def _spec(self) -> DispatcherSpec:
        return self._registry().dispatcher(self.backend)

    def _names(self) -> dict[str, str]:
        return {"dispatcher": self.backend}

    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        if device.type == "cpu":
            return [_sizes(48, 32), _sizes(128, 32), _sizes(512, 32, 128)]
        return [_sizes(h, 256, 256) for h in (272, 512, 1024, 2048, 4096, 7168)]

    def _parallel(self, world: int) -> ParallelConfig:
        """Ranks with tokens of their own if the dispatcher moves tokens, else with the same."""
        dp_size = world if self._spec().moves_tokens else 1
        return ParallelConfig(ep_size=world, dp_size=dp_size)

    def _run(
        self, world: int, function: Callable[..., Any], *args: Any, **changes: Any
    ) -> list[Any]:
        """``function(rank, world, job, *args)`` on every rank, for a problem with ``changes``."""
        experts = changes.pop("experts", "torch")
        problem = self._problem(**{"parallel": self._parallel(world), **changes})
        job = Job(self._spec(), problem, cases.seed(), experts)
        if not self._spec().moves_tokens:
            return [function(rank, world, job, *args) for rank in range(world)]
        kind = problem.device.type
        enough = kind == "cpu" or torch.get_device_module(kind).device_count() >= world
        if not enough and os.environ.get(SHARE_VARIABLE, "0") in ("", "0"):
            self._skip(f"{world} ranks need as many {kind} devices, or {SHARE_VARIABLE}=1")
        return _pool(world, kind).run(function, job, *args)

    # -- what the spec says -----------------------------------------------------------------------

    def test_class_fits_the_spec(self) -> None:
        loaded = self._spec().load()
        assert issubclass(loaded, PrepareAndFinalize), f"{loaded} is no dispatcher"
        assert not inspect.isabstract(loaded), f"abstract: {sorted(loaded.__abstractmethods__)}"

    def test_unsupported_answers_for_any_device(self) -> None:
        spec = self._spec()
        for device in ("cpu", "sm80", "sm90", "sm100", "xpu"):
            for world in (1, 3, 8):
                for capacity in (None, 64):
                    sizes = self._sizes("none", DeviceSpec.parse(device))[0]
                    changes = {
                        "max_num_tokens": capacity,
                        "parallel": ParallelConfig(ep_size=world),
                    }
                    problem = MoEProblem(**{**sizes, **self._main, **changes, "device": device})
                    reasons = spec.unsupported(problem)
                    assert not any(r.startswith(CHECK_FAILED) for r in reasons), reasons
                    assert reasons == spec.unsupported(problem)
                    if spec.needs_capacity and capacity is None:
                        assert reasons, "needs_capacity, but takes a problem without one"

    def test_declared_is_reachable(self) -> None:
        """unsupported() must not refuse on all devices and sizes what the spec declares."""
        spec = self._spec()
        declared: list[dict[str, Any]] = [{"dtype": DTYPES[name]} for name in spec.dtypes]
        declared += [{"quant": name} for name in sorted(spec.schemes | spec.wire_schemes)]
        if spec.moves_tokens:
            declared.append({"parallel": ParallelConfig(ep_size=2)})
        for changes in declared:
            reasons = self._declared_but_unreachable(changes)
            assert not reasons, f"{changes} is declared, but always refused: {reasons}"

    def test_undeclared_raises(self) -> None:
        """What unsupported() names raises at composition; `_find_problem` checks it."""
        refused: list[dict[str, Any]] = [
            *({"dtype": dtype} for dtype in DTYPES.values()),
            *({"quant": name} for name in SCHEMES),
            {"max_num_tokens": None},
            {"parallel": ParallelConfig(ep_size=2)},
            {"parallel": ParallelConfig(ep_size=3, dp_size=1)},
        ]
        for changes in refused:
            self._find_problem(**changes)

    # -- tokens and routing -----------------------------------------------------------------------

    @pytest.mark.parametrize("counts", sorted(_COUNTS))
    def test_tokens_per_rank(self, counts: str, world: int) -> None:
        self._run(world, ranks.calls, [Call(_COUNTS[counts])])

    @pytest.mark.parametrize("kind", cases.ROUTINGS)
    def test_routing(self, kind: str, world: int) -> None:
        """A hot expert, idle experts, -1 in slots and whole tokens, which are NaN."""
        self._run(world, ranks.calls, [Call((5, 2, 9, 13), kind)])

    def test_router_weight_on_input(self, world: int) -> None:
        changes = {"top_k": 1, "apply_router_weight_on_input": True}
        self._run(world, ranks.calls, [Call((3, 1, 9, 13), "rows")], **changes)

    def test_every_token_to_every_expert(self, world: int) -> None:
        self._run(world, ranks.calls, [Call((3, 0, 9, 13))], top_k=8)

    def test_experts_do_not_divide_by_ranks(self, world: int) -> None:
        experts = 7 if world < 7 else 2 * world - 1
        self._run(world, ranks.calls, [Call((3, 0, 9, 13), "slots")], num_experts=experts)

    def test_replicas(self, world: int) -> None:
        self._run(world, ranks.calls, [Call((3, 0, 9, 13), "slots")], num_redundant_experts=2)

    def test_same_tokens_on_all_ranks(self, world: int) -> None:
        """dp_size=1: nothing moves, and each rank returns its partial sum."""
        parallel = ParallelConfig(ep_size=world, dp_size=1)
        self._run(world, ranks.calls, [Call((9,)), Call((0,))], parallel=parallel)

    @pytest.mark.parametrize("counts", ["uneven", "only_first_ranks", "none"])
    @pytest.mark.parametrize("kind", ["random", "slots", "rows"])
    def test_each_pair_is_delivered_once(self, counts: str, kind: str, world: int) -> None:
        """`Dispatched` as its docstring has it; every (token, expert) pair arrives exactly once."""
        results = self._run(world, interface.deliveries, Call(_COUNTS[counts], kind))
        batched = self._spec().format is ActivationFormat.BATCHED
        same = not self._spec().moves_tokens
        sent = [d for result in (results[:1] if same else results) for d in result[0]]
        arrived = [d for result in results for d in result[1]]
        keep = 3 if batched else 4  # batched tokens travel without their weights
        assert sorted(d[:keep] for d in arrived) == sorted(d[:keep] for d in sent)

    # -- arithmetic -------------------------------------------------------------------------------

    @pytest.mark.parametrize("experts", ["torch", "reference"])
    def test_with_experts(self, experts: str, world: int) -> None:
        self._run(world, ranks.calls, [Call((3, 0, 9, 13), "slots")], experts=experts)

    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_dtype(self, dtype: str, world: int) -> None:
        self._run(world, ranks.calls, [Call((3, 0, 9, 13))], dtype=DTYPES[dtype])

    @pytest.mark.parametrize("scheme", sorted(WIRE_SCHEMES))
    def test_quantized_tokens(self, scheme: str, world: int) -> None:
        """Right for every scheme, whether or not tokens travel quantized."""
        sequence = [Call((3, 0, 9, 13), "rows"), Call((0, 0, 0, 0))]
        for experts in ("torch", "reference"):
            self._run(world, ranks.calls, sequence, quant=scheme, experts=experts)

    @pytest.mark.parametrize("scheme", _QUANTIZED_INPUT)
    def test_quantized_wire(self, scheme: str, world: int) -> None:
        if scheme not in self._spec().wire_schemes:
            self._skip(f"the spec does not declare {scheme} in wire_schemes")
        self._run(world, interface.wire, Call((3, 0, 9, 13), "rows"), quant=scheme)

    def test_negative_controls(self) -> None:
        """The kit itself: on this very problem its tolerance rejects every known mistake."""
        check_negative_controls(cases.make_case(self._problem(), 13, "slots"))

    # -- calls ------------------------------------------------------------------------------------

    def test_many_calls(self, world: int) -> None:
        """One kernel, T up and down: no earlier call shows, and no output changes afterwards."""
        counts = [(7, 9, 3, 21), (1, 0, 2, 1), (0, 0, 0, 0), (0, 5, 30, 2), (9, 9, 9, 9)]
        counts *= 3 if self._device().type == "cpu" else 20  # 100 calls, where they are fast
        sequence = [Call(c, ("random", "slots")[i % 2]) for i, c in enumerate(counts)]
        self._run(world, ranks.calls, sequence, "fresh")

    def test_two_calls_in_flight(self, world: int) -> None:
        self._run(world, ranks.in_flight, Call((7, 0, 3, 21)), Call((1, 8, 2, 5)))

    def test_strided_input(self, world: int) -> None:
        self._run(world, ranks.calls, [Call((7, 0, 3, 21), "slots")], "strided")

    def test_given_output(self, world: int) -> None:
        self._run(world, ranks.calls, [Call((7, 0, 3, 21), "rows")], "out")

    def test_without_capacity(self, world: int) -> None:
        """No max_num_tokens in the problem (or the spec's reason)."""
        self._run(world, ranks.calls, [Call((7, 0, 3, 21))], max_num_tokens=None)

    def test_full_capacity(self, world: int) -> None:
        """As many tokens as max_num_tokens on every rank, all to one expert."""
        most = self._problem(parallel=self._parallel(world)).max_num_tokens
        assert most is not None
        self._run(world, ranks.calls, [Call((most,), "hot"), Call((most,), "one_expert")])

    # -- errors -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", ["shape", "ids", "capacity"])
    def test_bad_input_on_one_rank(self, fault: str, world: int) -> None:
        """All ranks get an error rather than a hang, and the next call works."""
        self._run(world, ranks.one_rank_fails, fault)

    def test_failure_after_dispatch(self, world: int) -> None:
        """One rank's experts raise: so do the others, naming it, and the next call works."""
        self._run(world, ranks.experts_fail)

    def test_group_mismatch(self, world: int) -> None:
        """A group of another size than the problem's is refused for that, on every rank."""
        if not self._spec().moves_tokens:
            self._skip("moves no tokens, so it needs no group")
        problem = self._problem(parallel=self._parallel(world))
        for size in (2 * world, world + 1, max(world // 2, 2)):
            experts, parallel = max(problem.num_experts, size), ParallelConfig(ep_size=size)
            other = problem.replace(num_experts=experts, parallel=parallel)
            if size != world and not self._spec().unsupported(other):
                self._run(world, ranks.group_mismatch, other)
                return
        self._skip(f"does this problem on no other number of ranks than {world}")

    # -- memory, determinism, graphs --------------------------------------------------------------

    def test_memory_is_stated(self, world: int) -> None:
        self._run(world, ranks.memory, 32, num_experts=8, top_k=4)

    def test_deterministic(self, world: int) -> None:
        if not self._spec().deterministic:
            self._skip("the spec does not declare deterministic")
        self._run(world, ranks.repeat, Call((7, 0, 3, 21), "hot"))

    def test_graph_capture(self, world: int) -> None:
        if not self._spec().graph_safe:
            self._skip("the spec does not declare graph_safe")
        if self._device().type != "cuda":
            self._skip("CUDA graphs need a CUDA device")
        self._run(world, interface.graph, 21)
