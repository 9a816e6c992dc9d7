"""The adapter's own logic over the stand-in, and on GPUs the library's limit it is built on."""

from __future__ import annotations

import math
import sys
import time
import types
from dataclasses import replace
from unittest import mock

import moekit_pplx.buffers
import moekit_pplx.dispatcher
import pplx_gpu
import pplx_standin
import pytest
import torch
from moekit_pplx.dispatcher import PplxDispatcher
from moekit_pplx.kernels import translate
from moekit_pplx.layout import Layout, Wire
from rank_events import GUARD, happened, wait_for
from rank_pools import rank_pool
from told_rows import told_rows

import moekit
from moekit import MoEProblem, ParallelConfig, Routing
from moekit.errors import BackendBroken, GroupMismatch
from moekit.testing.distributed import RankPool
from moekit.testing.ranks import Call, Job, calls, run


def problem_for(world, rank=0, **changes):
    sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, max_num_tokens=16)
    parallel = ParallelConfig(ep_size=world, ep_rank=rank)
    return MoEProblem(**{**sizes, "device": "cpu", "parallel": parallel, **changes})


def standin_spec():
    target = f"{pplx_standin.__name__}:StandInPplx"
    spec = moekit.registry().dispatcher("pplx")
    return replace(spec, name="pplx_standin", target=target, devices=("cpu",), requires=())


def dispatcher_on(rank, world, **changes):
    return pplx_standin.StandInPplx(standin_spec(), problem_for(world, rank, **changes))


