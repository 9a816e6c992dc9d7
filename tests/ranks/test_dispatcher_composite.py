"""Composites of dispatchers: which member serves a call, failures, memory, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import moekit
from moekit.backends.reference import oracle
from moekit.discovery.registry import Registry, registry
from moekit.errors import PeerFailed, UnknownBackend, Unsupported
from moekit.selection.composite import composite
from moekit.testing.cases import make_case, use_seed
from moekit.testing.dispatchers import DispatcherConformance
from moekit.testing.distributed import RankPool

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, dtype=torch.float32, device="cpu",
    max_num_tokens=16, parallel=moekit.ParallelConfig(ep_size=2),
)  # fmt: skip
NAME = "naive:3|flashinfer_allgather"


class TestWhole(DispatcherConformance):
    """The kit's calls have from 0 to 51 tokens, and most do not say `max_tokens`."""

    backend = NAME
    world_sizes = (2,)
    backends = Registry(plugins=registry().plugins)
    backends.register(composite(NAME, registry().dispatcher))


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks


def composed(rank: int, name: str = NAME, **changes) -> moekit.ModularKernel:
    parallel = replace(PROBLEM.parallel, ep_rank=rank)
    problem = PROBLEM.replace(parallel=parallel, **changes.pop("problem", {}))
    return moekit.compose(problem, name, "torch", group=dist.group.WORLD, **changes)


def serve(rank: int, world: int, most: list[int | None], **changes) -> list[tuple[str, bool]]:
    """Make two calls in flight with each number; return who served them, and if all is right."""
    use_seed(1)  # the ranks' parts are of the same weights
    kernel, found = composed(rank, **changes), []
    served: list[str] = []
    for member in kernel.dispatcher.members:

        def prepare(*args, run=member.prepare, name=member.spec.name):
            served.append(name)
            return run(*args)

        member.prepare = prepare
    whole = kernel.problem.replace(parallel=moekit.ParallelConfig(), max_num_tokens=None)
    weights = make_case(whole, 1).weights
    packed = kernel.pack(weights.select(kernel.problem.local_experts))
    for step, told in enumerate(most):
        cases = [make_case(whole, n, key=step, weights=weights) for n in (2 - rank, 2)]
        flights = [
            kernel.start(c.x, packed, replace(c.routing, max_tokens=told)) for c in cases
        ]  # fmt: skip
        outs = [each.result() for each in flights]
        refs = [oracle(c.x, weights, c.routing, whole) for c in cases]
        right = all(torch.allclose(o, r, atol=1e-4) for o, r in zip(outs, refs, strict=True))
        found.append((" ".join(sorted({*served})), right))
        served.clear()
    kernel.destroy()
    return found


def test_max_tokens_choose_the_member(pool) -> None:
    for told in pool.run(serve, [2, 3, 4, None, 2]):
        few, many = ("naive", True), ("flashinfer_allgather", True)
        assert told == [few, few, many, many, few]


def fail(rank: int, world: int, most: int) -> str:
    """Let rank 1 fail before its dispatch, in a kernel without checks."""
    kernel = composed(rank, checked=False)
    whole = kernel.problem.replace(parallel=moekit.ParallelConfig(), max_num_tokens=None)
    case = make_case(whole, 2)
    packed = kernel.pack(case.weights.select(kernel.problem.local_experts))
    x = case.x.double() if rank else case.x
    try:
        kernel(x, packed, replace(case.routing, max_tokens=most))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_fails_tells_the_ranks_in_the_member_of_the_call(pool) -> None:
    told = pool.run(fail, 2)
    assert told[0].startswith("PeerFailed: rank 1 failed: InvalidInput: x is torch.float64")
    assert told[1].startswith("InvalidInput: x is torch.float64")


def measure(rank: int, world: int) -> tuple[object, ...]:
    kernels = [composed(rank, name) for name in (NAME, *NAME.replace(":3", "").split("|"))]
    reports = [kernel.memory(4) for kernel in kernels]
    note = kernels[0].explanation.note
    for kernel in kernels:
        kernel.destroy()
    return (note, *((r.workspace, r.intermediate, r.buffers) for r in reports))


def test_memory_holds_the_buffers_of_all_and_the_largest_call(pool) -> None:
    for note, both, *each in pool.run(measure):
        most = [max(sizes) for sizes in zip(*each, strict=True)]
        assert both == (most[0], most[1], sum(buffers for _, _, buffers in each))
        assert "calls without max_tokens go to flashinfer_allgather" in note


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("naive:3|nvlink_ll", {}, "to the same layout of tokens: naive is standard, nvlink_ll is"),
        (NAME, {"max_num_tokens": None}, "set max_num_tokens in the problem"),
        (NAME, {"batch_invariant": True}, "name one of naive, flashinfer_allgather"),
        (NAME, {"training": True}, "has no backward: name one of its members"),
    ],
)
def test_what_a_composite_refuses(name: str, changes: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        moekit.compose(PROBLEM.replace(**changes), name, "torch")


def test_names() -> None:
    with pytest.raises(UnknownBackend, match="no dispatcher named 'nave'"):
        moekit.explain(PROBLEM, "nave:3|naive")
    with pytest.raises(UnknownBackend, match="is not a composite"):
        moekit.explain(PROBLEM, "naive|naive")


def test_one_rank_needs_no_member() -> None:
    problem = PROBLEM.replace(parallel=moekit.ParallelConfig())
    kernel, case = moekit.compose(problem, NAME, "torch"), make_case(problem, 5)
    out = kernel(case.x, kernel.pack(case.weights), case.routing)
    assert torch.allclose(out, oracle(case.x, case.weights, case.routing, problem), atol=1e-4)
    assert kernel.dispatcher.spec.name == NAME and not kernel.dispatcher.spec.moves_tokens


def test_ranks_that_differ_in_max_tokens_raise(pool) -> None:
    for told in pool.run(differ):
        assert told.startswith("PeerFailed: ") and "max_tokens=2'" in told


def differ(rank: int, world: int) -> str:
    try:
        serve(rank, world, [2 + 2 * rank])
    except PeerFailed as error:
        return f"PeerFailed: {error}"
    return ""
