"""The dispatcher kit: each token reaches each of its experts once, and its results come back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from moekit.contract import PrepareAndFinalize
from moekit.contract.specs import DispatcherSpec
from moekit.problem import DTYPES, ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.quant import SCHEMES, WIRE_SCHEMES
from moekit.testing import cases, interface, rank_failures, ranks
from moekit.testing.base import Capability, Conformance, Sizes, over, sizes_of
from moekit.testing.calls import LEAVES_SUMS
from moekit.testing.distributed import RankError, RankPool
from moekit.testing.ranks import Call, Job, Members
from moekit.untrusted.arguments import switch

# Numbers of ranks to test with, up to 8, instead of `world_sizes`: "2,8".
WORLD_SIZES_VARIABLE = "MOEKIT_TEST_WORLD_SIZES"
# "1": ranks share devices if there are fewer. This is slow, and some libraries cannot.
SHARE_VARIABLE = "MOEKIT_TEST_SHARE_DEVICES"


# Seconds that two threads may take for a step in two groups.
_THREAD_SECONDS = 300.0

# (experts, replicas, top-k): first more than published models have, then theirs.
_MODELS = (
    (512, 64, 23), (512, 64, 12), (512, 0, 10), (512, 0, 8), (384, 0, 8), (256, 0, 8), (128, 0, 6),
)  # fmt: skip

# Tokens of each rank. Fewer ranks take the last numbers: two ranks take the last two of four.
_COUNTS = {
    "even": (9, 9, 9, 9),
    "uneven": (3, 1, 9, 17),
    "empty_rank": (7, 0, 0, 11),
    "only_first_ranks": (5, 2, 6, 0),
    "one_each": (1, 1, 1, 1),
    "one_in_all": (0, 0, 0, 1),
    "none": (0, 0, 0, 0),
}


# What is unusual in a call -> its routing, how it is made, and changes of the problem.
_CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: (kind, "plain", changes) for name, (kind, changes) in cases.UNUSUAL.items()},
    "hot_expert": ("hot", "plain", {}),
    "every_token_to_every_expert": ("random", "plain", {"top_k": 8}),
    "experts_do_not_divide_by_ranks": ("masked", "plain", {"num_experts": 7}),
    "experts_that_do_not_reduce": ("masked", "plain", {"experts": "reference"}),
    "strided_input": ("masked", "strided", {}),
    "given_output": ("rows", "out", {}),
    "one_expert_a_token": ("rows", "out", {"top_k": 1}),
    "without_capacity": ("random", "plain", {"max_num_tokens": None}),
}


# A pool serves all tests of the run.
_POOLS: dict[tuple[int, str], RankPool] = {}


def _pool(processes: int, device_type: str) -> RankPool:
    """Return the pool of so many ranks; a new one if a rank of the last one died."""
    key = processes, device_type
    if key not in _POOLS or _POOLS[key].closed:
        _POOLS[key] = RankPool(processes, device_type)
    return _POOLS[key]


def _groups(world: int, at_once: int) -> list[tuple[int, ...]]:
    """Return the ranks of ``at_once`` groups of ``world``; the first of two has the odd ranks."""
    return [tuple(range(i, at_once * world, at_once)) for i in reversed(range(at_once))]


def _sizes(hidden: int, tokens: int, intermediate: int = 32) -> Sizes:
    return {**sizes_of(8, 2, hidden, intermediate), "max_num_tokens": tokens}


def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest number of ranks, and the largest that this machine has devices for."""
    count = torch.cuda.device_count()
    fit = [n for n in sizes if n <= count or _shares()] if count else list(sizes)
    return tuple(sorted({min(sizes), max(fit, default=max(sizes))}))


def _shares() -> bool:
    return switch(SHARE_VARIABLE, False)


