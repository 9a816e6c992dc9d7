"""The kernels of `nvlink_ht` in Triton's interpreter: several ranks' buffers in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moekit_nvlink import dispatcher
from moekit_nvlink.buffers import Buffer
from moekit_nvlink.dispatcher import Ranks, gather, output_of, send
from moekit_nvlink.footprint import Layout

import moekit

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


def problems(ep: int, tp: int, experts: int, top_k: int, hidden: int, capacity: int, **more):
    return [
        moekit.MoEProblem(
            num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=32 * tp,
            max_num_tokens=capacity, dtype=torch.bfloat16, device="cpu",
            parallel=moekit.ParallelConfig(
                ep_size=ep, ep_rank=rank // tp, tp_size=tp, tp_rank=rank % tp, dp_size=ep * tp
            ),
            **more,
        )
        for rank in range(ep * tp)
    ]  # fmt: skip


class Host:
    """All ranks of one layer in this process. Sends are launched before any rank waits."""

    def __init__(self, layer: list[moekit.MoEProblem]) -> None:
        self.layer, self.layout = layer, Layout.of(layer[0])
        buffers = [torch.full((self.layout.nbytes,), 0x7F, dtype=torch.uint8) for _ in layer]
        for buffer in buffers:
            buffer[self.layout.flags :] = 0
            buffer[self.layout.ids : self.layout.weights] = 0xFF
        addresses = [buffer.data_ptr() for buffer in buffers]
        self.buffers = [Buffer.of(buffer, addresses, len(layer)) for buffer in buffers]

    def call(self, xs, routings, work, scales=None, programs: int = 3):
        """Dispatch, let ``work(rank, tokens)`` make y, combine. Returns each rank's output."""
        ranks = [Ranks.of(p) for p in self.layer]
        waits = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher, "_receive", lambda *a, **k: waits.append((a, k)))
            arrived = [
                send(p, ranks[i], self.layout, self.buffers[i], xs[i], scales and scales[i],
                     routings[i], programs)
                for i, p in enumerate(self.layer)
            ]  # fmt: skip
        for args, constants in waits:
            dispatcher._receive(*args, **constants)
        outs = []
        for i, p in enumerate(self.layer):
            y = output_of(p, self.layout, self.buffers[i])
            y.fill_(float("nan"))
            work(i, arrived[i], y)
        # A rank that combines first would wait for the flags of the others for ever.
        flags = [
            buffer.region(self.layout.flags, (2, len(ranks)), torch.int64)
            for buffer in self.buffers
        ]
        number = int(self.buffers[0].epoch) + 1
        for mine in flags:
            mine[1] = number << 32
        for i, p in enumerate(self.layer):
            out = torch.full((len(xs[i]), p.hidden_size), float("nan"), dtype=p.dtype)
            call = arrived[i].handle
            gather(ranks[i], self.layout, self.buffers[i], call.slots_TE, out, programs)
            outs.append(out)
        for i, mine in enumerate(flags):
            assert mine[1].tolist() == [number << 32] * len(ranks), f"rank {i}: a flag is missing"
            assert int(self.buffers[i].epoch) == number and not self.buffers[i].counters.any()
        return outs


def routing_of(tokens: int, experts: int, top_k: int, generator: torch.Generator, holes: bool):
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].int()
    if holes:
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return moekit.Routing(torch.rand(tokens, top_k, generator=generator), ids.contiguous())


