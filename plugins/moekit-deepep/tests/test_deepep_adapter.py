"""The dispatchers' own logic, over the stand-in: what they hand to the library and make of it."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist
from rank_pools import rank_pool

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

import deepep_standin  # noqa: E402
import moekit_deepep  # noqa: E402
from moekit_deepep import buffers  # noqa: E402
from moekit_deepep.dispatcher import Transfer  # noqa: E402

from moekit import MoEProblem, ParallelConfig, Routing
from moekit.errors import BackendBroken, GroupMismatch  # noqa: E402
from moekit.runtime import agreement  # noqa: E402
from moekit.testing.distributed import RankPool  # noqa: E402

NAMES = ("deepep_ht_standin", "deepep_ll_standin", "deepep_elastic_standin")
E, K, H = 8, 3, 512


pool = rank_pool(2, timeout=120)


def problem_of(rank, ranks=2, **changes):
    sizes = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=32, max_num_tokens=16)
    parallel = ParallelConfig(ep_size=ranks, ep_rank=rank)
    return MoEProblem(**{**sizes, "device": "cpu", "parallel": parallel, **changes})


def dispatcher_of(name, problem, group=None):
    spec = deepep_standin.registry().dispatcher(name)
    assert not spec.unsupported(problem), spec.unsupported(problem)
    return spec.load()(spec, problem, group)


def tokens_of(count, seed, top_k=K, dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, H, generator=made).to(dtype)
    ids = torch.rand(count, E, generator=made).argsort(dim=1)[:, :top_k].contiguous()
    return x, Routing(torch.rand(count, top_k, generator=made) + 0.5, ids)


def experts_that_return_their_input(tokens):
    """Return the rows that the contract asks of experts in each format; padding is NaN."""
    x = tokens.x.float()
    if tokens.x_scale is not None:
        groups = tokens.x_scale.shape[-1]
        x = (x.unflatten(-1, (groups, -1)) * tokens.x_scale[..., None]).flatten(-2)
    if tokens.expert_num_tokens is not None:
        real = torch.arange(x.shape[1]) < tokens.expert_num_tokens[:, None]
        return torch.where(real[..., None], x, float("nan")).bfloat16()
    weight = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0).sum(1, keepdim=True)
    return torch.where(weight > 0, x * weight, 0.0).bfloat16()


def finish(dispatcher, pending, out):
    tokens = pending.result()
    return dispatcher.finalize(experts_that_return_their_input(tokens), tokens, out).result()


def check(out, x, routing):
    want = x.float() * torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0).sum(
        dim=1, keepdim=True
    )
    torch.testing.assert_close(out.float(), want, atol=0.05, rtol=0.03)


# -- rows ---------------------------------------------------------------------------------------


def rows(rank, ranks, name, most):
    """Return the rows, how many have an expert, and what max_rows says for 6 tokens a rank."""
    dispatcher = dispatcher_of(name, problem_of(rank, max_num_tokens=most))
    x, routing = tokens_of(5 + rank, rank)
    tokens = dispatcher.prepare(x, routing, None).result()
    rows, stated = tokens.x.shape[-2], dispatcher.max_rows(6)
    used = rows if tokens.topk_ids is None else int((tokens.topk_ids >= 0).any(dim=1).sum())
    finished = dispatcher.finalize(experts_that_return_their_input(tokens), tokens, x.clone())
    check(finished.result(), x, routing)
    dispatcher.destroy()
    return rows, used, stated


@pytest.mark.parametrize(
    ("name", "most", "want"),
    [
        ("deepep_ht_standin", None, ("as arrive", 12)),
        ("deepep_ht_standin", 4096, ("as arrive", 12)),
        ("deepep_ht_standin", 16, (32, 32)),
        ("deepep_elastic_standin", 16, (32, 32)),
        ("deepep_ll_standin", 7, (16, 16)),  # slabs divide by four
    ],
)
def test_room_for_what_arrives_or_for_all(pool, name, most, want):
    for got, used, stated in pool.run(rows, name, most):
        assert (used if want[0] == "as arrive" else want[0], want[1]) == (got, stated)
        assert used == got or 0 < used <= 11, "the tail has no expert"


# -- calls --------------------------------------------------------------------------------------


def dropped_call(rank, ranks, name):
    """Nobody takes the result; the stand-in's destroy() checks that it was waited for."""
    dispatcher = dispatcher_of(name, problem_of(rank))
    x, routing = tokens_of(4, rank)
    dispatcher.prepare(x, routing, None)
    check(finish(dispatcher, dispatcher.prepare(x, routing, None), x.clone()), x, routing)
    tokens = dispatcher.prepare(x, routing, None).result()
    dispatcher.finalize(experts_that_return_their_input(tokens), tokens, x.clone())
    dispatcher.destroy()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_nobody_finishes(pool, name):
    pool.run(dropped_call, name)


def test_a_transfer_is_waited_for_once():
    class Event:
        waits = 0

        def current_stream_wait(self):
            self.waits += 1

    event, dropped = Event(), Event()
    transfer = Transfer(event)
    transfer.wait()
    transfer.wait()
    del transfer
    Transfer(dropped)
    assert event.waits == dropped.waits == 1


# -- buffers ------------------------------------------------------------------------------------


