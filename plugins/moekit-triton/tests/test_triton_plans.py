"""The choice of a plan: the shipped tables, their nearest entries, and the heuristics."""

from __future__ import annotations

import itertools
import json
import math
import types
from dataclasses import replace

import pytest
import torch
import triton
from moekit_kernels.align import align_capacity
from moekit_kernels.numerics import SCALE_GROUP
from moekit_triton import capabilities, tables
from moekit_triton.capabilities import BLOCKS_M, fusable, operand_bits
from moekit_triton.experts import BatchedTritonExperts, TritonExperts
from moekit_triton.heuristics import heuristic, sorted_plan
from moekit_triton.kernels.tiles import GemmTile, SortedTile, SpecializedTile, TokenTile
from moekit_triton.plans import (
    Batched,
    Copied,
    CopiedAhead,
    Gathered,
    Sorted,
    TilePlan,
)
from triton_checks import choose_plan
from triton_checks import compiled as choose_as_compiled

from moekit import ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig, registry
from moekit.backends.bridge import bridge

H200 = DeviceSpec("cuda", (9, 0), "NVIDIA H200")
TABLES = sorted(tables.FILES.shipped.glob("*.json"))


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Choose plans as on a GPU: the interpreter uses no tuned tables."""
    choose_as_compiled(monkeypatch)


def problem(**changes) -> MoEProblem:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 4096, "intermediate_size": 14336}
    return MoEProblem(**{**sizes, "device": H200, **changes})


def shared_bytes(plan: TilePlan, p: MoEProblem) -> list[int]:
    a_bits, w_bits = operand_bits(p)
    wide = 2 if getattr(plan, "fused", True) and p.activation.gated else 1
    return [
        (c.block_m * a_bits + c.block_n * (2 if c.wide else w) * w_bits)
        * c.block_k
        // 8
        * c.num_stages
        for c, w in ((plan.first, wide), (plan.second, 1))
    ]


@pytest.mark.parametrize("file", TABLES, ids=lambda f: f.name)
def test_shipped_tables(file) -> None:
    entries = tables.FILES.read(file)
    assert entries
    raw = json.loads(file.read_text())["entries"]
    keys = [str({k: v for k, v in each.items() if k != "plans"}) for each in raw]
    assert len(set(keys)) == len(keys)
    for entry in entries:
        key = entry.key
        p = problem(
            num_experts=key["experts"], hidden_size=key["hidden"],
            intermediate_size=key["intermediate"], quant=key["scheme"], has_bias=key["bias"],
        )  # fmt: skip
        assert tables.table_key(p) == key
        rows = [rows for rows, _ in entry.plans]
        assert rows == sorted(set(rows)) and rows[0] > 0
        for _, plan in entry.plans:
            first, second = plan.first, plan.second
            assert first.block_m in BLOCKS_M
            assert isinstance(plan, Sorted) or fusable(p, first.block_n) or not plan.fused
            if isinstance(plan, CopiedAhead):
                assert p.quant.weight is None
            if isinstance(plan, Sorted) and p.quant.weight is not None:
                assert type(plan) is Copied and type(first) is type(second) is SpecializedTile
            assert isinstance(plan, Sorted) or max(shared_bytes(plan, p)) <= 227 << 10


TILE = GemmTile(128, 64, 64, num_stages=4, tma=True)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ("magic: 16x64x64 w4 s3 | 16x64x64 w4 s3", "not a kind of plan"),
        ("direct: 16x64x64 w4 s3 | 16x64x64 w4 s3", "not of a kind that is tuned"),
        ("gathered: 16x64x64 w4 s3 | 32x64x64 w4 s3", "different numbers of rows"),
        ("gathered: 16x64x64 q4 s3 | 16x64x64 w4 s3", "unknown word 'q4'"),
        ("copied: tokens 64 | tokens 256", "128 or 256 weight rows"),
        ("ahead: tokens 128 | tokens 256", "is not a tile such as 'specialized'"),
    ],
)
def test_wrong_plans_of_a_table_are_rejected(plan, error) -> None:
    values = entry(8, 4096, 4).key | {"plans": [{"rows_per_expert": 4.0, "plan": plan}]}
    with pytest.raises(ValueError, match=error):
        tables.parse({"entries": [values]})


def entry(experts: int, hidden: int, *rows: float, **more) -> tables.Entry:
    key = tables.table_key(problem(num_experts=experts, hidden_size=hidden)) | more
    tile, fused = GemmTile(16, hidden // 32, 64), "scheme" not in more
    plans = [(float(r), Gathered(replace(tile, group_m=round(r)), tile, fused)) for r in rows]
    return tables.Entry(key, plans)


@pytest.fixture
def table(monkeypatch):
    """Let the table of a device, by default the H200, hold the given entries."""

    def use(*entries: tables.Entry, gpu: DeviceSpec = H200) -> None:
        def known(self, device):
            return entries if device == gpu.name else ()

        monkeypatch.setattr(tables.TableFiles, "known", known)

    return use


def test_nearest_entry(table) -> None:
    table(entry(8, 2048, 4, 64), entry(8, 4096, 4, 64), entry(8, 4096, 5, scheme="fp8_block"))
    assert choose_plan(problem(), 16, 2).first.group_m == 4
    assert choose_plan(problem(), 120, 2).first.group_m == 64
    assert choose_plan(problem(), 16, 2).first.block_n == 128
    assert choose_plan(problem(hidden_size=2560), 16, 2).first.block_n == 64
    far = problem(hidden_size=512)
    assert choose_plan(far, 16, 2) == heuristic(far, 4.0)
    other = problem(device=DeviceSpec("cuda", (8, 0), "another"))
    assert choose_plan(other, 16, 2) == heuristic(other, 4.0)


def test_nearest_entry_with_and_without_bias(table) -> None:
    plain = entry(8, 4096, 4)
    table(entry(8, 4096, 6, bias=True), entry(8, 2048, 7, bias=True), plain)
    assert choose_plan(problem(has_bias=True), 16, 2).first.group_m == 6
    assert choose_plan(problem(), 16, 2).first.group_m == 4  # not one measured with a bias
    table(plain)
    assert choose_plan(problem(has_bias=True), 16, 2).first.group_m == 4


def test_entries_of_a_scheme_with_the_same_tiles(table) -> None:
    channel = entry(8, 4096, 5, scheme="fp8_channel_token")
    own = entry(8, 2048, 7, scheme="fp8_tensor")
    for entries, expected in (((channel,), 5), ((channel, own), 7)):
        table(*entries)
        assert choose_plan(problem(quant="fp8_tensor"), 16, 2).first.group_m == expected
        assert choose_plan(problem(quant="fp8_channel_token"), 16, 2).first.group_m == 5
        for scheme in ("fp8_tensor_static", "int8_channel_token"):
            other = problem(quant=scheme)
            assert choose_plan(other, 16, 2) == heuristic(other, 4.0)


def test_a_measured_plan_that_does_not_fit_yields_to_the_rule(table) -> None:
    tile = GemmTile(16, 128, 64, group_m=4, tma=True)
    table(tables.Entry(tables.table_key(problem()), [(4.0, Gathered(tile, tile, True))]))
    assert choose_plan(problem(hidden_size=4096 + 64), 16, 2).first == tile
    odd = problem(hidden_size=4100)  # rows of 8200 bytes do not come through tma
    assert choose_plan(odd, 16, 2) == heuristic(odd, 4.0)


def test_user_tables_add_to_the_shipped_ones(monkeypatch, tmp_path) -> None:
    def group_m() -> list[int]:
        return [choose_plan(problem(), rows, 2).first.group_m for rows in (16, 64)]

    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path))
    shipped = group_m()
    mine = entry(8, 4096, 4)
    ((rows, plan),) = mine.plans
    values = {
        **mine.key,
        "plans": [{"rows_per_expert": rows, "us": [1, 1], "plan": plan.describe()}],
    }
    (tmp_path / "triton").mkdir()
    file = tmp_path / "triton" / "nvidia-h200.json"
    file.write_text(json.dumps({"entries": [values]}))
    for r, g in zip((16, 64), group_m(), strict=True):
        assert g == (4 if r == 16 else shipped[1])
    file.write_text(json.dumps({"entries": [values | {"experts": "8"}]}))
    assert group_m() == shipped


def test_near_a_shape_measured_with_sorted_rows(monkeypatch) -> None:
    """Tiles for expert-sorted rows serve neither gathered rows nor other kernels."""
    choose_as_compiled(monkeypatch, triton_version="3.6.0")
    plan = choose_plan(problem(), 1024, 2)
    assert isinstance(plan, Sorted) and isinstance(plan.first, TokenTile | SpecializedTile)
    for odd in (problem(hidden_size=4100), problem(intermediate_size=14340)):
        assert choose_plan(odd, 1024, 2) == heuristic(odd, 256.0)
    usual = problem(activation="gelu")
    assert choose_plan(usual, 1024, 2) == sorted_plan(usual, 256.0)


@pytest.mark.parametrize(
    "scheme", ["none", "fp8_block", "fp8_channel_token", "int8_w8a16", "int4_w4a16_g32_zp"]
)
@pytest.mark.parametrize("inner", [64, 96, 768, 14336])
def test_the_heuristic_fits_the_device(scheme, inner) -> None:
    for capability, limit in (
        ((9, 0), 227 << 10), ((8, 9), 99 << 10), ((8, 0), 163 << 10), ((12, 0), 99 << 10),
        ((12, 1), 99 << 10),
    ):  # fmt: skip
        p = problem(
            quant=scheme, intermediate_size=inner, device=DeviceSpec("cuda", capability, "any")
        )
        for per_expert in (0.25, 3, 20, 60, 300, 5000):
            plan = heuristic(p, per_expert)
            assert plan.first.block_m == plan.second.block_m
            assert fusable(p, plan.first.block_n) or not plan.fused
            assert max(shared_bytes(plan, p)) <= limit
            assert not plan.first.tma or capability >= (9, 0)
            rows = max(1, round(per_expert * p.num_experts / p.top_k))
            chosen = choose_plan(p, rows, p.top_k)
            assert not isinstance(chosen, Gathered) or max(shared_bytes(chosen, p)) <= limit


@pytest.mark.parametrize("rows", [60.0, 300.0, 3000.0])
def test_no_tiles_lie_across_groups_of_scales(rows) -> None:
    """I is padded to whole groups, and has the tiles of such an I, on one rank and on two."""
    p = problem(num_experts=32, hidden_size=2880, intermediate_size=2880, quant="fp8_block")
    halves = p.replace(intermediate_size=2 * 2880, parallel=ParallelConfig(tp_size=2))
    assert p.local_intermediate_size == halves.local_intermediate_size == 2944
    plan = heuristic(p, rows)
    assert plan.fused and plan.block_m == plan.first.block_n == 128
    assert plan == heuristic(p.replace(intermediate_size=2944), rows) == heuristic(halves, rows)
    assert heuristic(p.replace(quant="fp8_channel_token"), rows).block_m == 128


def test_where_sorting_does_not_pay(monkeypatch) -> None:
    choose_as_compiled(monkeypatch, triton_version="3.6.0")
    p = problem(quant="fp8_block")
    assert type(choose_plan(p, 8192, 2)) is Copied
    wanted = heuristic(p, 2048.0)
    assert choose_plan(p, 8192, 2, batched=True) == Batched(wanted.first, wanted.second, True)
    biased = p.replace(has_bias=True)
    assert choose_plan(biased, 8192, 2) == heuristic(biased, 2048.0)
    assert heuristic(biased, 2048.0).fused and heuristic(biased, 2048.0).second.wide
    plain = choose_plan(problem(), 8192, 2, batched=True)
    assert type(plain) is Batched and plain.first.block_m == 128


def test_a_gpu_that_is_not_here_can_be_planned_for() -> None:
    """`explain --device sm90` and `memory()` need plans on machines without CUDA."""
    p = problem()
    rows = 8192
    assert isinstance(choose_plan(p, rows, p.top_k), Sorted)
    buffers = TritonExperts(registry().expert("triton"), p).workspace(rows)
    x_SH = align_capacity(rows * p.top_k, 8, 128) * p.hidden_size
    assert max(math.prod(b.shape) for b in buffers) >= x_SH


H100 = DeviceSpec("cuda", (9, 0), "NVIDIA H100 80GB HBM3")
WIDE = Copied(TokenTile(256), TokenTile(256))
NARROW = Copied(TokenTile(128), TokenTile(128))


def has_token_tile(plan: TilePlan) -> bool:
    return TokenTile in (type(plan.first), type(plan.second))


def tokens(per_expert: float, p: MoEProblem) -> int:
    return math.ceil(per_expert * p.num_experts / p.top_k)


@pytest.mark.parametrize("gpu", [H100, H200, DeviceSpec("cuda", (9, 0), "NVIDIA H20")])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"),
    [(16, 4, 6144, 10752), (8, 2, 4096, 12288), (8, 2, 5120, 14336), (40, 8, 1536, 768)],
)
def test_tiles_of_tokens_without_a_table(monkeypatch, gpu, experts, top_k, hidden, inner):
    """The rules choose them, and older plans of near shapes do not count there."""
    choose_as_compiled(monkeypatch, triton_version="3.6.0")
    p = problem(num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner,
                device=gpu)  # fmt: skip
    for per_expert, wanted in (
        (96 if gpu != H100 else 120, WIDE), (128, WIDE), (191, WIDE), (192, NARROW), (256, NARROW),
        (639, NARROW),
    ):  # fmt: skip
        plan = choose_plan(p, tokens(per_expert, p), top_k)
        # A near shape was measured with such tiles.
        near = inner != 10752 and has_token_tile(plan)
        assert plan == wanted or near and per_expert < 192
        half = choose_plan(p.replace(dtype=torch.float16), tokens(per_expert, p), top_k)
        assert half == wanted
    others = (
        p.replace(quant="fp8_block"), p.replace(has_bias=True), p.replace(activation="gelu"),
        p.replace(device="sm100"), p.replace(intermediate_size=512), p.replace(dtype=torch.float32),
        p.replace(hidden_size=hidden + 4),
    )  # fmt: skip
    for other in others:
        assert not has_token_tile(choose_plan(other, tokens(256, p), top_k))
    for per_expert in (95, 4096):
        assert not has_token_tile(choose_plan(p, tokens(per_expert - 1, p), top_k))
    monkeypatch.setattr(capabilities, "GLUON_VERSIONS", ())
    assert not has_token_tile(choose_plan(p, tokens(256, p), top_k))


STREAMED = Gathered(
    GemmTile(128, 64, 128, group_m=1, num_warps=4, num_stages=3, halves=True),
    GemmTile(128, 128, 64, group_m=1, num_warps=4, num_stages=3, halves=True, tma=True),
    fused=True,
)


def test_an_h100_streams_weights_by_small_tiles(monkeypatch, table) -> None:
    choose_as_compiled(monkeypatch, triton_version="3.6.0")

    def chosen(per_expert: float, device=H100, batched=False, **changes):
        p = problem(device=device, num_experts=64, top_k=1, **changes)
        return choose_plan(p, tokens(per_expert, p), 1, batched=batched)

    table()
    for per_expert in (25, 48, 64, 119):
        assert chosen(per_expert) == chosen(per_expert, dtype=torch.float16) == STREAMED
        for other in (H200, DeviceSpec("cuda", (9, 0), "NVIDIA H20")):
            assert chosen(per_expert, other) != STREAMED
        for quant in ("fp8_block", "fp8_channel_token", "int8_w8a16"):
            assert chosen(per_expert, quant=quant).second != STREAMED.second
    assert {chosen(n).first.block_m for n in (24, 16)} == {32}
    assert chosen(120) == WIDE
    plain = chosen(64, activation="relu2_no_mul")
    assert plain.first == replace(STREAMED.first, block_n=128), "as many weight rows"
    assert chosen(64, batch_invariant=True) != STREAMED

    measured = Gathered(*(replace(t, num_warps=8) for t in (STREAMED.first, STREAMED.second)), True)
    key = tables.table_key(problem(num_experts=64))
    table(tables.Entry(key, [(16.0, measured), (64.0, measured), (256.0, WIDE)]), gpu=H100)
    assert chosen(40) == chosen(64) == chosen(100) == measured, "this very shape, measured there"
    assert chosen(30) == STREAMED, "16 rows are nearer than 64"
    assert chosen(64, hidden_size=4096 + 128) == STREAMED, "another shape"
    table(tables.Entry(key, [(100.0, WIDE)]), gpu=H100)
    assert chosen(100) == WIDE
    assert isinstance(chosen(60), Gathered), "sorting does not pay"
    assert isinstance(chosen(100, batched=True), Batched)


def test_specialized_warps_by_version(monkeypatch, caplog) -> None:
    p = problem(quant="fp8_block")
    capabilities._tell_slower.cache_clear()

    def chosen(version: str) -> type:
        choose_as_compiled(monkeypatch, triton_version=version)
        return type(choose_plan(p, 8192, 2))

    for version in ("3.6.0", "3.8.0", "3.9.0+git12", "3.9.1"):
        assert chosen(version) is Copied and not caplog.messages
    assert chosen("3.7.0+git12") is chosen("3.7.1") is Gathered
    (said,) = caplog.messages
    assert "with triton 3.7 large" in said and "set MOEKIT_TRITON_GLUON=1" in said
    assert "triton 3.6, 3.8, 3.9 alone" in said
    assert chosen("3.10.0") is Gathered and "GLUON" not in caplog.messages[1]
    monkeypatch.setattr(capabilities, "GLUON_VERSIONS", ("3.6", "3.7"))
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert type(choose_plan(p, 8192, 2)) is Copied and len(caplog.messages) == 2


def test_which_measured_plans_count_where_tiles_of_tokens_win(monkeypatch, table) -> None:
    choose_as_compiled(monkeypatch, triton_version="3.6.0")
    old = Copied(SortedTile(128, 128, 64), SortedTile(128, 256, 64))
    new = Copied(WIDE.first, replace(WIDE.second, group_m=4))

    def chosen(hidden: int, rows: float, plan: TilePlan, per_expert: float, device=H200):
        key = tables.table_key(problem(hidden_size=hidden))
        table(tables.Entry(key, [(rows, plan)]))
        return choose_plan(problem(device=device), tokens(per_expert, problem()), 2)

    assert chosen(4096, 128.0, old, 128) == old, "this very shape, measured there"
    assert chosen(4096, 128.0, old, 256) == old
    assert chosen(4096, 64.0, old, 128) == chosen(4096, 1024.0, old, 128) == WIDE
    assert chosen(4096, 1024.0, old, 640) == chosen(2048, 256.0, old, 640) == old
    assert chosen(2048, 128.0, old, 128) == WIDE and chosen(2048, 256.0, old, 256) == NARROW
    assert chosen(4096, 256.0, old, 256, DeviceSpec("cuda", (9, 0), "NVIDIA H20")) == NARROW
    for hidden, rows in ((4096, 64.0), (2048, 128.0), (4096, 1024.0)):
        assert chosen(hidden, rows, new, 200) == new, "it has such tiles"


def test_devices_without_a_near_shape_take_the_h200s_plans() -> None:
    def plans(name: str, capability=(9, 0), experts: int = 128, inner: int = 768):
        problem = MoEProblem(
            num_experts=experts, top_k=8, hidden_size=2048, intermediate_size=inner,
            device=DeviceSpec("cuda", capability, name),
        )  # fmt: skip
        return tables.measured_plans(problem)

    assert plans("NVIDIA H20") == plans("NVIDIA H200") != ()
    assert plans("NVIDIA H100 80GB HBM3") != plans("NVIDIA H200")  # it has its table
    assert plans("NVIDIA A100", (8, 0)) == () == plans("")


# Rows around every change of a batch-invariant plan: 8, 24 and 48 rows per expert, and others.
INVARIANT_ROWS = (1, 2, 3, 16, 17, 64, 65, 300, 512, 513, 1024, 1536, 1537, 3072, 3073, 4096, 65536)


def steps(plan: Gathered, p: MoEProblem) -> list[tuple]:
    """Return what decides the bits of a row: where results are rounded. Except in bf16, also the
    instruction and the columns of a step; in fp8 blocks, whether a step has one scale."""
    fp8, bf16 = p.quant.name.startswith("fp8"), p.quant.name == "none" and p.dtype_name != "float16"
    return [
        (plan.fused, bf16 or (t.swapped and t.block_n >= 64 and fp8 or t.block_m >= 64, t.block_k),
         p.quant.name != "fp8_block" or t.block_n <= SCALE_GROUP)
        for t in (plan.first, plan.second)
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(4096, 14336), (2048, 768), (512, 128), (320, 128), (2048, 96)])
@pytest.mark.parametrize("device", ["sm80", "sm89", H200, H100, "sm100"])
@pytest.mark.parametrize(
    "quant",
    ["none", "float16", "fp8_block", "fp8_channel_token", "int8_channel_token", "fp8_w8a16_block",
     "int4_w4a16_g128"],
)  # fmt: skip
def test_plans_of_a_batch_invariant_problem(device, quant, sizes) -> None:
    """Rows per expert choose tiles that sum in the same steps, on Hopper. The experts of a rank do
    not change the steps, nor do tables, and formats agree."""
    base = problem(device=device, num_experts=128, batch_invariant=True, hidden_size=sizes[0],
                   intermediate_size=sizes[1])  # fmt: skip
    base = base.replace(dtype=torch.float16) if quant == "float16" else base.replace(quant=quant)
    ranks = [ParallelConfig(), *(ParallelConfig(ep_size=n, ep_rank=n - 1) for n in (2, 8, 128))]
    plans, kinds = dict[str, Gathered](), list()
    for p in [
        base.replace(parallel=each, num_redundant_experts=n) for each in ranks for n in (0, 9)
    ]:
        for rows, top_k in itertools.product(INVARIANT_ROWS, (1, 2)):
            plan = choose_plan(p, rows, top_k)
            assert type(plan) is Gathered and plan.splits == 1
            batched = choose_plan(p, rows, top_k, batched=True)
            assert batched == Batched(plan.first, plan.second, plan.fused)
            plans[plan.describe()] = plan
            kinds.append(steps(plan, p))
    assert all(each == kinds[0] for each in kinds)
    blocks, hopper = {plan.block_m for plan in plans.values()}, device in (H200, H100)
    whole = not (base.hidden_size % SCALE_GROUP or base.local_intermediate_size % SCALE_GROUP)
    if hopper and whole and quant in ("none", "fp8_block"):
        assert blocks == {16, 32, 64, 128}
    elif hopper and quant in ("none", "float16", "fp8_block", "fp8_channel_token"):
        assert blocks == {64, 128} and len(plans) == 2
    else:
        assert blocks == {64} and len(plans) == 1


def test_a_batch_invariant_token_has_deep_or_many_programs() -> None:
    """One token has few experts, so tiles are narrow, or each program has many stages."""
    sizes = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768}
    for quant in ("none", "fp8_block"):
        p = problem(quant=quant, batch_invariant=True, **sizes)
        few, more = choose_plan(p, 1, 8), choose_plan(p, 16, 8)
        assert few.second.block_n == 64 < more.second.block_n
        if quant == "none":
            assert few.first.block_n == 64 < more.first.block_n
        else:
            assert few.first.num_stages == 5 > more.first.num_stages


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("quant", ["none", "fp8_block"])
def test_warmup_calls_every_plan(quant, batches) -> None:
    """Plans of this shape change twice between some powers of two."""
    p = problem(num_experts=64, top_k=6, hidden_size=2048, intermediate_size=1408, quant=quant)
    p = p.replace(parallel=ParallelConfig(ep_size=batches))
    experts = TritonExperts(registry().expert("triton"), p)
    called = experts.largest_calls(8000)
    assert called[0] == 8000 and len(set(called)) == len(called) <= 16
    assert {experts.plan(batches * tokens, 6) for tokens in called} == {
        experts.plan(batches * tokens, 6) for tokens in (*range(1, 800), *range(800, 8001, 8))
    }


def test_warmup_behind_a_bridge_calls_every_plan() -> None:
    """A batched dispatcher's capacity is as large as all batches of tokens together."""
    p = problem(num_experts=8, top_k=2, hidden_size=2048, intermediate_size=1408)
    p = p.replace(parallel=ParallelConfig(ep_size=2))
    experts = bridge(TritonExperts, registry().expert("triton"), p, ActivationFormat.BATCHED)
    called = experts.largest_calls(2000)
    assert called[0] == 2000 and len(called) <= 16
    rows = 2 * p.num_local_experts
    assert {experts.inner.plan(rows * tokens, 1) for tokens in called} == {
        experts.inner.plan(rows * tokens, 1) for tokens in range(1, 2001)
    }


