"""Experts move between gloo ranks, and between GPUs if there are two."""

from __future__ import annotations

import pytest
from eplb_on_ranks import (
    Layer,
    equal_bits,
    failing_policy,
    faults,
    fused_layers,
    interrupted,
    migrations,
    rebalances,
    staging,
)
from rank_pools import rank_pool

from moekit import registry
from moekit.testing.experts_base import sizes_of

LAYERS = {
    "bfloat16": Layer(),
    "bias": Layer(dtype="float16", bias=True),
    "fp8_static": Layer(quant="fp8_tensor_static", top_k=3),
    "int4": Layer(quant="int4_w4a16_g32_zp"),
    "uneven": Layer(num_experts=7),
    "no_replicas": Layer(num_experts=8, replicas=0),
    "tensor_parallel": Layer(tp=2, bias=True),
    "no_token_moves": Layer(dp=1, dtype="float32"),
}
# Triton's interpreter is slow, and two ranks show it.
TRITON = {
    "fp8_block": Layer(experts="triton", quant="fp8_block", hidden_size=128),
    "batched": Layer(experts="triton_batched", hidden_size=64, intermediate_size=64),
}


pool = rank_pool(4, timeout=120)


pair = rank_pool(2, timeout=120)


gpus = rank_pool(2, "cuda", timeout=180)


def needs(layer: Layer) -> None:
    if layer.experts not in registry().experts:
        pytest.skip(f"experts {layer.experts!r} are not installed")
    if reasons := registry().experts[layer.experts].unsupported(layer.problem(0, 2)):
        pytest.skip("; ".join(reasons))


def check_reports(reports) -> None:
    for on_ranks in zip(*reports, strict=True):
        assert len({(r.received, r.copied, r.bytes_moved) for r in on_ranks}) == 1
        assert all(r.seconds > 0 for r in on_ranks)
    assert any(report.received for report in reports[0])


_FULL = {"fp8_static", "uneven", "no_replicas", "no_token_moves", "batched"}


def layers(names):
    return [pytest.param(n, marks=[pytest.mark.full] * (n in _FULL)) for n in names]


@pytest.mark.parametrize("name", layers(LAYERS))
def test_weights_and_outputs_after_migrations(pool, name):
    check_reports(pool.run(migrations, LAYERS[name], 3))


@pytest.mark.parametrize("name", layers(TRITON))
def test_triton_after_a_migration(pair, name):
    needs(TRITON[name])
    check_reports(pair.run(migrations, TRITON[name], 1))


def test_one_expert_parallel_rank_has_nothing_to_move(pair):
    reports = pair.run(migrations, LAYERS["tensor_parallel"], 1)
    assert not any(report.received for report in reports[0])


@pytest.mark.parametrize(("experts", "within"), [("reference", False), ("torch", True)])
def test_outputs_keep_their_bits_if_the_order_of_sums_is_kept(pool, experts, within):
    layer = Layer(**sizes_of(8, 3 if within else 1, 64, 32), experts=experts, replicas=0)
    assert pool.run(equal_bits, layer, within) == [8] * pool.world_size


def test_rebalancer(pool):
    results = pool.run(rebalances, Layer(num_experts=12, replicas=4))
    for before, after, text in results:
        assert after < before and after < 1.1
        assert "max/mean load" in text and "MiB" in text and "layer 1" in text
    assert len({(before, after) for before, after, _ in results}) == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_the_same_tokens_choose_the_same_replicas(pool, tp):
    """With fewer batches than ranks, only equal routing gives the right output."""
    layer = Layer(dtype="float32", num_experts=12, replicas=4, tp=tp, dp=tp)
    assert all(after < before for before, after, _ in pool.run(rebalances, layer))


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_layers(pool, strategy):
    assert all(after < before for before, after in pool.run(fused_layers, strategy))


def test_staging_is_bounded(pool):
    for peak, weights in pool.run(staging, 2**14):
        assert peak <= 2**14 + 2**12 < weights / 50
    for peak, _ in pool.run(staging, 2**20):
        assert 2**16 < peak <= 2**20 + 2**12


@pytest.mark.parametrize(
    ("run", "fault", "on_culprit", "elsewhere", "says"),
    [
        (faults, "new differs", "GroupMismatch", "GroupMismatch", "new placement"),
        (faults, "old differs", "GroupMismatch", "GroupMismatch", "old placement"),
        (faults, "staging differs", "GroupMismatch", "GroupMismatch", "staging_bytes"),
        (faults, "out of memory", "OutOfMemoryError", "PeerFailed", "tried to allocate"),
        (faults, "shared differs", "GroupMismatch", "GroupMismatch", "shared"),
        (faults, "tensor missing", "GroupMismatch", "GroupMismatch", "packed tensors"),
        (faults, "experts missing", "WeightsError", "PeerFailed", "dense block for each of"),
        (faults, "expanded", "WeightsError", "PeerFailed", "packed w2"),
        (faults, "other sizes", "InvalidInput", "PeerFailed", "both placements must"),
        (faults, "group", "GroupMismatch", "GroupMismatch", "process group of"),
        (failing_policy, "nonsense everywhere", "InvalidInput", "InvalidInput", "policy returned"),
        (failing_policy, "nonsense on one", "InvalidInput", "PeerFailed", "policy returned"),
        (failing_policy, "raises on one", "KeyError", "PeerFailed", "no such model"),
        (failing_policy, "disagrees", "GroupMismatch", "GroupMismatch", "placements wanted"),
    ],
)
def test_an_impossible_migration_or_policy_is_refused_on_all_ranks(
    pool, run, fault, on_culprit, elsewhere, says
):
    caught = pool.run(run, fault)
    assert [name for name, _ in caught] == [elsewhere] * (len(caught) - 1) + [on_culprit]
    assert all(says in message for _, message in caught)


def test_a_transfer_that_fails_interrupts_the_migration(pool):
    for name, message in pool.run(interrupted):
        assert name == "MigrationInterrupted"
        assert "connection reset" in message and "load them again" in message


GPU_LAYERS = {
    "bfloat16": Layer(device="cuda"),
    "fp8_block": Layer(device="cuda", quant="fp8_block"),
    "triton_fp8_block": Layer(device="cuda", experts="triton", quant="fp8_block"),
    "triton_bfloat16": Layer(device="cuda", experts="triton", num_experts=7),
    "deepgemm": Layer(device="cuda", experts="deepgemm", quant="fp8_block"),
    "marlin": Layer(device="cuda", experts="marlin", quant="int4_w4a16_g128"),
    "cutlass": Layer(device="cuda", experts="cutlass", quant="fp8_channel_token"),
}


@pytest.mark.parametrize("name", GPU_LAYERS)
def test_on_gpus(gpus, name):
    layer = GPU_LAYERS[name]
    needs(layer)
    assert any(report.received for report in gpus.run(migrations, layer)[0])


def test_rebalancer_on_gpus(gpus):
    layer = Layer(device="cuda", num_experts=12, replicas=4)
    for before, after, _ in gpus.run(rebalances, layer):
        assert after < before and after < 1.1
