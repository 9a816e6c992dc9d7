"""Tiles: what the shipped tables hold, which entry is taken, and what the heuristic may give."""

from __future__ import annotations

import json
import math
from importlib import resources
from types import SimpleNamespace
from typing import get_args

import pytest
from moekit_kernels.align import align_capacity
from moekit_triton import config, tables, tune
from moekit_triton.config import BLOCKS_M, choose_plan, fusable, heuristic, operand_bits
from moekit_triton.experts import TritonExperts
from moekit_triton.gemm import GemmConfig

from moekit import DeviceSpec, MoEProblem, registry

H200 = DeviceSpec("cuda", (9, 0), "NVIDIA H200")
TABLES = [f for f in (resources.files("moekit_triton") / "tuned").iterdir() if f.suffix == ".json"]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """As on a GPU: the interpreter takes no measured tiles."""
    monkeypatch.setattr(config, "INTERPRETED", False)
    monkeypatch.setattr(config, "_GLUON", True)


def problem(**changes) -> MoEProblem:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 4096, "intermediate_size": 14336}
    return MoEProblem(**{**sizes, "device": H200, **changes})


def shared_bytes(plan: config.Plan, p: MoEProblem) -> list[int]:
    a_bits, w_bits = operand_bits(p)
    wide = 2 if plan.fused and p.activation.gated else 1
    return [
        (c.block_m * a_bits + c.block_n * (2 if c.wide else w) * w_bits)
        * c.block_k
        // 8
        * c.num_stages
        for c, w in ((plan.first, wide), (plan.second, 1))
    ]


@pytest.mark.parametrize("file", TABLES, ids=lambda f: f.name)
def test_shipped_tables(file) -> None:
    entries = json.loads(file.read_text())["entries"]
    assert entries
    for entry in entries:
        p = problem(
            num_experts=entry["experts"], hidden_size=entry["hidden"],
            intermediate_size=entry["intermediate"], quant=entry["scheme"],
            has_bias=entry["bias"],
        )  # fmt: skip
        assert tables.table_key(p) == {
            k: v for k, v in entry.items() if k not in ("plans", "triton")
        }
        rows = [plan["rows_per_expert"] for plan in entry["plans"]]
        assert rows == sorted(set(rows)) and rows[0] > 0
        for plan in entry["plans"]:
            first, second = GemmConfig(**plan["first"]), GemmConfig(**plan["second"])
            assert first.block_m == second.block_m in BLOCKS_M
            assert fusable(p, first.block_n) or not plan["fused"]
            order = plan.get("order", "pairs")
            assert order in get_args(config.Order)
            if order in ("ahead", "joined"):
                assert p.quant.weight is None and first.specialized
            assert order != "joined" or second.specialized
            if order != "pairs" and p.quant.weight is not None:
                assert first.specialized and second.specialized and order == "copied"
            chosen = config.Plan(first, second, plan["fused"])
            assert max(shared_bytes(chosen, p)) <= 227 << 10