def tokens_on(rank, tokens, problem):
    """x (T, H) whose rows are rank + 1 and t + 1, and a random routing with weights and -1."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.ones(tokens, problem.hidden_size, dtype=problem.dtype)
    x[:, 0], x[:, 1] = rank + 1, torch.arange(tokens) + 1
    scores = torch.rand(tokens, problem.num_physical_experts, generator=generator)
    ids = scores.argsort(dim=1)[:, : problem.top_k]
    weights = 0.5 + torch.rand(ids.shape, generator=generator)
    gone = torch.rand(ids.shape, generator=generator) < 0.2
    return x, Routing(weights.masked_fill(gone, float("nan")), ids.masked_fill(gone, -1))


def identity(dispatcher, x, routing):
    """A call with experts that return their input."""
    arrived = dispatcher.prepare(x, routing, None).result()
    return dispatcher.finalize(arrived.x, arrived, torch.empty_like(x)).result()


def identity_result(x, routing):
    weights = torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0)
    return x.float() * weights.sum(dim=1, keepdim=True)


def assert_identity(out, x, routing):
    torch.testing.assert_close(out.float(), identity_result(x, routing), atol=0, rtol=1e-2)


pool = rank_pool(2)


@pytest.fixture(scope="module")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    pytest.importorskip("pplx_kernels")
    with RankPool(2, "cuda", timeout=120) as ranks:
        yield ranks


# -- the library's limit ------------------------------------------------------------------------


def test_the_library_corrupts_more_tokens_than_multiprocessors(gpus):
    """This is why a call runs in rounds. If it fails, the library is fixed: raise the limit."""
    limit = torch.cuda.get_device_properties(0).multi_processor_count
    assert sum(wrong for wrong, _ in gpus.run(pplx_gpu.lost_rows, limit)) == 0
    assert sum(wrong for wrong, _ in gpus.run(pplx_gpu.lost_rows, 2 * limit)) > 0


def test_calls_on_two_streams_do_not_wait_for_each_other_on_gpus(gpus):
    gpus.run(pplx_gpu.streams)


def whole_layer(rank, world, problem, sequence):
    run(rank, world, calls, Job(standin_spec(), problem, 17), sequence)


@pytest.mark.parametrize("quant", ["none", "fp8_block", "int8_channel_token"])
def test_a_layer_in_rounds(pool, quant):
    problem = problem_for(2, max_num_tokens=200, hidden_size=128, quant=quant)
    pool.run(whole_layer, problem, [Call((200, 7), "masked"), Call((0, 133), "rows")])


def test_fewer_multiprocessors_make_more_rounds():
    layout = Layout.of(problem_for(8, max_num_tokens=128), 78)
    assert (layout.rounds, layout.tokens) == (2, 64)


# -- a problem in the library's terms -----------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("experts", "replicas", "top_k"), [(8, 0, 2), (11, 3, 8), (8, 1, 8)])
def test_destinations(world, experts, replicas, top_k):
    changes = {"num_experts": experts, "num_redundant_experts": replicas, "top_k": top_k}
    owners = {}
    spare = []
    for rank in range(world):
        problem = problem_for(world, rank, **changes)
        layout = Layout.of(problem, 132)
        table = layout.destinations(problem).tolist()
        assert len(table) == problem.num_physical_experts + top_k
        real, spares = table[:-top_k], table[-top_k:]
        assert len(set(table)) == len(table), "two slots of a token go to one library expert"
        for local, physical in enumerate(problem.local_experts):
            assert real[physical] == rank * layout.slabs + local
        owners[rank] = real
        assert spares[0] // layout.slabs == rank, "the first -1 stays on its rank"
        assert all(s % layout.slabs >= layout.experts for s in spares)
        spare += spares
    assert all(real == owners[0] for real in owners.values())
    # A rank's slab holds max_num_tokens rows of each rank: one a token in each spare, then.
    assert max(spare.count(s) for s in spare) <= world


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 150, 200])
def test_parts_cover_the_tokens(tokens):
    parts = Layout.of(problem_for(2, max_num_tokens=200), 132).parts(tokens)
    assert len(parts) == 2
    assert [i for part in parts for i in range(tokens)[part]] == list(range(tokens))
    assert all(len(range(tokens)[part]) <= 100 for part in parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_kernel_translates_as_torch_does(dtype):
    """In Triton's interpreter where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = problem_for(4, 1, num_experts=11, top_k=5)
    table = Layout.of(problem, 132).destinations(problem)
    ids = torch.randint(-1, 12, (257, 5), dtype=dtype)  # 11 is an expert that nobody has
    weights = torch.rand(257, 5).masked_fill(ids < 0, float("nan"))
    want = pplx_standin.StandInPplx.translate(ids, weights, table, 11)
    got = translate(ids.to(device), weights.to(device), table.to(device), 11)
    assert got[0].dtype == want[0].dtype == torch.uint32
    assert torch.equal(got[0].view(torch.int32).cpu(), want[0].view(torch.int32))
    torch.testing.assert_close(got[1].cpu(), want[1], atol=0, rtol=0, equal_nan=True)
    assert bool((want[1][ids < 0] == 0).all()) and bool(want[1][ids == 11].isnan().all())
    empty = translate(ids[:0].to(device), weights[:0].to(device), table.to(device), 11)
    assert empty[0].shape == (0, 5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": ParallelConfig(ep_size=2, tp_size=2, dp_size=4)}, "tp_size=2"),
        ({"parallel": ParallelConfig(ep_size=4, dp_size=2)}, "dp_size=2"),
        ({"hidden_size": 60}, "hidden_size 60 is not a multiple of 8"),
        ({"hidden_size": 136, "quant": "fp8_channel_token"}, "not a multiple of 16"),
        ({"hidden_size": 32768}, "a token has 65536 bytes"),
        ({"max_num_tokens": 1025}, "max_num_tokens=1025 exceeds 1024"),
        ({"max_num_tokens": None}, "set max_num_tokens"),
        ({"dtype": torch.float32}, "float32"),
    ],
)
def test_reasons(changes, reason):
    (found,) = standin_spec().unsupported(problem_for(2, **changes))
    assert reason in found


# -- calls ----------------------------------------------------------------------------------------


