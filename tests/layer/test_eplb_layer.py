"""EPLB on one rank: the window of loads, routing to replicas, weights of any layout."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_cases import check_logits, loaded_layer, logits_for
from torch import Tensor, nn

import moekit
from moekit import MoEProblem, PackedWeights, Routing, to_physical
from moekit.eplb import LoadWindow, Placement, Rebalancer, migrate, rebalancer
from moekit.eplb.migrate import MigrationInterrupted
from moekit.errors import GroupMismatch, InvalidInput, Unsupported, WeightsError
from moekit.testing.calls import bits
from moekit.testing.cases import random_weights, random_x
from moekit.testing.experts_base import sizes_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "eplb.py"


def routing(ids: Tensor) -> Routing:
    return Routing(torch.ones(ids.shape), ids)


# -- the window -------------------------------------------------------------------------------


def test_window_slides_and_skips_padding() -> None:
    window = LoadWindow(layers=2, num_experts=4, steps=2)
    window.record(torch.tensor([[0, 1], [-1, -1], [1, -1]], dtype=torch.int32), layer=0)
    window.record(torch.tensor([[1, 2]]), layer=0)
    assert window.total().tolist() == [[0] * 4, [0] * 4], "an unfinished step counts"
    window.step()
    window.record(torch.tensor([[3], [3]]), layer=1)
    window.step()
    assert window.total().tolist() == [[1, 3, 1, 0], [0, 0, 0, 2]]
    window.step()
    assert window.total().tolist() == [[0] * 4, [0, 0, 0, 2]], "the oldest step must leave"
    window.step()
    assert window.total().tolist() == [[0] * 4, [0] * 4]
    with pytest.raises(InvalidInput, match="got 0 for 0 steps"):
        LoadWindow(1, 4, 0)
    with pytest.raises(TypeError):  # and not MemoryError, after 24 GB of text
        LoadWindow(2**31, 4, "cpu")


def test_recording_and_routing_do_not_synchronize() -> None:
    """On the meta device, any synchronization with the host raises."""
    window = LoadWindow(1, 8, 4, device="meta")
    ids = torch.zeros(5, 2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        int(ids.sum())
    window.record(ids)
    window.step()
    table = Placement(tuple(range(8)) + (0, 1), 8, 2).logical_to_physical().to("meta")
    assert to_physical(routing(ids), table, 3).topk_ids.shape == (5, 2)


# -- replicas ---------------------------------------------------------------------------------


def test_tokens_spread_evenly_over_replicas() -> None:
    placement = Placement((0, 1, 2, 0, 3, 2, 0, 1, 3), 4, 3)
    table, generator = placement.logical_to_physical(), torch.Generator().manual_seed(0)
    for batch in range(4):
        ids = torch.rand(900, 4, generator=generator).argsort(dim=1)[:, :2]
        ids[:, 0] = 0  # every token goes to expert 0, and to one of the others
        ids[:, 1] = 1 + ids[:, 1] % 3
        got = to_physical(routing(ids), table, batch).topk_ids
        assert torch.equal(got, to_physical(routing(ids), table, batch).topk_ids)
        assert torch.equal(torch.tensor(placement.physical_to_logical)[got], ids)
        counts = torch.bincount(got.flatten(), minlength=9)
        for expert in range(4):
            share = counts[list(placement.replicas[expert])].double()
            assert float(share.max() / share.mean()) < 1.2


@pytest.mark.parametrize("replicas", range(2, 9))
def test_no_regular_pattern_of_tokens_favours_a_replica(replicas) -> None:
    """Every n-th token chooses a hot expert, for any n, as in interleaved requests.

    The bound is six standard deviations of independent draws.
    """
    experts, tokens = 16, 2048
    table = Placement(tuple(range(experts)) * replicas, experts, 1).logical_to_physical()
    for period in range(1, 65):
        hot = period % experts
        ids = torch.full((tokens, 1), -1)
        ids[period // 3 :: period] = hot
        chosen = to_physical(routing(ids), table).topk_ids
        counts = torch.bincount(chosen[chosen >= 0] // experts, minlength=replicas).double()
        mean = float(counts.mean())
        deviation = (mean * (1 - 1 / replicas)) ** 0.5
        assert int(counts.sum()) == len(ids[period // 3 :: period])
        assert float((counts - mean).abs().max()) < 6 * deviation, (period, counts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_replicas_depend_only_on_the_arguments(dtype) -> None:
    table = Placement(tuple(range(8)) * 3, 8, 4).logical_to_physical()
    ids = torch.rand(70, 8).argsort(dim=1)[:, :3].to(dtype)
    ids[5:9] = -1
    got = to_physical(routing(ids), table, 2).topk_ids
    assert got.dtype == dtype and bool((got[5:9] == -1).all())
    assert torch.equal(got, to_physical(routing(ids.clone()), table.clone(), 2).topk_ids)
    assert torch.equal(got.long(), to_physical(routing(ids.long()), table, 2).topk_ids)
    assert torch.equal(got[:40], to_physical(routing(ids[:40]), table, 2).topk_ids), "moved by T"


def test_single_tokens_of_many_batches_spread() -> None:
    """When every rank decodes one token, ranks and experts start with different replicas."""
    table = Placement(tuple(range(8)) * 4, 8, 8).logical_to_physical()
    ids = torch.arange(8)[None]
    counts = torch.zeros(32, dtype=torch.long)
    for batch in range(8):
        chosen = to_physical(routing(ids), table, batch).topk_ids[0] // 8
        assert torch.bincount(chosen, minlength=4).tolist() == [2] * 4
        counts[to_physical(routing(ids), table, batch).topk_ids[0]] += 1
    assert counts.tolist() == [2] * 32


# -- weights of any layout --------------------------------------------------------------------

OLD = Placement((0, 1, 2, 3, 4), 5, 1)
NEW = Placement((2, 0, 1, 4, 3), 5, 1)  # cycles of three and of two


def layouts() -> dict[str, Tensor]:
    base = torch.arange(5 * 6 * 8, dtype=torch.float32).view(5, 6, 8)
    with torch.inference_mode():
        inference = base.clone()
    return {
        "contiguous": base.clone(),
        "fp8": base.to(torch.float8_e4m3fn),
        "transposed": base.transpose(1, 2),
        "gaps between experts": base[:, :5].clone().new_zeros(5, 9, 8)[:, :6].copy_(base),
        "scalar each": torch.arange(5).to(torch.bfloat16),
        "empty": torch.zeros(5, 0),
        "parameter": nn.Parameter(base.clone()).data,
        "requires grad": nn.Parameter(base.clone()),
        "inference": inference,
        "uint8": base.to(torch.uint8),
        "bool": base > 100,
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("staging_bytes", [1, 100, 10**6])
def test_experts_trade_places_in_cycles(name, staging_bytes) -> None:
    tensor = layouts()[name]
    strides, where = tensor.stride(), tensor.data_ptr()
    wanted = tensor.detach().clone()[list(NEW.physical_to_logical)]
    packed = PackedWeights("torch", {"w": tensor, "bias": torch.arange(5.0)})
    report = migrate(packed, OLD, NEW, staging_bytes=staging_bytes)
    assert torch.equal(bits(tensor), bits(wanted))
    assert packed["bias"].tolist() == [2.0, 0.0, 1.0, 4.0, 3.0]
    assert (tensor.stride(), tensor.data_ptr()) == (strides, where)
    assert (report.received, report.copied, report.bytes_moved) == (0, 5, 0)


def test_an_equal_placement_moves_nothing() -> None:
    packed = PackedWeights("torch", {"w": torch.randn(5, 3)})
    before = packed["w"].clone()
    report = migrate(packed, OLD, OLD)
    assert (report.received, report.copied) == (0, 0) and torch.equal(packed["w"], before)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.randn(4, 3), "dense block for each of 5 experts"),
        (torch.randn(6, 3), "dense block for each of 5 experts"),
        (torch.randn(()), "dense block"),
        (torch.randn(1, 3).expand(5, 3), "experts overlap"),
        (torch.randn(5, 8)[:, ::2], "dense block"),
        (torch.randn(5, 4, 8)[:, :, :3], "dense block"),
        (torch.randn(3, 5).T, "dense block"),
    ],
)
def test_weights_whose_layout_cannot_move_are_refused(tensor, error) -> None:
    with pytest.raises(WeightsError, match=error):
        migrate(PackedWeights("torch", {"w": tensor}), OLD, NEW)


def test_a_group_is_needed_for_several_ranks() -> None:
    packed = PackedWeights("torch", {"w": torch.randn(3, 3)})
    old = Placement((0, 1, 2, 3, 4), 5, 2)
    with pytest.raises(GroupMismatch, match="between 2 expert-parallel ranks"):
        migrate(packed, old, replace(old, physical_to_logical=(4, 1, 2, 3, 0)))
    with pytest.raises(WeightsError, match="no tensor with an expert dimension"):
        migrate(PackedWeights("torch", {}), OLD, NEW)


# -- a rebalancer on one rank -----------------------------------------------------------------


def problem(**changes: object) -> MoEProblem:
    small = MoEProblem(**sizes_of(4, 2, 16, 16), num_redundant_experts=2, device="cpu")
    return small.replace(**changes)


@pytest.mark.parametrize("inference", [False, True])
def test_one_rank_has_nothing_to_balance(inference) -> None:
    kernel = moekit.compose(problem(), experts="torch")
    with torch.inference_mode(inference):
        packed = kernel.pack(random_weights(kernel.problem))
        balancer = Rebalancer(kernel, [packed], window=3)
    x = torch.randn(9, 16, dtype=torch.bfloat16)
    logical = moekit.route(torch.randn(9, 4), 2)
    out = kernel(x, packed, balancer.route(logical))
    assert torch.isfinite(out).all()
    balancer.step()
    assert int(balancer.loads().sum()) == 18
    (report,) = balancer.rebalance()
    assert report.migration is None and "nothing moved" in str(report)


def test_a_rebalancer_refuses_wrong_arguments() -> None:
    kernel = moekit.compose(problem(), experts="torch")
    packed = kernel.pack(random_weights(kernel.problem))
    with pytest.raises(InvalidInput, match="packed must hold the weights of at least one"):
        Rebalancer(kernel, [])
    kernel.experts.spec = replace(kernel.experts.spec, movable=False)
    with pytest.raises(Unsupported, match="'torch'.*cannot move") as caught:
        Rebalancer(kernel, [packed])
    assert len(caught.value.reasons) == 1


def test_layers_that_share_weights_are_refused() -> None:
    """Moving the experts of one layer would also move the other's."""
    layer, weights = loaded_layer(experts="torch")
    tied, own = (loaded_layer(experts="torch")[0] for _ in range(2))
    layer.load_weights(weights)
    tied.load_weights(weights)
    with pytest.raises(InvalidInput, match="layers 0 and 2 share the memory of their weights"):
        Rebalancer.of([layer, own, tied])
    balancer = Rebalancer.of([layer, own])
    own.load_weights(weights)
    with pytest.raises(InvalidInput, match="layers 0 and 1 share"):
        balancer.rebalance()
    empty = PackedWeights("torch", {"w13_scale": torch.empty(4, 0)})
    rebalancer._check_apart([empty, empty])  # all empty tensors have the address 0