def run(ep, tp, experts, top_k, hidden, capacity, counts, seed, holes, calls=2):
    """Each expert e adds weight * (e + 1) * x: whatever arrives wrongly changes the sum."""
    layer = problems(ep, tp, experts, top_k, hidden, capacity)
    host, generator = Host(layer), torch.Generator().manual_seed(seed)
    for call in range(calls):
        now = [counts[(i + call) % len(counts)] for i in range(ep * tp)]
        xs = [torch.randn(n, hidden, generator=generator).bfloat16() for n in now]
        routings = [routing_of(n, experts, top_k, generator, holes) for n in now]

        def work(rank, tokens, y):
            start, used = layer[rank].local_experts.start, (tokens.topk_ids >= 0).any(1)
            factor = torch.where(
                tokens.topk_ids >= 0, (tokens.topk_ids + start + 1) * tokens.topk_weights, 0.0
            ).sum(1)
            y[used] = (tokens.x[used].float() * factor[used, None] / tp).bfloat16()
            assert int(tokens.topk_ids.max()) < layer[rank].num_local_experts

        outs = host.call(xs, routings, work)
        for x, routing, out in zip(xs, routings, outs, strict=True):
            there = routing.topk_ids >= 0
            factor = torch.where(there, (routing.topk_ids + 1) * routing.topk_weights, 0.0).sum(1)
            want = x.float() * factor[:, None]
            assert not out.isnan().any()
            # One rounding of y for each rank that has an expert of the token.
            assert (out.float() - want).norm() <= 0.02 * want.norm() + 1e-6


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (3, 1)])
def test_tokens_reach_their_experts_and_come_back(ep: int, tp: int, holes: bool) -> None:
    run(ep, tp, 8, 3, 48, 13, (5, 0, 13, 1, 9), 1, holes)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ep=st.integers(2, 4), experts=st.integers(5, 12), top_k=st.integers(1, 4),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 2**20),
    holes=st.booleans(),
)  # fmt: skip
def test_any_routing(ep, experts, top_k, counts, seed, holes) -> None:
    run(ep, 1, experts, top_k, 16, 9, counts, seed, holes, calls=1)


def test_rows_of_an_earlier_call_have_no_expert_later() -> None:
    layer = problems(2, 1, 4, 2, 16, 8)
    host, generator = Host(layer), torch.Generator().manual_seed(0)
    for counts in ((8, 8), (1, 0), (0, 0), (3, 8)):
        xs = [torch.randn(n, 16, generator=generator).bfloat16() for n in counts]
        routings = [routing_of(n, 4, 2, generator, False) for n in counts]
        seen = {}

        def work(rank, tokens, y, seen=seen):
            seen[rank] = (tokens.topk_ids >= 0).any(1).view(2, 8).sum(1).tolist()
            y[(tokens.topk_ids >= 0).any(1)] = 0

        host.call(xs, routings, work)
        for rank, problem in enumerate(layer):
            mine = [
                sum(any(e in problem.local_experts for e in ids) for ids in r.topk_ids.tolist())
                for r in routings
            ]
            assert seen[rank] == mine


def test_a_rank_that_does_not_come_makes_nan_and_is_named(monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "_SPINS", 3)
    layer = problems(2, 1, 4, 2, 16, 8)
    host, generator = Host(layer), torch.Generator().manual_seed(0)
    x, routing = torch.randn(4, 16).bfloat16(), routing_of(4, 4, 2, generator, False)
    tokens = send(layer[0], Ranks.of(layer[0]), host.layout, host.buffers[0], x, None, routing, 2)
    assert host.buffers[0].error.tolist() == [0, 1]
    out = torch.zeros(4, 16, dtype=torch.bfloat16)
    gather(Ranks.of(layer[0]), host.layout, host.buffers[0], tokens.handle.slots_TE, out, 2)
    assert out.isnan().all()


def test_scales_travel_with_their_rows() -> None:
    layer = problems(2, 1, 4, 2, 256, 8, quant="fp8_block")
    host, generator = Host(layer), torch.Generator().manual_seed(0)
    xs = [torch.randn(5, 256, generator=generator).to(torch.float8_e4m3fn) for _ in layer]
    scales = [torch.rand(5, 2, generator=generator) for _ in layer]
    routings = [routing_of(5, 4, 2, generator, False) for _ in layer]

    def work(rank, tokens, y):
        used = (tokens.topk_ids >= 0).any(1)
        rows = tokens.x[used].float().view(-1, 2, 128) * tokens.x_scale[used][:, :, None]
        y[used] = rows.view(-1, 256).bfloat16()

    outs = host.call(xs, routings, work, scales)
    for i, out in enumerate(outs):
        ranks = torch.stack(
            [torch.isin(routings[i].topk_ids, torch.tensor(list(p.local_experts))).any(1)
             for p in layer]
        ).sum(0)  # fmt: skip
        want = (xs[i].float().view(5, 2, 128) * scales[i][:, :, None]).view(5, 256) * ranks[:, None]
        assert (out.float() - want).norm() <= 0.01 * want.norm()
