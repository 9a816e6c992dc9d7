"""The naive dispatcher on real ranks: gloo on 2 and 4, NCCL on 2 GPUs where there are any."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layer_on_ranks import (
    Case,
    my_problem,
    my_weights,
    on_one_rank,
    outcome,
    run_batched_case,
    run_case,
    tokens,
    whole_problem,
    whole_weights,
)

import moekit
from moekit import ParallelConfig, Routing
from moekit.errors import GroupMismatch
from moekit.problem.quant import quantize
from moekit.testing.distributed import RankError, RankPool
from moekit.testing.memory import measure, slack

QUANTIZED = dict(num_experts=4, hidden_size=256, intermediate_size=128, dtype="bfloat16")
LARGE = dict(hidden_size=512, intermediate_size=128, dtype="bfloat16")
CASES = {
    "even": Case(((5, 5, 5, 5),)),
    "uneven": Case(((7, 1, 0, 13),)),
    "one_token": Case(((0, 1, 0, 0),)),
    "no_tokens": Case(((0, 0, 0, 0),)),
    "a_rank_without": Case(((0, 9, 3, 4),), dtype="bfloat16"),
    "holes": Case(((9, 4, 1, 6),), ids="holes"),
    "one_expert": Case(((9, 4, 1, 6),), ids="one"),
    "every_expert": Case(((3, 4, 0, 2),), num_experts=6, top_k=6),
    "odd_experts": Case(((3, 4, 5, 2),), num_experts=7, top_k=2),
    "replicas": Case(((3, 4, 5, 2),), num_experts=7, replicas=3),
    "weight_on_input": Case(((3, 4, 0, 2),), top_k=1, on_input=True),
    "bfloat16": Case(((31, 17, 1, 40),), dtype="bfloat16"),
    "float16": Case(((31, 17, 1, 40),), dtype="float16"),
    "two_in_flight": Case(((4, 0, 2, 5), (1, 6, 3, 3), (2, 2, 2, 2), (0, 0, 0, 1)), in_flight=2),
    "thirty_calls": Case(tuple((i % 7, i * i % 5, 3, (i + 3) % 4) for i in range(30))),
    "fp8_block": Case(((9, 4, 0, 6),), quant="fp8_block", **QUANTIZED),
    "fp8_tensor": Case(((9, 4, 0, 6),), quant="fp8_tensor", **QUANTIZED),
    "fp8_tensor_holes": Case(((9, 4, 1, 6),), quant="fp8_tensor", ids="holes", **QUANTIZED),
    "fp8_tensor_static": Case(((9, 4, 0, 6),), quant="fp8_tensor_static", **QUANTIZED),
    "fp8_channel_token": Case(((9, 4, 0, 6),), quant="fp8_channel_token", **QUANTIZED),
    "int8_channel_token": Case(((5, 5, 5, 5),), quant="int8_channel_token", **QUANTIZED),
    "fp8_weight_only": Case(((9, 4, 0, 6),), quant="fp8_w8a16_block", **QUANTIZED),
    "not_reducing": Case(((9, 4, 0, 6),), experts="reference", ids="holes"),
    "slices": Case(((9, 4, 0, 6),), tp=2, ids="holes"),
    "shared_batches": Case(((5, 8, 0, 0),), tp=2, dp=2),
    "shared_batches_even": Case(((5, 5, 0, 0),), tp=2, dp=2, dtype="bfloat16"),
}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request):
    with RankPool(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    with RankPool(2, "cuda", timeout=120) as ranks:
        yield ranks


def fits(case: Case, world_size: int) -> Case:
    """``case`` for this many ranks: two ranks make one slice group, not two sharing a batch."""
    return replace(case, dp=0) if case.dp >= world_size else case


@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_layer(pool, name):
    assert pool.run(run_case, fits(CASES[name], pool.world_size)) == [""] * pool.world_size


@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_layer_on_gpus(gpus, name):
    assert gpus.run(run_case, fits(CASES[name], 2), "cuda") == [""] * 2


def test_slices_over_all_ranks(pool):
    case = Case(((9, 4, 0, 6),), tp=pool.world_size, dtype="bfloat16")
    assert pool.run(run_case, case) == [""] * pool.world_size


@pytest.mark.parametrize("name", ["holes", "fp8_block", "fp8_tensor", "two_in_flight", "no_tokens"])
def test_batched_experts_through_a_bridge(pool, name):
    assert pool.run(run_batched_case, CASES[name]) == [""] * pool.world_size


def same_bits(rank, world_size, device):
    case = Case(((),), dtype="bfloat16")
    kernel = moekit.compose(my_problem(case, rank, world_size, device), "naive", "torch")
    packed = kernel.pack(my_weights(whole_weights(whole_problem(case, device)), kernel.problem))
    x, routing = tokens(case, 17 + rank, rank, device)
    first = kernel(x, packed, routing)
    return all(torch.equal(first, kernel(x, packed, routing)) for _ in range(5))


def test_deterministic(pool):
    assert all(pool.run(same_bits, "cpu"))


def test_deterministic_on_gpus(gpus):
    assert all(gpus.run(same_bits, "cuda"))


def peak_bytes(rank, world_size, device, quant, tp, batch_invariant=False):
    """Return the bytes that a call allocates, keeps and declares, and a measurement's slack."""
    case = Case(((),), tp=tp, dp=world_size // tp, quant=quant, **LARGE)
    problem = my_problem(case, rank, world_size, device).replace(batch_invariant=batch_invariant)
    dispatcher = moekit.compose(problem, "naive", "torch").dispatcher
    x, routing = tokens(case, 256, rank // tp, device)
    x, routing = x.contiguous(), replace(routing, topk_ids=routing.topk_ids.long())
    rows, top_k = dispatcher.max_rows(256), routing.topk_ids.shape[1]
    shape = (rows, top_k, x.shape[1]) if batch_invariant else (rows, x.shape[1])
    out, y = torch.empty_like(x), x.new_zeros(shape)
    scheme = problem.quant.activation
    quantized = None if scheme is None else quantize(x, scheme)

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


@pytest.mark.parametrize("quant", ["none", "fp8_block", "fp8_tensor"])
def test_memory_is_what_was_said(pool, quant):
    check_memory(pool.run(peak_bytes, "cpu", quant, 1))


def test_memory_is_what_was_said_of_batch_invariant_calls(pool):
    check_memory(pool.run(peak_bytes, "cpu", "none", 1, True))


def test_memory_is_what_was_said_where_ranks_share_batches(pool):
    if pool.world_size < 4:
        pytest.skip("with 2 ranks sharing a batch no tokens move")
    check_memory(pool.run(peak_bytes, "cpu", "none", 2))


@pytest.mark.parametrize("quant", ["none", "fp8_block", "fp8_tensor"])
def test_memory_is_what_was_said_on_gpus(gpus, quant):
    check_memory(gpus.run(peak_bytes, "cuda", quant, 1))


# -- what goes wrong on one rank is an error on all ---------------------------------------------


def fail_on_last_rank(rank, world_size, fault):
    case = Case(((),), quant="fp8_channel_token", **QUANTIZED)
    problem = my_problem(case, rank, world_size).replace(max_num_tokens=8)
    kernel = moekit.compose(problem, "naive", "torch")
    packed = kernel.pack(my_weights(whole_weights(whole_problem(case, "cpu")), problem))
    x, routing = tokens(case, 4, rank, "cpu")
    earlier = kernel.start(x, packed, routing)
    bad_x, bad_routing = x, routing
    quantize = kernel.experts.quantize
    if rank == world_size - 1:
        if fault == "dtype":
            bad_x = x.float()
        elif fault == "capacity":
            bad_x, bad_routing = tokens(case, 9, rank, "cpu")
        elif fault == "ids":
            bad_routing = Routing(routing.topk_weights, routing.topk_ids + 99)
        elif fault == "prepare":

            def broken(*_):
                raise moekit.MoekitError("planted")

            kernel.experts.quantize = broken
        elif fault == "form":
            kernel.experts.quantize = lambda *args: tuple(
                t.repeat(1, n) for t, n in zip(quantize(*args), (1, 2), strict=True)
            )
    said = outcome(lambda: kernel(bad_x, packed, bad_routing))
    kernel.experts.quantize = quantize
    finite = bool(torch.isfinite(earlier.result()).all())
    again = outcome(lambda: kernel(x, packed, routing))
    return said, finite, again


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("dtype", "InvalidInput", "x is torch.float32"),
        ("capacity", "CapacityExceeded", "max_num_tokens=8"),
        ("ids", "InvalidInput", "topk_ids span"),
        ("prepare", "MoekitError", "planted"),
    ],
)
def test_a_bad_call_on_one_rank_is_an_error_on_all(pool, fault, kind, text):
    *others, bad = pool.run(fail_on_last_rank, fault)
    assert bad[0].startswith(kind) and text in bad[0]
    for said, _, _ in others:
        assert said.startswith(f"PeerFailed: rank {pool.world_size - 1} failed") and text in said
    assert all(finite and again == "ok" for _, finite, again in (*others, bad))