def shared_buffers(rank, ranks, name):
    """(live buffers, bytes stated) as kernels come and go."""
    seen = []

    def look(dispatcher):
        seen.append((len(deepep_standin._Base.live), dispatcher.buffer_bytes() > 0))

    first = dispatcher_of(name, problem_of(rank))
    second = dispatcher_of(name, problem_of(rank, intermediate_size=64))
    look(second)
    other = dispatcher_of(name, problem_of(rank, hidden_size=1024))
    look(other)
    first.destroy()
    first.destroy()
    look(second)
    x, routing = tokens_of(3, rank)
    check(finish(second, second.prepare(x, routing, None), x.clone()), x, routing)
    other.destroy()
    look(second)
    second.destroy()
    look(second)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_layers_share_buffers_of_a_size(pool, name):
    want = [(1, True), (2, True), (2, True), (1, True), (0, False)]
    assert pool.run(shared_buffers, name) == [want, want]


def on_two_hosts(rank, ranks, name):
    before = buffers.socket.gethostname
    buffers.socket.gethostname = lambda: f"host{rank}"
    try:
        with pytest.raises(GroupMismatch, match="on host0.* on ranks .*on host1"):
            dispatcher_of(name, problem_of(rank))
    finally:
        buffers.socket.gethostname = before
    assert not deepep_standin._Base.live


@pytest.mark.parametrize("name", NAMES)
def test_two_hosts_are_refused(pool, name):
    pool.run(on_two_hosts, name)


def unresponsive_rank(rank, ranks):
    """Rank 1 does not free its buffers: rank 0 leaves its own, rather than hang, and waits once."""
    made = [dispatcher_of(name, problem_of(rank)) for name in NAMES]
    before, buffers._FAREWELL_SECONDS = buffers._FAREWELL_SECONDS, 2.0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    buffers.logger.addHandler(handler)
    begin = time.monotonic()
    if rank == 0:
        for dispatcher in made:
            dispatcher.destroy()
    spent = time.monotonic() - begin
    dist.barrier()
    buffers._FAREWELL_SECONDS = before
    buffers.logger.removeHandler(handler)
    left = len(deepep_standin._Base.live)
    for state in (buffers._shared._held, buffers._connected, agreement._lost):
        state.clear()
    deepep_standin._Base.live.clear()
    deepep_standin.Buffer._nvshmem.clear()
    return said, left, spent


def test_an_unresponsive_rank_does_not_keep_destroy(pool):
    (said, left, spent), _ = pool.run(unresponsive_rank)
    assert left == len(said) == 3 and spent < 100, "waited for each of three"
    assert all("left to the end of the process" in line for line in said)
    assert "rank 1 did not come" in said[0] and "rank 1" not in said[1]


def without_group(rank, ranks):
    group = dist.new_group([0, 1])
    dispatcher = dispatcher_of("deepep_elastic_standin", problem_of(rank), group)
    dist.destroy_process_group(group)
    dispatcher.destroy()
    left = len(deepep_standin._Base.live)
    deepep_standin._Base.live.clear()
    return left


def test_without_its_group_a_buffer_is_left_alone(pool):
    """The communicator beneath it is gone."""
    assert pool.run(without_group) == [1, 1]


def pairs_and_all(rank, ranks):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    name = "deepep_ll_standin"
    pair = dispatcher_of(name, problem_of(rank % 2), pairs[rank // 2])
    x, routing = tokens_of(4, rank)
    check(finish(pair, pair.prepare(x, routing, None), x.clone()), x, routing)
    everyone = problem_of(rank, 4)
    with pytest.raises(GroupMismatch, match="NVSHMEM between ranks"):
        dispatcher_of(name, everyone)
    normal = dispatcher_of("deepep_ht_standin", everyone)
    pair.destroy()
    wide = dispatcher_of(name, everyone)
    with pytest.raises(GroupMismatch, match="NVSHMEM connects only one set of ranks"):
        dispatcher_of(name, problem_of(rank % 2), pairs[rank // 2])
    for dispatcher in (wide, normal):
        check(finish(dispatcher, dispatcher.prepare(x, routing, None), x.clone()), x, routing)
        dispatcher.destroy()


def test_nvshmem_connects_one_set_of_ranks():
    with RankPool(4, timeout=120) as four:
        four.run(pairs_and_all)


# -- the library ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacking", "says"),
    [
        (NAMES[0], "Buffer.get_dispatch_layout", "Buffer.get_dispatch_layout is missing"),
        (NAMES[1], "Buffer.low_latency_combine", "Buffer.low_latency_combine is missing"),
        (NAMES[2], "ElasticBuffer", "ElasticBuffer is missing; ElasticBuffer.dispatch is missing"),
    ],
)
def test_a_library_is_judged_by_what_it_offers(monkeypatch, name, lacking, says):
    """Before any rank waits for another."""
    owner, _, attribute = lacking.rpartition(".")
    owner = getattr(buffers.deep_ep, owner) if owner else buffers.deep_ep
    monkeypatch.delattr(owner, attribute)
    with pytest.raises(BackendBroken, match=f"{says}.*pip install 'sgl-deep-ep"):
        dispatcher_of(name, problem_of(0))


@pytest.mark.parametrize(
    ("dist_info", "says"),
    [("sgl_deep_ep-0.1.2", "sgl-deep-ep 0.1.2 in"), ("deep_ep-1.2.1+a8bfc50", "deep_ep 1.2.1+a8bf"),
     ("other-1.0", "deep_ep of unknown version in")],
)  # fmt: skip
def test_the_copy_is_named_as_pip_knows_it(monkeypatch, tmp_path, dist_info, says):
    folder = tmp_path / "deep_ep"
    folder.mkdir()
    (tmp_path / f"{dist_info}.dist-info").mkdir()
    monkeypatch.setattr("moekit.discovery.library._package_folder", lambda name: folder)
    spec, *_ = moekit_deepep.moekit_dispatchers()
    assert spec.description(problem_of(0)).startswith(says)
