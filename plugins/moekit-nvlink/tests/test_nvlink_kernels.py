"""The kernels in Triton's interpreter against a dense oracle: several ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moekit_nvlink import transfer
from nvlink_host import Host, problems

import moekit
from moekit.discovery.registry import registry
from moekit.testing.cases import random_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch) -> None:
    """The interpreter runs one program after another."""
    monkeypatch.setattr(transfer.Tile, "few_programs", 4)


KINDS = ("random", "holes", "hot", "none")


@dataclass(frozen=True)
class Shape:
    """A layer; ``copies`` consecutive ranks hold the same tokens."""

    batched: bool
    ep: int
    tp: int = 1
    copies: int = 1
    experts: int = 8
    top_k: int = 3
    hidden: int = 48
    capacity: int = 8
    programs: int = 3
    dtype: torch.dtype = torch.float32
    training: bool = False

    def host(self, seed: int = 0) -> Host:
        layer = problems(self.ep, self.tp, self.experts, self.top_k, self.hidden, self.capacity,
                         self.copies, dtype=self.dtype, training=self.training)  # fmt: skip
        return Host(layer, self.batched, self.programs, seed)


def routing_of(
    tokens: int, shape: Shape, kind: str, draw: torch.Generator, most: int | None
) -> moekit.Routing:
    """Weights are NaN where there is no expert."""
    scores = torch.rand(tokens, shape.experts, generator=draw)
    if kind == "hot":
        scores[:, shape.experts // 2] = -1
    ids = scores.argsort(1)[:, : shape.top_k]
    if torch.rand((), generator=draw) < 0.5:
        ids = ids.int()
    weights = 2 * torch.rand(tokens, shape.top_k, generator=draw) - 0.5
    if kind == "none":
        ids[:] = -1
    elif kind == "holes":
        ids[torch.rand(ids.shape, generator=draw) < 0.4] = -1
    weights[ids < 0] = float("nan")
    return moekit.Routing(weights, ids.contiguous(), max_tokens=most)


class Call:
    """Tokens of all batches, and a check of every stage against dense arithmetic."""

    def __init__(self, shape: Shape, host: Host, counts, kind: str, draw: torch.Generator):
        self.shape, self.host = shape, host
        batches = shape.ep * shape.tp // shape.copies
        now = [counts[b % len(counts)] for b in range(batches)]
        # Every other call says how many tokens any rank has.
        most = max(now) if torch.rand((), generator=draw) < 0.5 else None
        self.xs = [torch.randn(n, shape.hidden, generator=draw).to(shape.dtype) for n in now]
        self.routings = [routing_of(n, shape, kind, draw, most) for n in now]
        self.rows = batches * (shape.capacity if most is None else max(1, most))
        ranks = range(len(host.layer)) if shape.training else ()
        nan = float("nan")
        self.grads = [torch.full_like(self.routings[r // shape.copies].topk_weights, nan)
                      for r in ranks]  # fmt: skip

    def dispatch(self, place: int = 0) -> None:
        self.flight = self.host.dispatch(self.xs, self.routings, place=place)
        for problem, arrived in zip(self.host.layer, self.flight.arrived, strict=True):
            check = self._check_batched if self.shape.batched else self._check_rows
            check(problem.local_experts, arrived)

    def _check_batched(self, mine: range, arrived) -> None:
        """An expert's rows are its tokens, by batch and token."""
        assert arrived.topk_ids is None and arrived.x.shape[:2] == (len(mine), self.rows)
        for local, expert in enumerate(mine):
            want = torch.cat([
                x[(r.topk_ids == expert).any(1)]
                for x, r in zip(self.xs, self.routings, strict=True)
            ])  # fmt: skip
            assert int(arrived.expert_num_tokens[local]) == len(want)
            assert torch.equal(arrived.x[local, : len(want)], want)

    def _check_rows(self, mine: range, arrived) -> None:
        """A batch's rows are its tokens with an expert here; the others have none."""
        assert len(arrived.x) == len(arrived.topk_ids) == self.rows
        used = (torch.isin(r.topk_ids, torch.tensor(mine)).any(1) for r in self.routings)
        end = len(self.xs) * max(int(rows.sum()) for rows in used)
        assert (
            arrived.num_rows is None if self.shape.training else arrived.num_rows.tolist() == [end]
        )
        for b, (x, routing) in enumerate(zip(self.xs, self.routings, strict=True)):
            here = (routing.topk_ids >= mine.start) & (routing.topk_ids < mine.stop)
            used, local = here.any(1), torch.where(here, routing.topk_ids - mine.start, -1)
            rows, count = slice(b, None, len(self.xs)), int(used.sum())
            assert torch.equal(arrived.x[rows][:count], x[used])
            ids = arrived.topk_ids[rows]
            assert torch.equal(ids[:count], local[used].int()) and (ids[count:] == -1).all()
            got, want = arrived.topk_weights[rows][:count], routing.topk_weights[used]
            assert torch.equal(got[here[used]], want[here[used]])

    def combine(self) -> None:
        """Expert e returns (e + 1) * x in slices of different sizes, and nothing for padding.

        In training, e + 1 is also the router gradient.
        """
        self.check(self.host.combine(self.flight, self.experts, grads=self.grads or None))

    def check(self, outs: Sequence[torch.Tensor]) -> None:
        for rank, out in enumerate(outs):
            b = rank // self.shape.copies
            x, routing = self.xs[b].float(), self.routings[b]
            there = routing.topk_ids >= 0
            factors = torch.where(there, (routing.topk_ids + 1) * routing.topk_weights, 0.0)
            want, limit = x * factors.sum(1)[:, None], 5e-6 if out.dtype == torch.float32 else 1e-2
            size = x * factors.abs().sum(1)[:, None]  # the sum's terms, which may cancel
            assert not out.isnan().any()
            assert (out.float() - want).norm() <= limit * size.norm() + 1e-6
            if self.grads:
                assert torch.allclose(
                    self.grads[rank], torch.where(there, routing.topk_ids + 1, 0.0)
                )

    def experts(self, rank: int, tokens, y) -> None:
        problem, tp = self.host.layer[rank], self.shape.tp
        first, slice_of = problem.local_experts.start, (2 * (rank % tp) + 1) / tp**2
        if self.shape.batched:
            for local, count in enumerate(tokens.expert_num_tokens.tolist()):
                rows = tokens.x[local, :count].float()
                y[local, :count] = (rows * (local + first + 1) * slice_of).to(y.dtype)
            return
        used = (tokens.topk_ids >= 0).any(1)
        factor = torch.where(
            tokens.topk_ids >= 0, (tokens.topk_ids + first + 1) * tokens.topk_weights, 0.0
        ).sum(1)
        y[used] = (tokens.x[used].float() * factor[used, None] * slice_of).to(y.dtype)
        if self.grads:
            found = torch.where(tokens.topk_ids >= 0, tokens.topk_ids + first + 1, 0.0) * slice_of
            self.host.ranks[rank].router_gradients(tokens.handle)[used] = found[used]