def unknown_expert(rank, world):
    dispatcher = dispatcher_on(rank, world)
    x, routing = tokens_on(rank, 9, dispatcher.problem)
    bad = routing.topk_ids.clone()
    if rank == 0:
        bad[4, 1] = 8
    out = identity(dispatcher, x, Routing(routing.topk_weights, bad))
    good = [t for t in range(9) if rank or t != 4]
    rest = Routing(routing.topk_weights[good], routing.topk_ids[good])
    assert_identity(out[good], x[good], rest)
    dispatcher.destroy()
    return bool(out[4].isnan().all())


def test_an_id_that_no_expert_has_spoils_only_its_token(pool):
    assert pool.run(unknown_expert) == [True, False]


def one_rank_abandons(rank, world):
    dispatcher = dispatcher_on(rank, world)
    x, routing = tokens_on(rank, 9, dispatcher.problem)
    arrived = dispatcher.prepare(x, routing, None).result()
    if rank == 1:
        dispatcher.abandon(arrived)
        seen = []
    else:
        out = dispatcher.finalize(arrived.x, arrived, torch.empty_like(x)).result()
        there = (routing.topk_ids >= 4).any(dim=1)
        seen = [bool(out[there].isnan().all()), bool(out[~there].isfinite().all())]
    assert_identity(identity(dispatcher, x, routing), x, routing)
    dispatcher.destroy()
    return seen


def test_peers_of_a_rank_that_gives_up_see_nan(pool):
    assert pool.run(one_rank_abandons)[0] == [True, True]


# -- buffers --------------------------------------------------------------------------------------


def counts():
    return pplx_standin.AllToAll.made, pplx_standin.AllToAll.destroyed


def sharing(rank, world):
    seen = []
    start = counts()

    def note():
        seen.append(tuple(now - then for now, then in zip(counts(), start, strict=True)))

    first, second = dispatcher_on(rank, world), dispatcher_on(rank, world)
    other = dispatcher_on(rank, world, hidden_size=128)
    x, routing = tokens_on(rank, 9, first.problem)
    stated = first.buffer_bytes()
    for dispatcher in (first, second, first):
        identity(dispatcher, x, routing)
    note()
    assert first.buffer_bytes() == second.buffer_bytes() == stated
    pending = [d.prepare(x, routing, None) for d in (first, second)]
    for dispatcher, arriving in zip((first, second), pending, strict=True):
        arrived = arriving.result()
        dispatcher.finalize(arrived.x, arrived, torch.empty_like(x)).result()
    note()
    assert first.buffer_bytes() == 2 * stated
    wide, wide_routing = tokens_on(rank, 9, other.problem)
    identity(other, wide, wide_routing)
    note()
    first.destroy()
    first.destroy()
    note()
    identity(second, x, routing)
    second.destroy()
    note()
    other.destroy()
    note()
    return seen


def test_buffers_are_shared_counted_and_freed(pool):
    """(made, destroyed) after each step."""
    for seen in pool.run(sharing):
        assert seen == [(1, 0), (2, 0), (3, 0), (3, 0), (3, 2), (3, 3)]


def out_of_memory(rank, world):
    dispatcher = dispatcher_on(rank, world)
    x, routing = tokens_on(rank, 9, dispatcher.problem)
    identity(dispatcher, x, routing)
    calls = dispatcher.lease.value.calls
    for _ in range(3):
        with mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                dispatcher.prepare(x, routing, None)
    assert_identity(identity(dispatcher, x, routing), x, routing)
    seen = len(calls.all), calls.in_flight
    dispatcher.destroy()
    return seen


def test_a_call_without_memory_takes_no_lane(pool):
    """Each lane holds gigabytes."""
    assert pool.run(out_of_memory) == [(1, 0)] * 2


@pytest.mark.parametrize(("tokens", "megabytes"), [(1, 11), (16, 182), (128, 1454), (1024, 11633)])
def test_lane_has_the_size_that_was_recorded(tokens, megabytes):
    """Recorded on 4 H200 with pplx-kernels."""
    sizes = {"num_experts": 256, "top_k": 8, "hidden_size": 7168, "max_num_tokens": tokens}
    layout = Layout.of(problem_for(4, **sizes), 128)
    nbytes = moekit_pplx.buffers.lane_bytes(layout, Wire(2 * 7168, 0), torch.bfloat16)
    assert round(nbytes / 1e6) == megabytes