def dies_before_it_sends(rank, world_size, counts):
    case = Case(((),))
    problem = my_problem(case, rank, world_size)
    kernel = moekit.compose(problem, "naive", "torch", checked=False)
    packed = kernel.pack(my_weights(whole_weights(whole_problem(case, "cpu")), problem))
    x, routing = tokens(case, counts[rank], rank, "cpu")
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


def test_an_error_at_allocation_leaves_no_launch_begun(pool) -> None:
    assert all(pool.run(runs_out_of_memory))


def runs_out_of_memory(rank, world_size):
    """On GPUs torch has no end to a launch that an error interrupts."""
    case, begun = Case(((),)), []
    kernel = moekit.compose(my_problem(case, rank, world_size), "naive", "torch", checked=False)
    x, routing = tokens(case, 3, rank, "cpu")

    @contextlib.contextmanager
    def one_launch(sizes):
        begun.append(sizes)
        yield []

    kernel.dispatcher._one_launch = one_launch
    full = mock.patch.object(torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(torch.OutOfMemoryError):
        kernel.dispatcher.prepare(x, routing, None)
    return not begun


def test_ranks_that_send_different_forms_all_raise(pool):
    for said, finite, again in pool.run(fail_on_last_rank, "form"):
        assert said.startswith("GroupMismatch: ranks send tokens in different forms")
        assert finite and again == "ok"


def fail_everywhere(rank, world_size):
    case = Case(((),))
    kernel = moekit.compose(my_problem(case, rank, world_size), "naive", "torch")
    packed = kernel.pack(my_weights(whole_weights(whole_problem(case, "cpu")), kernel.problem))
    x, routing = tokens(case, rank, rank, "cpu")
    bad = outcome(lambda: kernel(x[:, :-1], packed, routing))
    kernel.destroy()
    kernel.destroy()
    return bad, outcome(lambda: kernel(x, packed, routing))


def test_a_bad_call_on_all_ranks_is_each_rank_s_own_error(pool):
    for bad, again in pool.run(fail_everywhere):
        assert bad.startswith("InvalidInput: x has shape") and again == "ok"


def unequal_copies(rank, world_size):
    case = Case(((),), tp=2, dp=world_size // 2)
    kernel = moekit.compose(my_problem(case, rank, world_size), "naive", "torch")
    packed = kernel.pack(my_weights(whole_weights(whole_problem(case, "cpu")), kernel.problem))
    x, routing = tokens(case, rank, rank, "cpu")
    return outcome(lambda: kernel(x, packed, routing))


def test_ranks_of_one_batch_must_agree_on_its_size(pool):
    if pool.world_size < 4:
        pytest.skip("with 2 ranks sharing a batch no tokens move")
    for said in pool.run(unequal_copies):
        assert said.startswith("GroupMismatch: ranks passed [0, 1, 2, 3] tokens")


# -- the group ----------------------------------------------------------------------------------


def compose_wrongly(rank, world_size, fault):
    problem = my_problem(Case(((),)), rank, world_size)
    last = rank == world_size - 1
    if fault == "hidden_size" and last:
        problem = problem.replace(hidden_size=128)
    if fault == "ep_size" and last:
        problem = problem.replace(parallel=ParallelConfig(ep_size=8, ep_rank=rank))
    if fault == "order":
        problem = my_problem(Case(((),)), world_size - 1 - rank, world_size)
    if fault == "size":
        problem = my_problem(Case(((),)), rank, world_size + 1)
    said = outcome(lambda: moekit.compose(problem, "naive", "torch"))
    return said, outcome(
        lambda: moekit.compose(my_problem(Case(((),)), rank, world_size), "naive", "torch")
    )


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


def layer_per_pair(rank, world_size):
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    group, case = pairs[rank // 2], Case(((),))
    problem = my_problem(case, rank % 2, 2)
    kernel = moekit.compose(problem, "naive", "torch", group=group)
    weights = whole_weights(whole_problem(case, "cpu"))
    packed = kernel.pack(my_weights(weights, problem))
    x, routing = tokens(case, rank + 3, rank, "cpu")
    alone = moekit.compose(whole_problem(case, "cpu"), "local", "torch")
    want = alone(x, alone.pack(weights), routing)
    torch.testing.assert_close(kernel(x, packed, routing), want)


def test_a_subgroup(pool):
    pool.run(layer_per_pair)


def groups_of_one_backend(rank, world_size):
    """Composes and calls over NCCL alone (sizes then travel on the GPU), and over gloo alone."""
    case = Case(((),), dtype="bfloat16")
    problem, whole = my_problem(case, rank, world_size, "cuda"), whole_problem(case, "cuda")
    weights = whole_weights(whole)
    kernel = moekit.compose(problem, "naive", "torch", group=dist.new_group(backend="nccl"))
    packed = kernel.pack(my_weights(weights, problem))
    x, routing = tokens(case, 3 * rank, rank, "cuda")
    said = outcome(lambda: kernel(x.float() if rank else x, packed, routing))
    alone = moekit.compose(whole, "local", "torch")
    want = alone(x, alone.pack(weights), routing)
    torch.testing.assert_close(kernel(x, packed, routing), want, atol=0.05, rtol=0.05)
    gloo = dist.new_group(backend="gloo")
    return said, outcome(lambda: moekit.compose(problem, "naive", "torch", group=gloo))


def test_groups_of_one_backend_on_gpus(gpus):
    results = gpus.run(groups_of_one_backend)
    assert results[0][0].startswith("PeerFailed: rank 1 failed: InvalidInput: x is torch.float32")
    assert results[1][0].startswith("InvalidInput: x is torch.float32")
    for _, said in results:
        assert said.startswith("GroupMismatch") and "tensors on cuda want nccl" in said


def test_tokens_to_move_but_no_group():
    problem = my_problem(Case(((),)), 0, 2)
    with pytest.raises(GroupMismatch, match="init_process_group"):
        moekit.compose(problem, "naive", "torch")


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
def test_one_rank_needs_no_group(quant):
    case = Case(((),), quant=quant, **QUANTIZED)
    problem = whole_problem(case, "cpu")
    weights = whole_weights(problem)
    x, routing = tokens(case, 6, 0, "cpu")
    naive, local = moekit.compose(problem, "naive", "torch"), on_one_rank(problem, "torch")
    assert torch.equal(
        naive(x, naive.pack(weights), routing), local(x, local.pack(weights), routing)
    )
    assert naive.dispatcher.max_rows(6) == 6 and naive.dispatcher.transient_bytes(6) == 0


def test_local_is_preferred_where_nothing_moves():
    problem = whole_problem(Case(((),)), "cpu")
    assert moekit.explain(problem).chosen.dispatcher == "local"
    moving = moekit.explain(my_problem(Case(((),)), 0, 2))
    assert moving.chosen.dispatcher == "naive" and "local" in moving.rejected_dispatchers