def test_a_rebalancer_that_another_replaced_moves_nothing() -> None:
    layer, weights = loaded_layer()
    layer.load_weights(weights.select(layer.local_experts))  # a copy
    turned = {
        "policy": lambda _, now: (*now.physical_to_logical[1:], now.physical_to_logical[0]),
        "min_gain": -float("inf"),
    }
    first, second = (Rebalancer.of([layer], **turned) for _ in range(2))
    check_logits(layer, weights, renormalize=True)
    second.step()
    assert second.rebalance()[0].migration is not None
    with pytest.raises(InvalidInput, match="layer 0 routes by other replicas"):
        first.rebalance()
    check_logits(layer, weights, renormalize=True)


# -- in a CUDA graph --------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_layer_follows_a_migration() -> None:
    """A graph captured once counts, and reads the new replica table and the moved weights."""
    layer = problem(device="cuda", hidden_size=64, intermediate_size=64)
    kernel = moekit.compose(layer, experts="triton", checked=False)
    packed = kernel.pack(random_weights(layer))
    balancer = Rebalancer(kernel, [packed])
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    logical = moekit.route(torch.randn(32, 4, device="cuda"), 2)
    out = torch.empty_like(x)

    def run() -> None:
        kernel(x, packed, balancer.route(logical), out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    balancer.step()
    counted = balancer.loads().clone()
    graph.replay()
    before = out.clone()
    balancer.step()
    assert int((balancer.loads() - counted).sum()) == 64
    held = list(balancer.placements[0].physical_to_logical)
    balancer.policy, balancer.min_gain = (lambda *_: held[::-1]), -float("inf")
    assert balancer.rebalance()[0].migration is not None
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out, before, rtol=2e-2, atol=2e-2 * float(before.float().std()))


# -- the example ------------------------------------------------------------------------------


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "max/mean load" in done.stdout and "MiB" in done.stdout
    assert "outputs agree" in done.stdout


@pytest.mark.parametrize(
    ("error", "raised"),
    [(MigrationInterrupted, WeightsError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_an_interrupted_migration_leaves_no_weights(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], raised: type[BaseException]
) -> None:
    layer, _ = loaded_layer()
    x, logits = random_x(layer.problem, 3), logits_for(layer, 3)
    balancer = Rebalancer.of(
        [layer], policy=lambda _, now: now.physical_to_logical[::-1], min_gain=-float("inf")
    )
    layer(x, logits)
    balancer.step()

    def broken(*args: object, **kwargs: object) -> None:
        raise error("broke off")

    monkeypatch.setattr("moekit.eplb.rebalancer.migrate", broken)
    with pytest.raises(raised, match="broke off"):
        balancer.rebalance()
    with pytest.raises(WeightsError, match="has no packed weights"):
        layer(x, logits)