class DispatcherBase(Conformance):
    """Runs functions on ranks. See `DispatcherConformance`."""

    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    _interface = PrepareAndFinalize

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests by numbers of ranks.

        world: every number. ends: the smallest and the largest, for tests that hardly depend on
        it. most: the largest. several: 2 ranks and more.
        """
        super().pytest_generate_tests(metafunc)
        asked = os.environ.get(WORLD_SIZES_VARIABLE)
        sizes = tuple(map(int, asked.split(","))) if asked else self.world_sizes
        several, ends = tuple(n for n in sizes if n > 1), _ends(sizes)
        for name, some in (
            ("world", sizes),
            ("ends", ends),
            ("most", ends[-1:]),
            ("several", several),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, some, ids=lambda n: f"{n}ranks")
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize(
                "layout", [p for n in sizes for p in cases.layouts(n)], ids=cases.layout_name
            )

    def _spec(self) -> DispatcherSpec:
        return self._registry().dispatcher(self.backend)

    def _names(self) -> dict[str, str]:
        return {"dispatcher": self.backend}

    def _declares(self, name: str, value: Any) -> bool:
        return value in {*WIRE_SCHEMES, *self._spec().wire_schemes}

    def _capabilities(self) -> list[Capability]:
        spec = self._spec()
        schemes = {*spec.schemes, *spec.wire_schemes}
        found = super()._capabilities()
        found += [Capability(f"scheme {n}", {"quant": n}, n in schemes or None) for n in SCHEMES]
        two_ranks = {"parallel": ParallelConfig(ep_size=2)}
        found.append(Capability("moves_tokens", two_ranks, spec.moves_tokens or None))
        alone = [ParallelConfig(ep_size=size) for size in (1, 3, 8)]
        for parallel in (*alone, ParallelConfig(ep_size=3, dp_size=1), *cases.layouts(4)):
            found.append(Capability(cases.layout_name(parallel), {"parallel": parallel}, None))
        without = False if spec.needs_capacity else None
        found.append(Capability("max_num_tokens=None", {"max_num_tokens": None}, without))
        return found

    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        if device.type == "cpu":
            if SCHEMES[scheme].activation is not None:
                # With fewer neurons, the error of the worst rows is many times the usual one. A
                # token has several scales of 128 columns.
                return [_sizes(h, 32, 128) for h in (272, 512)]
            return [_sizes(48, 32), _sizes(128, 32), _sizes(512, 32, 128)]
        return [_sizes(h, 256, 256) for h in (272, 512, 1024, 2048, 4096, 7168)]

    def _parallel(self, world: int) -> ParallelConfig:
        """Give each rank its own tokens if the dispatcher moves tokens, else all the same."""
        dp_size = world if self._spec().moves_tokens else 1
        return ParallelConfig(ep_size=world, dp_size=dp_size)

    def _job(self, world: int, **changes: Any) -> Job:
        experts = changes.pop("experts", "torch")
        problem = self._problem(**{"parallel": self._parallel(world), **changes})
        return Job(ranks.sendable(self._spec()), problem, cases.seed(), experts)

    def _check(
        self, world: int, function: Callable[..., Any], *args: Any, **changes: Any
    ) -> list[Any]:
        """Run ``function(r, *args)`` on every `Rank`, for a problem with ``changes``.

        The function raises if it finds a fault. Where tokens move, two ranks are ranks 1 and 3 of
        four, so that the group is not WORLD. Ranks 0 and 2 run the same function with other data at
        the same time. This needs devices for four ranks.
        """
        job = self._job(world, **changes)
        if not job.problem.parallel.moves_tokens:
            return [ranks.run(rank, world, function, job, *args) for rank in range(world)]
        twice = world == 2 and self._devices_for(4)
        tasks = [(function, replace(job, seed=job.seed + i), args) for i in range(1 + twice)]
        return self._check_at_once(world, tasks)

    def _devices_for(self, ranks: int) -> bool:
        kind = self._device().type
        return kind == "cpu" or torch.get_device_module(kind).device_count() >= ranks or _shares()

    def _check_at_once(self, world: int, tasks: Sequence[ranks.Task], copies: int = 1) -> list[Any]:
        """Run each task in its own group of ``world`` ranks; return the first group's results.

        Args:
            copies: how many groups of the same ranks each task has.
        """
        processes, kind = world * len(tasks), self._device().type
        if not self._devices_for(processes):
            self._skip(f"{processes} ranks need as many {kind} devices, or {SHARE_VARIABLE}=1")
        # Three ranks are a group of four processes: these exist already.
        pool = _pool(4 if processes == 3 and self._devices_for(4) else processes, kind)
        groups = [
            Members(each, pool.failures, copy)
            for copy in range(copies)
            for each in _groups(world, len(tasks))
        ]
        results = pool.run(ranks.in_groups, groups, tasks)
        refused = [result for result in results if isinstance(result, ranks.Refused)]
        if refused and len(tasks) > 1 and len(refused) == processes:
            self._skip(f"does not support a group that is not WORLD: {refused[0].reason}")
        support = "only some ranks support" if len(refused) < processes else "no rank supports"
        assert not refused, f"{support} the problem; reasons: {refused}"
        return [results[rank] for rank in groups[0].ranks]

    def _quantized_wire(self, world: int, **more: Any) -> list[dict[str, Any]]:
        """Return changes of the problem that let tokens travel quantized, or nothing."""
        for scheme in [n for n in SCHEMES if n in self._spec().wire_schemes]:
            changes = {"quant": scheme, "parallel": self._parallel(world), **more}
            if isinstance(self._find_problem(**changes), MoEProblem):
                return [changes]
        return []

    def _needs_ranks(self) -> None:
        if not self._spec().moves_tokens:
            self._skip("moves no tokens, so its ranks need not agree")


class DispatcherConformance(DispatcherBase):
    """The kit for dispatchers. Subclass it with ``backend = "name"``.

    Where no token moves, this process runs one rank after the other. Elsewhere, two ranks are one
    of two groups in four processes, and four ranks are WORLD. A dispatcher whose library needs
    WORLD says so in `unsupported` if the default group is larger; then the tests of two ranks skip.

    Attributes:
        world_sizes: numbers of ranks to test with; on accelerators only those for which there are
            devices, unless ranks may share them. The environment variables
            MOEKIT_TEST_WORLD_SIZES and MOEKIT_TEST_SHARE_DEVICES change both. See `Conformance`
            for the other settings.
    """

    # -- tokens and routing -----------------------------------------------------------------------

    @pytest.mark.parametrize("counts", sorted(_COUNTS))
    def test_tokens_per_rank(self, counts: str, world: int) -> None:
        self._check(world, ranks.calls, [Call(_COUNTS[counts])])

    @pytest.mark.parametrize("name", _CALLS)
    def test_calls(self, name: str, ends: int) -> None:
        """Forms of problems and calls in which one thing is unusual."""
        kind, how, changes = _CALLS[name]
        if changes.get("num_experts") and ends >= changes["num_experts"]:
            changes = {"num_experts": 2 * ends - 1}
        counts = (3, 0, 9, 13)
        self._check(ends, ranks.calls, [Call(counts, kind), Call(counts[::-1])], how, **changes)

    def test_capacity(self, ends: int) -> None:
        """A call's result does not depend on how many tokens the kernel was composed for."""
        sequence = [Call((13, 9, 2, 13)), Call((1, 0, 1, 1)), Call((0, 3, 0, 2), "masked"),
                    Call((13, 1, 0, 5), "hot")]  # fmt: skip
        alike = {"parallel": self._parallel(ends)}
        found = [self._find_problem(**alike, max_num_tokens=13 * n) for n in (1, 8, 32, 64)]
        done = [p.max_num_tokens for p in found if isinstance(p, MoEProblem)]
        if not done:
            self._skip(str(found[0]))
        self._check(ends, ranks.told_calls, sequence, done)

    def test_three_ranks(self) -> None:
        """A number of ranks that is no power of two, with unequal shares of the experts."""
        self._needs_ranks()
        self._check(3, ranks.calls, [Call((3, 0, 9)), Call((5, 6, 4), "masked")])

    def test_slices_and_shared_tokens(self, layout: ParallelConfig) -> None:
        """Ranks hold slices of the same experts (tp_size), or the same tokens (dp_size)."""
        sequence = [Call((3, 0, 9, 13), "masked"), Call((0, 0, 0, 5)), Call((6, 6, 6, 6), "rows")]
        experts = 7 if layout.ep_size < 7 else 2 * layout.ep_size - 1
        changes = self._first({"parallel": layout, "num_experts": experts}, {"parallel": layout})
        self._check(layout.num_ranks, ranks.calls, sequence, **changes)

    @pytest.mark.parametrize("counts", ["uneven", "only_first_ranks", "none"])
    @pytest.mark.parametrize("kind", ["hot", "masked", "rows"])
    def test_each_assignment_is_delivered_once(self, counts: str, kind: str, ends: int) -> None:
        """`Dispatched` fits its docstring, and every (token, expert) assignment arrives once."""
        results = self._check(ends, interface.deliveries, Call(_COUNTS[counts], kind))
        batched = self._spec().format is ActivationFormat.BATCHED
        same = not self._spec().moves_tokens
        sent = [d for result in (results[:1] if same else results) for d in result[0]]
        arrived = [d for result in results for d in result[1]]
        keep = 3 if batched else 4  # batched tokens travel without their weights
        assert sorted(d[:keep] for d in arrived) == sorted(d[:keep] for d in sent)

    def test_many_assignments(self, most: int) -> None:
        """Calls have as many experts and assignments as models, many tokens, values of any size."""
        parallel = self._parallel(most)
        batched = self._spec().format is ActivationFormat.BATCHED
        changes = self._first(
            *(
                {"num_experts": experts, "num_redundant_experts": extra, "top_k": k,
                 "max_num_tokens": tokens, "parallel": parallel}
                for tokens in ((64,) if batched else (33000, 4096, 1024, 256, 64))
                for experts, extra, k in _MODELS
            )
        )  # fmt: skip
        counts = (0, 9, 40, changes["max_num_tokens"])
        self._check(most, interface.many_assignments, Call(counts), **changes)

    def test_wide_rows(self, most: int) -> None:
        """Tokens as wide as DeepSeek-V3's, or as wide as the dispatcher can, and 256 experts."""
        model: dict[str, Any] = {"num_experts": 256, "top_k": 8, "max_num_tokens": 16}
        model |= {"parallel": self._parallel(most)}
        changes = self._first(*({**model, "hidden_size": h} for h in (7168, 4096, 2048)))
        self._check(most, interface.many_assignments, Call((3, 0, 9, 13)), **changes)

    # -- arithmetic -------------------------------------------------------------------------------

    def test_sums_left_by_experts(self, world: int) -> None:
        """Experts of some ranks leave the sum over K to `finalize`, in rows anywhere."""
        if self._spec().load().takes_unreduced is PrepareAndFinalize.takes_unreduced:
            self._skip("the dispatcher leaves the sum over K to the experts (takes_unreduced)")
        parallel = {"parallel": self._parallel(world)}
        changes = self._first(*({"max_num_tokens": n, **parallel} for n in (2050, 260)), parallel)
        most = self._problem(**changes).max_num_tokens or 0
        sequence = [Call((5, 2, 9, 13), "masked"), Call((most,)), Call((most, 1, 0), "rows"),
                    Call((2, most, 7)), Call((most,), "hot")]  # fmt: skip
        left = self._check(world, ranks.calls, sequence, experts=LEAVES_SUMS, **changes)
        if not any(left):
            self._skip("the dispatcher takes no sums of this problem (takes_unreduced)")

    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_dtype(self, dtype: str, ends: int) -> None:
        self._check(ends, ranks.calls, [Call((3, 0, 9, 13))], "autocast", dtype=DTYPES[dtype])

    def test_outputs_beyond_float16(self, ends: int) -> None:
        """Experts' outputs in float32 keep values above 65504 until they are weighted."""
        spec = self._spec()
        if spec.fused or spec.format is ActivationFormat.BATCHED:
            self._needs("weights_in_fp32")
        changes = {"dtype": torch.float16, "experts": "reference"}  # these do not weight
        # In batch-invariant problems, dispatchers of both formats weight the outputs.
        if spec.batch_invariant and spec.weights_in_fp32 and (ends == 1 or spec.moves_tokens):
            changes["batch_invariant"] = True
        self._check(ends, ranks.outputs_beyond_float16, Call((3, 0, 9, 13), "masked"), **changes)

    @over("scheme", lambda: sorted(n for n, s in SCHEMES.items() if s.activation is not None))
    def test_quantized_tokens(self, scheme: str, ends: int) -> None:
        """Every scheme gives right results, and tokens travel quantized if the spec declares it.

        Wide tokens have many scales. Then torch has other defaults, as engines set them.
        """
        sequence = [Call((3, 0, 9, 13), "rows"), Call((0, 0, 0, 0))]
        widths = (1296,) if self._device().type == "cpu" else (7168, 4096, 2048)
        wide = {"quant": scheme, "parallel": self._parallel(ends)}
        wide = self._first(*({**wide, "hidden_size": h} for h in widths), wide)
        self._check(ends, ranks.calls, sequence, **wide)
        self._check(ends, ranks.calls, sequence, "fresh", experts="reference", quant=scheme)
        if scheme in self._spec().wire_schemes:
            results = self._check(ends, interface.wire, sequence[0], **wide)
            sent, arrived = (set[bytes]().union(*rows) for rows in zip(*results, strict=True))
            assert not sent or arrived <= sent, "rows arrive with other bits than any rank sent"

    # -- calls ------------------------------------------------------------------------------------

    def test_many_calls(self, world: int) -> None:
        """Calls with more and fewer tokens: no earlier call matters, and outputs do not change."""
        counts = [(7, 9, 3, 21), (1, 0, 2, 1), (0, 0, 0, 0), (0, 5, 30, 2), (9, 9, 9, 9)]
        counts *= 2 if self._device().type == "cpu" else 20  # 100 calls, where they are fast
        sequence = [Call(c, ("random", "masked")[i % 2]) for i, c in enumerate(counts)]
        self._check(world, ranks.calls, sequence, "fresh")

    def test_long_run_of_one_shape(self, most: int) -> None:
        """260 calls of one shape are right, and keep no tensors."""
        self._check(most, ranks.long_run, Call((11, 0, 3, 21), "masked"), top_k=4)

    def test_layers_in_turn(self, several: int) -> None:
        """Layers of one group with other sizes, with another scheme, and alike; two in flight."""
        p = self._job(several).problem
        sizes = [s["hidden_size"] for s in self._sizes(p.quant.name, p.device)]
        widths = sorted(sizes, key=lambda h: (h <= p.hidden_size, h))
        changes = self._first(
            *(
                {"num_experts": 16, "top_k": 4, "max_num_tokens": tokens, "hidden_size": hidden,
                 "parallel": p.parallel}
                for tokens in (2 * (p.max_num_tokens or 16), 16)
                for hidden in widths
            ),
            {"parallel": p.parallel},
        )  # fmt: skip
        alike = {"num_experts": 2 * p.num_experts, "top_k": 2 * p.top_k, "parallel": p.parallel}
        for each in (changes, self._first(alike, {"parallel": p.parallel})):
            self._check(several, ranks.layers, self._problem(**each))
        for each in self._quantized_wire(several):
            q = self._problem(**each)
            same = {"hidden_size": q.hidden_size, "intermediate_size": q.intermediate_size}
            if isinstance(other := self._find_problem(parallel=q.parallel, **same), MoEProblem):
                self._check(several, ranks.layers, q, parallel=q.parallel, **same)
                self._check(several, ranks.layers, other, **each)

    def test_two_calls_in_flight(self, world: int) -> None:
        """In the main form, and with tokens that travel quantized."""
        both = Call((7, 0, 3, 21)), Call((1, 8, 2, 5))
        self._check(world, ranks.in_flight, *both)
        if world > 1:
            for changes in self._quantized_wire(world):
                self._check(world, ranks.in_flight, *both, ["in turn"], **changes)

    def test_full_capacity(self, world: int) -> None:
        """Every rank has max_num_tokens tokens, all for one expert, then all for one rank."""
        parallel = {"parallel": self._parallel(world)}
        changes = self._first(*({"max_num_tokens": n, **parallel} for n in (1030, 260)), parallel)
        most = self._problem(**changes).max_num_tokens
        assert most is not None
        calls = [Call((most,), "hot"), Call((most,), cases.LAST)]
        self._check(world, ranks.calls, calls, **changes)

    # -- errors -----------------------------------------------------------------------------------

    def test_failure_after_dispatch(self, world: int) -> None:
        """One rank fails after `prepare`: all ranks raise and name it, and other calls work."""
        self._check(world, rank_failures.fails_after_dispatch)

    def test_failure_without_checks(self, several: int) -> None:
        """One rank fails before `prepare`, then two: `abort` makes the others raise and name it."""
        self._needs("aborts")
        self._needs_ranks()
        job = self._job(several)
        tasks: list[ranks.Task] = [(rank_failures.unchecked_rank_fails, job, ())]
        if several == 2 and self._devices_for(4):  # another group does not fail
            tasks.append((ranks.calls, job, ([Call((5, 3))] * 2,)))
        self._check_at_once(several, tasks)

    # -- groups -----------------------------------------------------------------------------------

    def test_group_is_resolved(self, several: int) -> None:
        """The constructor calls `resolve` and keeps the group that it returns."""
        self._needs_ranks()
        self._check(several, rank_failures.resolves)

    def test_groups_in_threads(self, most: int) -> None:
        """Two threads serve two groups of the same ranks, which begin in opposite orders."""
        self._needs_ranks()
        if most == 1:
            self._skip("needs two ranks")
        if self._device().type != "cpu":
            self._skip("on a device, kernels that wait for other ranks must start in one order")
        try:
            arguments = Call((5, 0, 3, 9)), _THREAD_SECONDS
            task = rank_failures.in_opposite_orders, self._job(most), arguments
            self._check_at_once(most, [task], copies=2)
        except RankError:
            for pool in _POOLS.values():  # threads that are blocked keep their locks
                pool.close(patience=0.0)
            raise

    def test_groups_of_one_name(self) -> None:
        """Torch names the default group as the one before it, which had other ranks."""
        self._needs_ranks()
        if self._device().type != "cpu":
            self._skip("libraries for devices may join only one set of ranks in a process")
        job = self._job(2)
        with RankPool(3) as pool:
            *_, refused = pool.run(rank_failures.groups_of_one_name, job, Call((5, 3)))
        if refused is not None:
            self._skip(f"refuses a group while another one's layer exists: {refused.reason}")

    def test_ranks_that_served_others(self) -> None:
        """Two of four ranks have served a layer alone before all of them serve one."""
        self._needs_ranks()
        part, sequence = self._job(2).problem, [Call((5, 0, 3, 9))]
        self._check_at_once(4, [(rank_failures.after_some, self._job(4), (part, sequence))])

    def test_threads(self) -> None:
        """Two threads call one kernel of a dispatcher that moves no tokens."""
        if self._spec().moves_tokens:
            self._skip("moves tokens, so its calls in one group take turns")
        # So many tokens that each call reaches every expert, so both take as many steps.
        self._check(1, rank_failures.of_one_kernel, Call((31,)), Call((32,), "masked"))

    # -- memory, determinism, graphs --------------------------------------------------------------

    def test_memory_is_stated(self, ends: int) -> None:
        """In the main form, and with tokens that travel quantized."""
        sizes: dict[str, Any] = {"num_experts": 8, "top_k": 4}
        for changes in ({}, *self._quantized_wire(ends, **sizes)):
            self._check(ends, ranks.memory, 32, **{**sizes, **changes})

    def test_deterministic(self, ends: int) -> None:
        self._needs("deterministic")
        # Sums of two are the same in any order, and float32 shows orders best.
        wide = {"top_k": 4, "parallel": self._parallel(ends)}
        changes = self._first({"dtype": torch.float32, **wide}, wide)
        self._check(ends, ranks.repeat, Call((7, 0, 3, 21), "hot"), **changes)

    @pytest.mark.parametrize(
        ("dtype", "scheme"),
        [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "fp8_block")],
    )
    def test_batch_invariant(self, dtype: str, scheme: str, world: int) -> None:
        """A token has the bits of a call by itself on one rank, whatever ranks it shares."""
        self._needs("batch_invariant")
        if world > 1 and not self._spec().moves_tokens:
            self._skip("moves no tokens, and batch-invariant ranks must not return partial sums")
        # Sums of two are the same in any order; float32 shows orders, and bfloat16 roundings.
        base = {"batch_invariant": True, "dtype": DTYPES[dtype], "quant": scheme, "top_k": 4}
        base["num_redundant_experts"] = 2
        sequence = [Call((7, 0, 3, 13)), Call((1, 9, 5, 2), "hot"), Call((0, 0, 0, 1), "masked")]
        layouts = [self._parallel(world)]
        if world % 4 == 0:
            layouts += [ParallelConfig(ep_size=world, dp_size=world // 2)]
        for parallel in layouts:
            self._check(world, ranks.batch_invariant, sequence, **base, parallel=parallel)

    def test_graph_capture(self, world: int) -> None:
        self._needs("graph_safe")
        if self._device().type != "cuda":
            self._skip("CUDA graphs need a CUDA device")
        self._check(world, interface.graph, 21)