def run(shape: Shape, calls, kinds=("random",), seed: int = 0) -> None:
    host, draw = shape.host(seed), torch.Generator().manual_seed(seed)
    for i, counts in enumerate(calls):
        call = Call(shape, host, counts, kinds[i % len(kinds)], draw)
        call.dispatch()
        call.combine()


FORMATS = pytest.mark.parametrize("batched", [False, True], ids=["ht", "ll"])
CALLS = [(5, 0, 8, 1), (8,), (0,), (1, 0, 0, 2)]


@FORMATS
@pytest.mark.parametrize(
    ("ep", "tp", "copies"),
    [
        (3, 1, 1),
        (2, 2, 2),
        *(pytest.param(*s, marks=pytest.mark.full) for s in ((2, 2, 1), (4, 1, 2))),
    ],
)
def test_tokens_reach_their_experts_and_come_back(batched, ep, tp, copies) -> None:
    run(Shape(batched, ep, tp, copies), CALLS, KINDS, seed=1)


@pytest.mark.parametrize("few", [512, 0])
@pytest.mark.parametrize(("ep", "tp", "copies"), [(3, 1, 1), (2, 2, 2)])
def test_router_gradients_come_home(ep, tp, copies, few, monkeypatch) -> None:
    monkeypatch.setattr(transfer.Tile, "few", few)
    run(Shape(False, ep, tp, copies, top_k=5, training=True), CALLS, KINDS, seed=2)


UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@st.composite
def shapes(draw) -> Shape:
    batched = draw(st.booleans())
    ep = draw(st.integers(1, 8))
    tp = draw(st.integers(1 + (ep == 1), max(1 + (ep == 1), 8 // ep)))
    copies = draw(st.sampled_from([n for n in range(1, ep * tp) if ep * tp % n == 0]))
    experts = draw(st.integers(ep, 40))
    return Shape(
        batched, ep, tp, copies, experts,
        top_k=draw(st.integers(1, min(experts, 32))),
        hidden=draw(st.sampled_from((16, 48, 128))),
        capacity=draw(st.integers(1, 9)),
        programs=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
    )  # fmt: skip


def check_any_layer(shape: Shape, data) -> None:
    counts = st.lists(st.integers(0, shape.capacity), min_size=1, max_size=5)
    calls = data.draw(st.lists(counts, min_size=1, max_size=3))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    run(shape, calls, kinds, seed=data.draw(st.integers(0, 2**20)))


@pytest.mark.full
@settings(max_examples=30, **UNHURRIED)
@given(shape=shapes(), data=st.data())
def test_many_layers_and_routings(shape: Shape, data) -> None:
    check_any_layer(shape, data)


@FORMATS
@pytest.mark.parametrize("medium", [0, 2048])
def test_many_tokens_take_wider_steps(batched, medium, monkeypatch) -> None:
    """Tiles of several tokens, rows and pipelined steps, as for more than 512 tokens."""
    monkeypatch.setattr(transfer.Tile, "few", 0)
    monkeypatch.setattr(transfer.Tile, "medium", medium)
    run(Shape(batched, 2, hidden=80, capacity=21, programs=2), [(21, 17), (3, 20)], KINDS)


@FORMATS
def test_ids_beyond_the_last_expert_go_nowhere(batched) -> None:
    """Checked calls refuse them; others must not write to an address that they make up."""
    shape = Shape(batched, 3)
    host, draw = shape.host(), torch.Generator().manual_seed(9)
    call = Call(shape, host, (6, 8, 1), "random", draw)
    wrong = [torch.rand(r.topk_ids.shape, generator=draw) < 0.3 for r in call.routings]
    for routing, where in zip(call.routings, wrong, strict=True):
        routing.topk_ids[where] = shape.experts + 2
    flight = host.dispatch(call.xs, call.routings)
    for routing, where in zip(call.routings, wrong, strict=True):
        routing.topk_ids[where] = -1
    call.check(host.combine(flight, call.experts))


@FORMATS
def test_a_rank_without_room_for_the_tokens_of_another_makes_nan_once(batched) -> None:
    """Its experts do not see these tokens. Checked calls refuse a max_tokens that differs."""
    shape = Shape(batched, 3, capacity=9)
    host, draw = shape.host(), torch.Generator().manual_seed(4)
    for most in ((9, 9, 9), (9, 2, 9), (9, None, 9)):
        call = Call(shape, host, (9, 2, 5), "random", draw)
        call.routings = [replace(r, max_tokens=m) for r, m in zip(call.routings, most, strict=True)]
        flight = host.dispatch(call.xs, call.routings)
        refused = 2 in most
        outs = host.combine(flight, call.experts, refused=refused)
        if refused:
            assert outs[1].isnan().all()  # the others learn it by its flags
        else:
            call.check(outs)


@FORMATS
def test_tokens_that_begin_within_a_word(batched) -> None:
    shape = Shape(batched, 2, dtype=torch.bfloat16)
    host, draw = shape.host(), torch.Generator().manual_seed(2)
    call = Call(shape, host, (3, 5), "random", draw)
    for b, x in enumerate(call.xs):
        call.xs[b] = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    call.dispatch()
    call.combine()


@FORMATS
def test_a_rank_that_does_not_come_makes_nan_and_is_named(batched, monkeypatch) -> None:
    """Also on a rank whose own flags all came: the rank that gave up tells it."""
    monkeypatch.setattr(transfer, "_SPINS", 3)
    shape = Shape(batched, 3, capacity=8, programs=2)
    host, draw = shape.host(), torch.Generator().manual_seed(0)
    call = Call(shape, host, (4,), "random", draw)
    host.open()
    sent = [
        t.send(b, x, None, r)
        for t, b, x, r in zip(host.ranks, host.sets[0], call.xs, call.routings, strict=True)
    ]
    steps = [(made(), arrived) for made, arrived in sent]
    for step in range(len(steps[0][0])):  # rank 2 stays away
        for rank in (0, 1):
            steps[rank][0][step]()
    for rank in (0, 1):
        with pytest.raises(moekit.errors.PeerFailed, match=r"rank 2 did not come"):
            host.lost[rank].check()
        outs = [torch.zeros(4, shape.hidden), torch.zeros(4, shape.hidden)]
        for step in host.ranks[rank].gather(steps[rank][1].handle, outs[rank]):
            step()
        assert outs[rank].isnan().all()
    flags = host.flags(host.sets[0][2])[2]
    assert flags.tolist() == [1 << 32 | 1, 1 << 32 | 1, 0], "rank 2 must learn of it"
    for steps_of_2 in (steps[2][0], host.ranks[2].gather(steps[2][1].handle, late := outs[0])):
        for step in steps_of_2:
            step()
    assert late.isnan().all()


@FORMATS
def test_scales_travel_with_their_rows(batched: bool) -> None:
    layer = problems(2, 1, 4, 2, 256, 8, quant="fp8_block")
    host, draw = Host(layer, batched), torch.Generator().manual_seed(0)
    xs = [torch.randn(5, 256, generator=draw).to(torch.float8_e4m3fn) for _ in layer]
    scales = [torch.rand(5, 2, generator=draw) for _ in layer]
    shape = Shape(batched, 2, experts=4, top_k=2)
    routings = [routing_of(5, shape, "random", draw, 6) for _ in layer]
    flight = host.dispatch(xs, routings, scales)

    def work(rank: int, tokens, y) -> None:
        assert tokens.x.dtype == torch.float8_e4m3fn
        rows = tokens.x.float().unflatten(-1, (2, 128)) * tokens.x_scale[..., None]
        if batched:
            used = torch.arange(y.shape[1]) < tokens.expert_num_tokens[:, None]
        else:
            used = (tokens.topk_ids >= 0).any(1)
        y[used] = rows.flatten(-2)[used].bfloat16()

    for out, x, scale, routing in zip(
        host.combine(flight, work), xs, scales, routings, strict=True
    ):
        times = routing.topk_weights.sum(1)
        if not batched:
            times = torch.stack(
                [torch.isin(routing.topk_ids, torch.tensor(list(p.local_experts))).any(1)
                 for p in layer]
            ).sum(0)  # fmt: skip
        want = (x.float().view(5, 2, 128) * scale[:, :, None]).view(5, 256) * times[:, None]
        assert (out.float() - want).norm() <= 0.01 * want.norm()


def test_experts_work_for_the_rows_that_arrived() -> None:
    """A call of few tokens in a layer for many: all other rows hold NaN, and change no bit."""
    pytest.importorskip("moekit_triton")
    shape = Shape(False, 2, hidden=64, capacity=100, dtype=torch.bfloat16)
    host, draw = shape.host(), torch.Generator().manual_seed(1)
    call = Call(shape, host, (2, 5), "holes", draw)
    call.routings = [replace(r, max_tokens=None) for r in call.routings]
    call.rows, at = 2 * shape.capacity, host.ranks[0].layout
    host.open()
    for buffer in host.sets[0]:
        buffer.bytes[: at.ids] = buffer.bytes[at.weights : at.flags] = 0xFF
    call.dispatch()
    spec = registry().expert("triton")
    for problem, arrived in zip(host.layer, call.flight.arrived, strict=True):
        experts = spec.load()(spec, problem)
        packed = experts.pack(random_weights(problem))
        outs = []
        for tokens in (arrived, replace(arrived, num_rows=None)):
            y = torch.full_like(tokens.x, float("nan"))
            scratch = [torch.empty(b.shape, dtype=b.dtype) for b in experts.workspace(len(y))]
            experts.apply(y, tokens, packed, scratch)
            outs.append(y)
        end = int(arrived.num_rows)
        assert 0 < end < len(arrived.x)
        assert torch.equal(outs[0][:end], outs[1][:end]) and outs[0][end:].isnan().all()
        assert outs[1].isfinite().all()