class Named(BatchedTritonExperts):
    def largest_calls(self, num_tokens):
        return num_tokens, num_tokens // 3


def test_warmup_behind_a_bridge_of_batched_experts() -> None:
    spec = registry().expert("triton_batched")
    experts = bridge(Named, spec, problem(), ActivationFormat.STANDARD)
    assert experts.largest_calls(9) == (9, 3)


def test_multiprocessors_are_the_devices_where_it_is_here(monkeypatch) -> None:
    """An H20 has 78, which fewer and wider tiles fill than an H200's 132."""
    p = problem(num_experts=12, hidden_size=2048, intermediate_size=2048, quant="int8_w8a16")
    h20 = p.replace(device=DeviceSpec("cuda", (9, 0), "NVIDIA H20"))

    monkeypatch.setattr(capabilities, "_num_sms", capabilities._num_sms.__wrapped__)

    def here(name: str, count: int) -> None:
        device = types.SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)

    here("NVIDIA H200", 132)
    assert capabilities.num_sms(h20) == capabilities.num_sms(p) == 132
    assert heuristic(h20, 4.0).second.block_n == 64
    here("NVIDIA H20", 78)
    assert (capabilities.num_sms(h20), capabilities.num_sms(p)) == (78, 132)
    assert heuristic(h20, 4.0).second.block_n == 128
