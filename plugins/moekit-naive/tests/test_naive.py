"""Tests of `naive` beyond the kit: faults of one rank, groups, tight memory."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pools import rank_pool

import moekit
from moekit import MoEProblem, ParallelConfig, Routing
from moekit.errors import GroupMismatch, MoekitError
from moekit.problem.quantize import quantize
from moekit.testing import assert_close
from moekit.testing.calls import QUANTIZED_WIRE, kit_registry
from moekit.testing.cases import random_routing, random_weights, random_x, seed, use_seed, whole
from moekit.testing.distributed import RankError, RankPool
from moekit.testing.memory import measure, slack

RANKS = 4
QUANTIZED = {"hidden_size": 256, "intermediate_size": 128, "dtype": torch.bfloat16}


pool = rank_pool(RANKS)


gpus = rank_pool(2, "cuda", timeout=120)


def problem_of(rank: int, world_size: int, tp: int = 1, dp: int = 0, **changes) -> MoEProblem:
    parallel = ParallelConfig(
        ep_size=world_size // tp, ep_rank=rank // tp, tp_size=tp, tp_rank=rank % tp,
        dp_size=dp or world_size,
    )  # fmt: skip
    sizes = {"num_experts": 8, "top_k": 3, "hidden_size": 64, "intermediate_size": 32}
    defaults = {**sizes, "dtype": torch.float32, "device": "cpu"}
    return MoEProblem(**{**defaults, "parallel": parallel, **changes})


def composed(problem: MoEProblem, **options):
    kernel = moekit.compose(problem, "naive", "torch", **options)
    return kernel, kernel.pack(random_weights(problem))


def given(problem: MoEProblem, tokens: int, key: object = 0):
    return random_x(problem, tokens, key), random_routing(problem, tokens, key=key)


def outcome(call) -> str:
    """ "ok", or the kind and text of the moekit error that ``call`` raises."""
    try:
        call()
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


# -- memory -------------------------------------------------------------------------------------


def peak_bytes(rank, world_size, device, quant, tp, batch_invariant=False):
    """Return the bytes that a call allocates, keeps and declares, and a measurement's slack."""
    problem = problem_of(
        rank, world_size, tp, world_size // tp, quant=quant, hidden_size=512, device=device,
        intermediate_size=128, dtype=torch.bfloat16, batch_invariant=batch_invariant,
    )  # fmt: skip
    dispatcher = moekit.compose(problem, "naive", "torch").dispatcher
    x, routing = given(problem, 256, rank // tp)
    rows, scheme = dispatcher.max_rows(256), problem.quant.activation
    y = x.new_zeros((rows, 3, 512) if batch_invariant else (rows, 512))
    out, quantized = torch.empty_like(x), None if scheme is None else quantize(x, scheme)

    def call():
        send = None if quantized is None else lambda *_: quantized
        dispatched = dispatcher.prepare(x, routing, send).result()
        dispatcher.finalize(y, dispatched, out).result()

    call()
    # gloo's thread may drop its last reference to a buffer a moment after the call.
    measured = [measure(x.device, call) for _ in range(4)]
    peak, kept = max(m[0] for m in measured), min(m[1] for m in measured)
    said = dispatcher.transient_bytes(256)
    return peak, kept, said, slack(x.device, said)


def check_memory(results):
    for peak, kept, said, allowance in results:
        assert peak <= said + allowance and kept <= allowance, f"used {peak}, said {said}"
        assert said <= 1.5 * peak + allowance, f"said {said}, used only {peak}"


@pytest.mark.parametrize(
    "call", [("none", 1), ("fp8_block", 1), ("fp8_tensor", 1), ("none", 1, True), ("none", 2)]
)
def test_memory_is_what_was_said(pool, call):
    check_memory(pool.run(peak_bytes, "cpu", *call))


# -- what goes wrong on one rank is an error on all ---------------------------------------------


def fail_on_last_rank(rank, world_size, fault):
    problem = problem_of(rank, world_size, quant="fp8_channel_token", max_num_tokens=8, **QUANTIZED)
    kernel, packed = composed(problem)
    x, routing = given(problem, 4, rank)
    earlier = kernel.start(x, packed, routing)
    bad_x, bad_routing = x, routing
    quantize = kernel.experts.quantize
    if rank == world_size - 1:
        if fault == "dtype":
            bad_x = x.float()
        elif fault == "capacity":
            bad_x, bad_routing = given(problem, 9, rank)
        elif fault == "ids":
            bad_routing = Routing(routing.topk_weights, routing.topk_ids + 99)
        elif fault == "prepare":
            kernel.experts.quantize = mock.Mock(side_effect=MoekitError("planted"))
        elif fault == "form":
            kernel.experts.quantize = lambda *args: tuple(
                t.repeat(1, n) for t, n in zip(quantize(*args), (1, 2), strict=True)
            )
    said = outcome(lambda: kernel(bad_x, packed, bad_routing))
    kernel.experts.quantize = quantize
    finite = bool(torch.isfinite(earlier.result()).all())
    again = outcome(lambda: kernel(x, packed, routing))
    return said, finite, again


def test_ranks_that_send_different_forms_all_raise(pool):
    for said, finite, again in pool.run(fail_on_last_rank, "form"):
        assert said.startswith("GroupMismatch: ranks send tokens in different forms")
        assert finite and again == "ok"


def dies_before_it_sends(rank, world_size, counts):
    problem = problem_of(rank, world_size)
    kernel, packed = composed(problem, checked=False)
    x, routing = given(problem, counts[rank], rank)
    assert outcome(lambda: kernel(x, packed, routing)) == "ok"
    if rank == 1:
        kernel.dispatcher._gather = lambda *_: os._exit(3)
    said = outcome(lambda: kernel(x, packed, routing))
    raise RuntimeError(f"after the fault: {said}")


@pytest.mark.parametrize("counts", [(4, 4, 4), (5, 2, 0)], ids=["even", "uneven"])
def test_a_rank_that_dies_after_it_told_its_size_is_named(counts) -> None:
    """The others wait for its tokens, in a call that no check guards."""
    with RankPool(3, timeout=60) as ranks, pytest.raises(RankError) as caught:
        ranks.run(dies_before_it_sends, counts)
    assert caught.value.died == {1: 3} and not caught.value.hung
    for rank in (0, 2):
        said = caught.value.tracebacks[rank]
        assert "after the fault: PeerFailed" in said and "rank 1" in said, said


def runs_out_of_memory(rank, world_size):
    """On GPUs torch has no end to a launch that an error interrupts."""
    problem, begun = problem_of(rank, world_size), []
    kernel, _ = composed(problem, checked=False)
    x, routing = given(problem, 3, rank)

    @contextlib.contextmanager
    def one_launch(sizes):
        begun.append(sizes)
        yield []

    kernel.dispatcher._one_launch = one_launch
    full = mock.patch.object(torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(torch.OutOfMemoryError):
        kernel.dispatcher.prepare(x, routing, None)
    return not begun


def test_an_error_at_allocation_leaves_no_launch_begun(pool) -> None:
    assert all(pool.run(runs_out_of_memory))


def unequal_copies(rank, world_size):
    kernel, packed = composed(problem_of(rank, world_size, 2, world_size // 2))
    x, routing = given(kernel.problem, rank, rank)
    return outcome(lambda: kernel(x, packed, routing))


def test_ranks_of_one_batch_must_agree_on_its_size(pool):
    for said in pool.run(unequal_copies):
        assert said.startswith("GroupMismatch: ranks passed [0, 1, 2, 3] tokens")


# -- the group ----------------------------------------------------------------------------------


def compose_wrongly(rank, world_size, fault):
    right = problem_of(rank, world_size)
    last = rank == world_size - 1
    problem = {
        "hidden_size": lambda: right.replace(hidden_size=128) if last else right,
        "ep_size": lambda: (
            right.replace(parallel=ParallelConfig(ep_size=8, ep_rank=rank)) if last else right
        ),
        "order": lambda: problem_of(world_size - 1 - rank, world_size),
        "size": lambda: problem_of(rank, world_size + 1),
    }[fault]()
    said = outcome(lambda: moekit.compose(problem, "naive", "torch"))
    return said, outcome(lambda: moekit.compose(right, "naive", "torch"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("hidden_size", "ranks disagree on hidden_size: 64 on ranks [0"),
        ("ep_size", "ranks disagree on ep_size"),
        ("order", "set ep_rank = group rank // tp_size"),
        ("size", "pass the group of exactly the ranks"),
    ],
)
def test_a_group_that_does_not_match_is_an_error_on_all(pool, fault, text):
    for said, again in pool.run(compose_wrongly, fault):
        assert said.startswith("GroupMismatch") and text in said
        assert again == "ok"


def groups_of_one_backend(rank, world_size, run_seed):
    """Composes and calls over NCCL alone (sizes then travel on the GPU), and over gloo alone."""
    use_seed(run_seed)
    problem = problem_of(rank, world_size, dtype=torch.bfloat16, device="cuda")
    kernel, packed = composed(problem, group=dist.new_group(backend="nccl"))
    x, routing = given(problem, 3 * rank, rank)
    said = outcome(lambda: kernel(x.float() if rank else x, packed, routing))
    alone = moekit.compose(whole(problem), "local", "torch")
    want = alone(x, alone.pack(random_weights(alone.problem)), routing)
    assert_close(kernel(x, packed, routing), want.float(), problem)
    gloo = dist.new_group(backend="gloo")
    return said, outcome(lambda: moekit.compose(problem, "naive", "torch", group=gloo))


def test_groups_of_one_backend_on_gpus(gpus):
    results = gpus.run(groups_of_one_backend, seed())
    assert results[0][0].startswith("PeerFailed: rank 1 failed: InvalidInput: x is torch.float32")
    assert results[1][0].startswith("InvalidInput: x is torch.float32")
    for _, said in results:
        assert said.startswith("GroupMismatch") and "tensors on cuda want nccl" in said


def test_tokens_to_move_but_no_group():
    with pytest.raises(GroupMismatch, match="init_process_group"):
        moekit.compose(problem_of(0, 2), "naive", "torch")


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
def test_one_rank_needs_no_group(quant):
    problem = problem_of(0, 1, quant=quant, **QUANTIZED)
    naive, packed = composed(problem)
    # Tokens are quantized before they would travel.
    local = moekit.compose(problem, QUANTIZED_WIRE, "torch", backends=kit_registry())
    x, routing = given(problem, 6)
    want = local(x, local.pack(random_weights(problem)), routing)
    assert torch.equal(naive(x, packed, routing), want)
    assert naive.dispatcher.max_rows(6) == 6 and naive.dispatcher.transient_bytes(6) == 0


def test_local_is_preferred_where_nothing_moves():
    assert moekit.explain(problem_of(0, 1)).chosen.dispatcher == "local"
    moving = moekit.explain(problem_of(0, 2))
    assert moving.chosen.dispatcher == "naive" and "local" in moving.rejected_dispatchers