def alone_at_the_end(rank, world):
    moekit_pplx.buffers._PATIENCE = 1.0
    dispatcher = dispatcher_on(rank, world)
    x, routing = tokens_on(rank, 9, dispatcher.problem)
    identity(dispatcher, x, routing)
    start, (_, before) = time.monotonic(), counts()
    if rank == 0:
        dispatcher.destroy()
        happened("rank 0 destroyed its dispatcher")
        return time.monotonic() - start, counts()[1] - before
    wait_for("rank 0 destroyed its dispatcher")
    dispatcher.destroy()
    return 0.0, counts()[1] - before


def test_destroy_does_not_wait_long_for_a_rank_that_does_not_come(pool):
    (seconds, freed), (_, freed_late) = pool.run(alone_at_the_end)
    assert 0.9 < seconds < GUARD and freed == freed_late == 1


def test_exit_without_destroy(tmp_path):
    """The interpreter frees what is left, in every rank, and ends."""
    with RankPool(2) as ranks:
        folder = str(tmp_path)
        ranks.run(leave_behind, folder)
        ranks.close(patience=60.0)
    assert sorted(p.read_text() for p in tmp_path.iterdir()) == ["freed 1", "freed 1"]


def leave_behind(rank, world, folder):
    import atexit
    import pathlib

    dispatcher = dispatcher_on(rank, world)
    identity(dispatcher, *tokens_on(rank, 9, dispatcher.problem))
    clear = moekit_pplx.buffers.shared.clear
    assert counts() == (1, 0)
    # Children of multiprocessing end without the interpreter's atexit: run what it would run.
    from multiprocessing import util

    def end():
        clear()
        pathlib.Path(folder, str(rank)).write_text(f"freed {counts()[1]}")

    atexit.unregister(clear)
    util.Finalize(None, end, exitpriority=1)


# -- the group and the library --------------------------------------------------------------------


def refused(rank, world, owner, name, answer):
    """Return the error of a dispatcher made where a function answers otherwise."""
    owner = {"dispatcher": moekit_pplx.dispatcher, "socket": moekit_pplx.dispatcher.socket}[owner]
    with mock.patch.object(owner, name, lambda *_: answer.format(rank=rank)):
        with pytest.raises(GroupMismatch) as caught:
            dispatcher_on(rank, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name", "answer", "said"),
    [
        ("dispatcher", "has_backend", "", "cpu:gloo,cuda:nccl"),
        ("socket", "gethostname", "host{rank}", "host host0 on ranks [0]"),
    ],
)
def test_groups_that_are_refused(pool, owner, name, answer, said):
    assert all(said in error for error in pool.run(refused, owner, name, answer))


def test_a_library_that_does_not_load(monkeypatch):
    """Upstream's package imports all the same, with nothing behind it."""
    broken = types.ModuleType("pplx_kernels")
    broken.ops = types.SimpleNamespace(_ops=types.SimpleNamespace())
    broken.AllToAll = object
    monkeypatch.setitem(sys.modules, "pplx_kernels", broken)
    with pytest.raises(BackendBroken, match="does not load"):
        PplxDispatcher.library()
    broken.ops._ops.all_to_all_intranode_create = math.sqrt
    with pytest.raises(BackendBroken, match="AllToAll.intranode is missing.*pplx-kernels"):
        PplxDispatcher.library()
    broken.AllToAll = pplx_standin.AllToAll
    assert PplxDispatcher.library() is pplx_standin.AllToAll
    monkeypatch.setitem(sys.modules, "pplx_kernels", None)
    with pytest.raises(BackendBroken, match="pplx_kernels does not load: .*pplx-kernels"):
        PplxDispatcher.library()


def test_rounds_and_rows_follow_max_tokens(pool):
    told = pool.run(told_rows, __name__, "pplx_standin", [1, 5, None, 1])
    assert told == [[2, 10, 32, 2]] * 2
