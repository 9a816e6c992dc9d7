"""The dispatchers' own logic, over the stand-in: what they hand to the library and make of it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from rank_pools import rank_pool

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

import nccl_standin  # noqa: E402
from moekit_nccl import buffers, library  # noqa: E402

from moekit import MoEProblem, ParallelConfig, Routing
from moekit.errors import BackendBroken, BackendError  # noqa: E402
from moekit.runtime import agreement  # noqa: E402

NAMES = ("nccl_ht_standin", "nccl_ll_standin")
E, K, H = 16, 3, 128

pool = rank_pool(2, timeout=120)
four = rank_pool(4, timeout=120)


def problem_of(rank, ranks=2, tp=1, dp=0, **changes):
    sizes = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=32, max_num_tokens=16)
    parallel = ParallelConfig(
        ep_size=ranks // tp, ep_rank=rank // tp, tp_size=tp, tp_rank=rank % tp, dp_size=dp
    )
    return MoEProblem(**{**sizes, "device": "cpu", "parallel": parallel, **changes})


def dispatcher_of(name, problem, group=None):
    spec = nccl_standin.registry().dispatcher(name)
    assert not spec.unsupported(problem), spec.unsupported(problem)
    return spec.load()(spec, problem, group)


def tokens_of(count, seed):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, H, generator=made).bfloat16()
    ids = torch.rand(count, E, generator=made).argsort(dim=1)[:, :K].contiguous()
    ids[torch.rand(ids.shape, generator=made) < 0.2] = -1
    weights = torch.rand(count, K, generator=made) + 0.5
    return x, Routing(torch.where(ids < 0, float("nan"), weights), ids)


def slice_of(tokens, part):
    """Return what a slice of experts that return their input makes of the rows; padding is NaN."""
    x = tokens.x.float()
    if tokens.expert_num_tokens is not None:
        real = torch.arange(x.shape[1]) < tokens.expert_num_tokens[:, None]
        return torch.where(real[..., None], x * part, float("nan")).bfloat16()
    weight = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0).sum(1, keepdim=True)
    return torch.where(weight > 0, x * weight * part, float("nan")).bfloat16()


def check(out, x, routing):
    weight = torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), x.float() * weight, atol=0.05, rtol=0.03)


def call(dispatcher, x, routing, part=1.0, out=None):
    tokens = dispatcher.prepare(x, routing, None).result()
    out = torch.full_like(x, float("nan")) if out is None else out
    return dispatcher.finalize(slice_of(tokens, part), tokens, out).result()


def slices_and_shares(rank, ranks, name, tp, dp):
    """Slices return a quarter and three quarters of the rows; sharers pass equal tokens."""
    dispatcher = dispatcher_of(name, problem_of(rank, ranks, tp, dp))
    share = ranks // (dp or ranks // tp)
    part = 1.0 if tp == 1 else (0.25, 0.75)[rank % tp]
    for n, counts in enumerate(((5, 3), (0, 16), (1, 0))):
        x, routing = tokens_of(counts[rank // share % 2], 10 * n + rank // share)
        check(call(dispatcher, x, routing, part), x, routing)
    held = dispatcher.lease.value.sizes
    dispatcher.destroy()
    return held.capacity, held.experts, held.slots, len(nccl_standin.live)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("tp", "dp", "want"),
    [(2, 4, (16, 32, 6)), (2, 2, (8, 32, 6)), (1, 2, (8, 16, 3)), (1, 4, (16, 16, 3))],
)
def test_slices_of_experts_and_shared_tokens(four, name, tp, dp, want):
    """Each rank makes room for its part of the tokens, and all memory is given back."""
    assert four.run(slices_and_shares, name, tp, dp) == [(*want, 0)] * 4


def groups(rank, ranks, name):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dispatcher = dispatcher_of(name, problem_of(rank // 2), pairs[rank % 2])
    everyone = dispatcher_of(name, problem_of(rank, 4))
    x, routing = tokens_of(3 + rank, rank)
    for each in (dispatcher, everyone, dispatcher):
        check(call(each, x, routing), x, routing)
    dispatcher.destroy()
    everyone.destroy()
    return len(nccl_standin.live)


@pytest.mark.parametrize("name", NAMES)
def test_groups_that_are_not_the_world(four, name):
    assert four.run(groups, name) == [0] * 4


def rows(rank, ranks, max_tokens):
    dispatcher = dispatcher_of("nccl_ht_standin", problem_of(rank))
    x, routing = tokens_of(2 + rank, rank)
    routing = Routing(routing.topk_weights, routing.topk_ids, max_tokens)
    tokens = dispatcher.prepare(x, routing, None).result()
    y = dispatcher.output(tokens)
    assert y.shape == tokens.x.shape and len(tokens.topk_ids) == len(y)
    y.copy_(slice_of(tokens, 1.0))
    check(dispatcher.finalize(y, tokens, torch.empty_like(x)).result(), x, routing)
    dispatcher.destroy()
    return len(y), dispatcher.spec.needs_capacity


@pytest.mark.parametrize(("max_tokens", "want"), [(None, 32), (3, 6), (16, 32)])
def test_rows_follow_the_tokens_of_a_call(pool, max_tokens, want):
    assert pool.run(rows, max_tokens) == [(want, True)] * 2


def unaligned(rank, ranks, name):
    """x and out begin anywhere, and rows of out are apart."""
    dispatcher = dispatcher_of(name, problem_of(rank))
    x, routing = tokens_of(5, rank)
    shifted = torch.empty(5 * H + 1, dtype=x.dtype)[1:].view(5, H).copy_(x)
    wide = torch.empty(5, 2 * H, dtype=x.dtype)
    for out in (torch.empty(5 * H + 1, dtype=x.dtype)[1:].view(5, H), wide[:, :H]):
        done = call(dispatcher, shifted, routing, out=out)
        assert done.data_ptr() == out.data_ptr()
        check(done, x, routing)
    dispatcher.destroy()


@pytest.mark.parametrize("name", NAMES)
def test_unaligned_tokens_and_outputs(pool, name):
    pool.run(unaligned, name)


def in_flight(rank, ranks, name):
    """(handles, bytes stated) while three calls are in flight, and after they ended in any order.

    Two layers share them.
    """
    layers = [dispatcher_of(name, problem_of(rank, intermediate_size=size)) for size in (32, 64)]
    before = layers[0].buffer_bytes()
    calls = []
    for n in range(3):
        x, routing = tokens_of(4 + n, 10 * n + rank)
        calls.append((layers[n % 2], x, routing, layers[n % 2].prepare(x, routing, None).result()))
    for layer, x, routing, tokens in (calls[1], calls[2], calls[0]):
        done = layer.finalize(slice_of(tokens, 1.0), tokens, torch.empty_like(x)).result()
        check(done, x, routing)
    held = layers[0].lease.value
    assert held is layers[1].lease.value and held.calls.in_flight == 0
    grown = layers[0].buffer_bytes() > before
    layers[0].destroy()
    x, routing = tokens_of(2, rank)
    check(call(layers[1], x, routing), x, routing)
    layers[1].destroy()
    return len(held.calls.all), grown, layers[1].buffer_bytes(), len(nccl_standin.live)


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_flight(pool, name):
    assert pool.run(in_flight, name) == [(3, True, 0, 0)] * 2


def timeouts(rank, ranks):
    import moekit

    seconds = []
    for limit in (60.0, 5.0):
        kernel = moekit.compose(
            problem_of(rank), "nccl_ll_standin", "torch",
            backends=nccl_standin.registry(), peer_timeout=limit,
        )  # fmt: skip
        seconds.append(kernel.dispatcher.lease.value.library.config.timeout_ns / 1e9)
        kernel.destroy()
    return seconds


def test_the_library_waits_longer_than_a_rank(pool):
    """The library adds the time in which a rank may compile kernels."""
    assert pool.run(timeouts) == [[90.0, 35.0]] * 2


def two_hosts(rank, ranks, name, network):
    comm = nccl_standin.Communicator
    comm.hosts, comm.gin_type = 2, network
    try:
        dispatcher = dispatcher_of(name, problem_of(rank))
        x, routing = tokens_of(4, rank)
        check(call(dispatcher, x, routing), x, routing)
        dispatcher.destroy()
    finally:
        comm.hosts, comm.gin_type = 1, 0


def refused(rank, ranks, name):
    with pytest.raises(
        BackendError, match="share no memory, and NCCL found no network for kernels"
    ):
        two_hosts(rank, ranks, name, network=0)
    return len(nccl_standin.live)


@pytest.mark.parametrize("name", NAMES)
def test_hosts_without_a_network_for_kernels(pool, name):
    """All ranks refuse, before the library would end the process."""
    pool.run(two_hosts, name, 3)
    assert pool.run(refused, name) == [0, 0]


def forget():
    """Forget what was left, and that a rank did not answer."""
    shared = (buffers._shared, buffers._connections)
    kept = [state for each in shared for state in (each._held, each._leases)]
    for state in (*kept, buffers._left, agreement._lost):
        state.clear()


def unresponsive_rank(rank, ranks, name):
    """Rank 1 does not free its buffers: rank 0 leaves its own, rather than hang."""
    dispatcher = dispatcher_of(name, problem_of(rank))
    before, buffers._FAREWELL_SECONDS = buffers._FAREWELL_SECONDS, 2.0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    buffers.logger.addHandler(handler)
    if rank == 0:
        dispatcher.destroy()
    dist.barrier()
    buffers._FAREWELL_SECONDS = before
    buffers.logger.removeHandler(handler)
    left = len(nccl_standin.live)
    forget()
    nccl_standin.live.clear()
    return said, left


@pytest.mark.parametrize("name", NAMES)
def test_an_unresponsive_rank_does_not_keep_destroy(pool, name):
    (said, left), _ = pool.run(unresponsive_rank, name)
    assert left and len(said) == 1 and "left to the end of the process" in said[0]
    assert "rank 1 did not come" in said[0]


def failed_device(rank, ranks):
    """One rank's GPU has failed: it says so, and no rank calls the library, which would end it."""
    dispatcher = dispatcher_of("nccl_ht_standin", problem_of(rank))
    held = dispatcher.lease.value
    if rank == 1:
        before, buffers.gpu_fault = buffers.gpu_fault, lambda *_: "its GPU has failed: launch"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    buffers.logger.addHandler(handler)
    dispatcher.destroy()
    buffers.logger.removeHandler(handler)
    alive = held.library in nccl_standin.live and held.connection.comm in nccl_standin.live
    if rank == 1:
        buffers.gpu_fault = before
    forget()
    nccl_standin.live.clear()
    return alive, said


def test_a_failed_device_leaves_the_library_alone(pool):
    for alive, said in pool.run(failed_device):
        assert alive and len(said) == 1 and "its GPU has failed" in said[0]


# -- the library ----------------------------------------------------------------------------------


def test_a_library_is_judged_by_what_it_offers(monkeypatch):
    monkeypatch.setattr(nccl_standin.Group, "create", classmethod(lambda cls, comm: None))
    monkeypatch.delattr(nccl_standin._ep, "GroupConfig")
    says = r"Group.create cannot be called: too many.*GroupConfig is missing.*nccl-extensions\[cu13"
    with pytest.raises(BackendBroken, match=says):
        library.LIBRARY.check(nccl_standin._ep, library.CALLS)