def test_the_nearest_entry_is_taken(monkeypatch) -> None:
    def entry(experts: int, hidden: int, *rows: float, **more) -> dict:
        tile = {"block_m": 16, "block_n": hidden // 32, "block_k": 64}
        plans = [
            {"rows_per_expert": r, "fused": True, "first": {**tile, "group_m": round(r)},
             "second": tile} for r in rows
        ]  # fmt: skip
        key = tables.table_key(problem(num_experts=experts, hidden_size=hidden))
        return {**key, **more, "plans": plans}

    table = (entry(8, 2048, 4, 64), entry(8, 4096, 4, 64), entry(8, 4096, 5, scheme="fp8_block"))
    monkeypatch.setattr(tables, "entries", lambda name: table if name == H200.name else ())
    assert choose_plan(problem(), 16, 2).first.group_m == 4
    assert choose_plan(problem(), 120, 2).first.group_m == 64
    assert choose_plan(problem(), 16, 2).first.block_n == 128
    assert choose_plan(problem(hidden_size=2560), 16, 2).first.block_n == 64
    far = problem(hidden_size=512)
    assert choose_plan(far, 16, 2) == heuristic(far, 4.0)
    other = problem(device=DeviceSpec("cuda", (9, 0), "another"))
    assert choose_plan(other, 16, 2) == heuristic(other, 4.0)
    biased = (entry(8, 4096, 6, bias=True), entry(8, 2048, 7, bias=True))
    monkeypatch.setattr(tables, "entries", lambda name: (*biased, table[0]))
    assert choose_plan(problem(has_bias=True), 16, 2).first.group_m == 6
    assert choose_plan(problem(), 16, 2).first.group_m == 4  # not what was measured with a bias
    monkeypatch.setattr(tables, "entries", lambda name: table)
    assert choose_plan(problem(has_bias=True), 16, 2).first.group_m == 4
    channel = entry(8, 4096, 5, scheme="fp8_channel_token")
    own = entry(8, 2048, 7, scheme="fp8_tensor")
    alike = problem(quant="fp8_tensor")
    for table, expected in (((channel,), 5), ((channel, own), 7)):
        monkeypatch.setattr(tables, "entries", lambda name, table=table: table)
        assert choose_plan(alike, 16, 2).first.group_m == expected
        assert choose_plan(problem(quant="fp8_channel_token"), 16, 2).first.group_m == 5
        for scheme in ("fp8_tensor_static", "int8_channel_token"):
            other = problem(quant=scheme)
            assert choose_plan(other, 16, 2) == heuristic(other, 4.0)
    table = (entry(8, 4096, 4),)
    monkeypatch.setattr(tables, "entries", lambda name: table)
    odd = problem(hidden_size=4100)  # rows of 8200 bytes: no tensor descriptor
    plan = choose_plan(odd, 16, 2)
    assert plan.first.group_m == 4 and not plan.first.tma


def test_near_a_shape_measured_in_order(monkeypatch) -> None:
    """Tiles for rows in order serve rows as tokens name them, but not by specialized warps."""
    monkeypatch.setattr(config.triton, "__version__", "3.6.0")
    assert choose_plan(problem(), 1024, 2).specialized
    for odd in (problem(hidden_size=4100), problem(intermediate_size=14340)):
        plan = choose_plan(odd, 1024, 2)
        assert plan.order == "pairs" and not plan.specialized


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
            assert max(shared_bytes(choose_plan(p, rows, p.top_k), p)) <= limit


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel_token", "int8_channel_token"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
@pytest.mark.parametrize("rows", [4.0, 16.0, 64.0])
def test_few_rows_of_fp8_are_swapped(scheme, capability, rows) -> None:
    p = problem(quant=scheme, device=DeviceSpec("cuda", capability, "any"))
    plan = heuristic(p, rows)
    swapped = capability == (9, 0) and rows < 64 and scheme != "int8_channel_token"
    assert plan.first.swapped == plan.second.swapped == swapped
    assert not swapped or min(plan.first.block_n, plan.second.block_n) >= 64
    kinds = {c.swapped for c in tune.candidates(p, rows, 1) if c.block_m < 64}
    assert kinds == ({swapped} if rows < 64 else set())


def test_an_order_that_does_not_pay(monkeypatch) -> None:
    monkeypatch.setattr(config.triton, "__version__", "3.6.0")
    p = problem(quant="fp8_block")
    assert choose_plan(p, 8192, 2).order == "copied"
    assert choose_plan(p, 8192, 2, slabs=True) == heuristic(p, 2048.0)
    biased = p.replace(has_bias=True)
    assert choose_plan(biased, 8192, 2) == heuristic(biased, 2048.0)
    assert heuristic(biased, 2048.0).fused and heuristic(biased, 2048.0).second.wide
    plain = choose_plan(problem(), 8192, 2, slabs=True)
    assert plain.order == "pairs" and plain.first.block_m == 128


def test_one_token_needs_no_alignment() -> None:
    assert choose_plan(problem(num_experts=128, top_k=8), 1, 8).direct
    assert choose_plan(problem(num_experts=128, top_k=2), 16, 2).direct
    assert not choose_plan(problem(num_experts=128, top_k=8), 16, 8).direct
    assert not choose_plan(problem(), 1, 2, slabs=True).direct


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_channel_token", "mxfp4_w4a16"])
def test_candidates_of_the_tuner(scheme) -> None:
    p = problem(quant=scheme)
    for per_expert in tune.ROWS_PER_EXPERT:
        for wide in (1, 2):
            found = tune.candidates(p, per_expert, wide)
            assert found and len(set(found)) == len(found)
            for c in found:
                plan = config.Plan(c, c, wide == 2)
                assert min(shared_bytes(plan, p)) <= 227 << 10 and c.block_m in BLOCKS_M
                if scheme == "fp8_block":
                    assert 128 % c.block_k == 0


def test_a_gpu_that_is_not_here_can_be_planned_for() -> None:
    """`explain --device sm90` and `memory()` ask this of machines without CUDA."""
    p = problem()
    rows = 8192
    assert choose_plan(p, rows, p.top_k).order != "pairs"
    buffers = TritonExperts(registry().expert("triton"), p).workspace(rows)
    x_SH = align_capacity(rows * p.top_k, 8, 128) * p.hidden_size
    assert max(math.prod(b.shape) for b in buffers) >= x_SH


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_where_specialized_tiles_win_nothing_else_is_tried(scheme, monkeypatch) -> None:
    p = problem(quant=scheme)
    for version, specialized in (("3.6.0", True), ("3.5.0", False)):
        monkeypatch.setattr(config.triton, "__version__", version)
        found = list(tune.attempts(p, 1024.0))
        orders = {("first", "copied"), ("first", "sorted"), ("second", "sorted")}
        if specialized and scheme == "none":
            orders.add(("first", "ahead"))
        found_orders = {(gemm, order) for gemm, _, _, order in found if order != "pairs"}
        assert orders - {("first", "sorted")} <= found_orders <= orders or not found_orders
        assert any(order == "pairs" for *_, order in found) != specialized
        assert any(c.specialized for _, c, *_ in found) == specialized
        assert len(set(found)) == len(found)
    assert {order for *_, order in tune.attempts(p, 16.0)} == {"pairs"}


def test_the_tuner_pairs_products(monkeypatch) -> None:
    """Of one block_m, and of orders that fit; the last word is that of the turns."""

    def timed(us: float, order: str = "pairs", block_m: int = 128) -> tune.Timed:
        tile = GemmConfig(block_m, 128, 64, specialized=order != "pairs")
        return tune.Timed(us, tile, True, order)

    search = tune.Search(SimpleNamespace(problem=problem()))
    search.found = {
        ("first", 128, "pairs"): [timed(10)],
        ("second", 128, "pairs"): [timed(5)],
        ("first", 128, "copied"): [timed(9, "copied")],
        ("second", 128, "sorted"): [timed(5.5, "sorted")],
        ("first", 64, "copied"): [timed(1, "copied", 64)],  # with no GEMM 2 of its kind
        ("second", 64, "pairs"): [timed(1, "pairs", 64)],
        ("first", 32, "pairs"): [],
    }
    slower = {"pairs": 0.0, "copied": 0.0, "joined": 1.0}

    def together(finalists):
        assert all(first.config.block_m == second.config.block_m for first, second, _ in finalists)
        return [first.us + second.us + slower[order] for first, second, order in finalists]

    def settled():
        first, second, order = search.settle()
        return first.order, second.order, order

    monkeypatch.setattr(search, "_together", together)
    assert settled() == ("copied", "sorted", "copied")
    slower["joined"] = -1.0
    assert settled() == ("copied", "sorted", "joined")
    slower.update(copied=2.0, joined=2.0)
    assert settled() == ("pairs", "pairs", "pairs")
    search.found = {("first", 128, "pairs"): [timed(1)]}
    assert search.settle() is None


def test_of_the_best_few_the_pair_decides(monkeypatch) -> None:
    """What is fastest by itself may be slow behind another kernel; both run for each routing."""
    alone = {("first", 64): 10.0, ("first", 32): 11.0, ("second", 64): 5.0, ("second", 32): 6.0}
    ran: list[tuple[str, int]] = []

    class Case:
        def calls(self, gemm, config, fused, order):
            return [lambda: ran.append((gemm, config.block_n))] * 3

    class Timer:
        def __init__(self) -> None:
            self.found: list[float] = []

        def add(self, calls) -> None:
            ran.clear()
            for call in calls:
                call()
            assert [gemm for gemm, _ in ran] == ["first", "second"] * 3
            slow = 100.0 if ("second", 64) in ran else 0.0
            self.found.append(slow + sum(alone[each] for each in ran))

        def microseconds(self, least: float, rounds: int) -> list[float]:
            return self.found

    monkeypatch.setattr(tune, "Timer", Timer)
    search = tune.Search(Case())
    Case.problem = problem(quant="int4_w4a16_g128")
    for (gemm, columns), us in alone.items():
        tile = tune.Timed(us, GemmConfig(8, columns, 128), True, "pairs")
        search.found.setdefault((gemm, 8, "pairs"), []).append(tile)
    assert [t.config.block_n for t in search.settle()[:2]] == [64, 32]


def test_the_tuner_adds_rows_to_an_entry() -> None:
    large, small = problem(), problem(hidden_size=64, intermediate_size=64)
    table = {"entries": []}
    assert tune.missing(table, small, [4, 32, 10**6]) == [4, 32]  # too many tokens for the last
    assert tune.missing(table, small, [0.25, 0.26, 1, 1]) == [0.25, 1], "of equal rows one"

    def entry(p, *rows):
        return tune._key(p) | {"plans": [{"rows_per_expert": float(r)} for r in rows]}

    tune.merge(table, entry(small, 4, 64))
    tune.merge(table, entry(large, 16))
    assert tune.missing(table, small, [4, 32, 64, 128]) == [32, 128]
    assert tune.missing(table, large, [4, 16]) == [4]
    tune.merge(table, entry(small, 32, 128))
    assert [p["rows_per_expert"] for p in table["entries"][0]["plans"]] == [4, 32, 64, 128]
    assert len(table["entries"]) == 2 and tune.missing(table, small, [4, 32, 64, 128]) == []
    again = entry(small, 32)
    again["plans"][0]["us"] = [1.0, 1.0]
    tune.merge(table, again)
    assert [p["rows_per_expert"] for p in table["entries"][0]["plans"]] == [4, 32, 64, 128]
    assert table["entries"][0]["plans"][1]["us"] == [1.0, 1.0]


def test_shipped_entries_hold_each_number_of_rows_once() -> None:
    for file in TABLES:
        entries = json.loads(file.read_text())["entries"]
        keys = [str({k: v for k, v in entry.items() if k != "plans"}) for entry in entries]
        assert len(set(keys)) == len(keys)
        for entry in entries:
            rows = [plan["rows_per_expert"] for plan in entry["plans"]]
            assert rows == sorted(set(rows)), entry["scheme"]
