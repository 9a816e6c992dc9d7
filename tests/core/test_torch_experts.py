"""The torch experts' several paths, each against the oracle: which one runs depends on sizes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from functools import partial

import pytest
import torch

import moekit
from moekit import ExpertWeights, MoEProblem
from moekit.backends import cpu_costs, cpu_experts
from moekit.backends.reference import oracle
from moekit.backends.torch_experts import _on_any_device

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(dtype: torch.dtype, experts: int, top_k: int, tokens: int, **changes):
    p = MoEProblem(
        num_experts=experts, top_k=top_k, hidden_size=64, intermediate_size=80, dtype=dtype,
        device="cpu", **changes,
    )  # fmt: skip
    bias = (
        (torch.randn(experts, p.w13_rows), torch.randn(experts, 64)) if p.has_bias else (None,) * 2
    )
    w = ExpertWeights(
        torch.randn(experts, p.w13_rows, 64, dtype=dtype) / 8,
        torch.randn(experts, 64, 80, dtype=dtype) / 8,
        *(None if b is None else b.to(dtype) for b in bias),
    )
    x = torch.randn(tokens, 64, dtype=dtype)
    routing = moekit.route(torch.randn(tokens, experts), top_k)
    skipped = torch.rand(tokens, top_k) < 0.2
    skipped[0, 0] = False
    ids = routing.topk_ids.masked_fill(skipped, -1)
    return p, w, x, moekit.Routing(routing.topk_weights, ids)


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


class Forced(cpu_experts.Choice):
    """A choice that always takes one method."""

    def __init__(self, method: str) -> None:
        self.method, self.taken = method, 0

    def loop(self, rows: int, alone: bool) -> str:
        self.taken += 1
        return self.method if self.method in cpu_experts.LOOPS else "right"

    def at_once(self, counts, batched_fits: bool) -> str | None:
        if self.method not in cpu_experts.ALL_AT_ONCE:
            return None
        self.taken += 1
        return self.method


METHODS = [
    (dtype, bias, method)
    for dtype in LIMIT
    for bias in (False, True)
    for method in cpu_experts.methods_for(case(dtype, 4, 2, 1, has_bias=bias)[0])
]


@pytest.mark.parametrize(("dtype", "bias", "method"), METHODS)
def test_every_cpu_method(monkeypatch: pytest.MonkeyPatch, dtype, bias, method) -> None:
    for experts, top_k, tokens in ((4, 2, 1), (4, 2, 33), (16, 4, 7)):
        p, w, x, routing = case(dtype, experts, top_k, tokens, has_bias=bias)
        forced = Forced(method)
        monkeypatch.setattr(cpu_experts, "_BATCHED_ROWS", experts)
        monkeypatch.setattr(cpu_experts, "choice", lambda problem, forced=forced: forced)
        kernel = moekit.compose(p, "local", "torch")
        out = kernel(x, kernel.pack(w), routing)
        assert rms(out, oracle(x, w, routing, p)) < LIMIT[dtype] and forced.taken


@pytest.mark.parametrize("rows", [1, 63, 160, 161])
def test_weights_are_converted_in_pieces_of_any_size(monkeypatch, rows) -> None:
    """160 rows are all of w13: a piece that was the whole matrix had no buffer."""
    p, w, x, routing = case(torch.bfloat16, 4, 2, 9)
    monkeypatch.setattr(cpu_experts, "_PIECE_BYTES", 4 * p.hidden_size * rows)
    monkeypatch.setattr(cpu_experts, "choice", lambda problem: Forced("fp32"))
    kernel = moekit.compose(p, "local", "torch")
    out = kernel(x, kernel.pack(w), routing)
    assert rms(out, oracle(x, w, routing, p)) < LIMIT[torch.bfloat16]


@pytest.fixture
def calibrating(monkeypatch, tmp_path) -> None:
    """Methods may be timed, whatever else runs on the machine, and the cache is empty."""
    monkeypatch.setenv("MOEKIT_CALIBRATE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_experts, "_choices", {})
    monkeypatch.setattr(cpu_costs, "_TURNS", 1)
    monkeypatch.setattr(cpu_costs, "waited_for_cores", lambda: 0.0)


def test_calibration_is_kept_and_read_back(monkeypatch, tmp_path, calibrating) -> None:
    p, *_ = case(torch.float32, 4, 2, 1)
    first = cpu_experts.choice(p)
    assert "calibrated on this machine" in str(first)
    (kept,) = (tmp_path / "moekit").iterdir()
    monkeypatch.setattr(cpu_experts, "_timed", lambda *args: pytest.fail("timed a second time"))
    cpu_experts._choices.clear()
    assert str(cpu_experts.choice(p)) == str(first)
    endless = f'{{"right": [[1{"0" * 400}, 1.0]]}}'
    for damage in (
        "", "[]", "{", "3", '{"right": 3}', '{"right": [[0, 1.0]]}', '{"right": [[1, null]]}',
        '{"right": [[2, 1.0], [1, 1.0]]}', "[" * 100_000, "\udcff", endless,
    ):  # fmt: skip
        kept.write_bytes(damage.encode(errors="surrogateescape"))
        assert cpu_costs._read(kept) is None, damage
    kept.unlink()
    kept.symlink_to("/dev/zero")  # a file without an end
    assert cpu_costs._read(kept) is None


def test_calibration_names_its_dtypes(calibrating) -> None:
    """vLLM sets torch's default dtype to the model's while it loads weights."""
    p, *_ = case(torch.bfloat16, 4, 2, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert "calibrated on this machine" in str(cpu_experts.choice(p))
    finally:
        torch.set_default_dtype(torch.float32)


def test_explain_says_how_the_cpu_runs_experts(monkeypatch, calibrating) -> None:
    p, w, *_ = case(torch.float32, 4, 2, 1)
    monkeypatch.setenv("MOEKIT_CALIBRATE", "0")
    assert "torch: method by rows per expert: 'right' from 1" in (
        moekit.explain(p, experts="torch").note
    )
    monkeypatch.setenv("MOEKIT_CALIBRATE", "1")
    cpu_experts._choices.clear()
    assert "when weights are first packed" in moekit.explain(p, experts="torch").note
    moekit.compose(p, experts="torch").pack(w)
    assert "calibrated on this machine" in moekit.explain(p, experts="torch").note
    assert "by rows" not in moekit.explain(p.replace(device="sm90"), experts="torch").note


def test_unwritable_cache_costs_a_warning_alone(monkeypatch, tmp_path, caplog, calibrating) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    costs = cpu_costs.find(("k",), lambda: ({"right": [(1, 1e-6)]}, True))
    assert costs is not None
    assert costs.by_rows("right")[0] == 1e-6 and "was not kept" in caplog.text
    assert f"{blocked}/moekit/cpu-" in caplog.text and "yours in XDG_CACHE_HOME" in caplog.text


class Child:
    """A forked process that may hang: its exit code is None then."""

    def __init__(self, run) -> None:
        child = multiprocessing.get_context("fork").Process(target=run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads
            child.start()
        child.join(60)
        self.code = child.exitcode
        child.kill()


def test_a_child_forked_during_calibration_composes(monkeypatch, calibrating) -> None:
    timing, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def timed(*_):
        if os.getpid() == parent:
            timing.set()
            go_on.wait()
        return {"right": [(rows, 1.0) for rows in cpu_costs.ROWS]}, True

    def pack() -> None:
        moekit.compose(p, "local", "torch").pack(w)

    monkeypatch.setattr(cpu_experts, "_timed", timed)
    p, w, *_ = case(torch.float32, 4, 2, 1)
    packing = threading.Thread(target=pack)
    packing.start()
    timing.wait()
    try:
        assert Child(pack).code == 0
    finally:
        go_on.set()
        packing.join()


def test_a_child_forked_while_onednn_is_off_has_it_on() -> None:
    if not cpu_costs.onednn_enabled():
        pytest.skip("this torch has no oneDNN")
    off, go_on = threading.Event(), threading.Event()

    def switched_off() -> None:
        off.set()
        go_on.wait()

    def child() -> None:
        assert torch._C._get_mkldnn_enabled()
        states = []
        cpu_costs.without_onednn(lambda: states.append(torch._C._get_mkldnn_enabled()))
        assert states == [False]

    other = threading.Thread(target=cpu_costs.without_onednn, args=(switched_off,))
    other.start()
    off.wait()
    try:
        assert cpu_costs.onednn_enabled(), "calls in other threads would time methods again"
        assert Child(child).code == 0
    finally:
        go_on.set()
        other.join()
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize(
    ("threads", "share", "kept"), [(2, 0.05, True), (2, 0.5, False), (1, 0.5, True)]
)
def test_disturbed_calibration_is_not_kept(
    monkeypatch, tmp_path, calibrating, threads, share, kept
) -> None:
    """Other processes take the cores for a share of the time; one thread's clock does not count
    that."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    clock, rows = [0.0], []
    monkeypatch.setattr(cpu_costs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cpu_costs, "waited_for_cores", lambda: clock[0] * share * threads)

    def right(n: int):
        rows.append(n)

        def call() -> None:
            clock[0] += 0.1

        return call

    timed = partial(cpu_costs.measure, ("right",), lambda method, n: (right(n), 1))
    found = cpu_costs.find(("k",), timed)
    assert found is not None and (tmp_path / "moekit").exists() == kept
    assert ("other work disturbed" in found.source) == (not kept)
    assert rows == list(cpu_costs.ROWS)


def test_costs_between_and_beyond_the_timed_rows() -> None:
    costs = cpu_costs.Costs({"right": [(1, 1.0), (3, 2.0)], "left": [(1, 1.0), (213, 4.0)]}, "")
    right, left, unknown = map(costs.by_rows, ("right", "left", "unknown"))
    assert len(right) == len(left) == len(unknown) == cpu_costs.MOST_ROWS
    assert right[:4] == [1.0, 1.5, 2.0, float("inf")] and unknown[0] == float("inf")
    assert left[212] == 4.0 and left[425] == pytest.approx(8.0)


def test_a_batch_invariant_call_keeps_onednn_on() -> None:
    """Without oneDNN, products that run in another thread at the same time have other bits."""
    if not cpu_costs.onednn_enabled():
        pytest.skip("this torch has no oneDNN")
    states = []
    with cpu_costs.onednn_kept(), cpu_costs.onednn_kept():
        cpu_costs.without_onednn(lambda: states.append(torch._C._get_mkldnn_enabled()))
    cpu_costs.without_onednn(lambda: states.append(torch._C._get_mkldnn_enabled()))
    assert states == [True, False] and torch._C._get_mkldnn_enabled()


def test_another_thread_keeps_onednn_on() -> None:
    costs = cpu_costs.Costs({"native": [(1, 1.0)], "right": [(1, 2.0)]}, "")
    chosen = cpu_experts.Choice(costs, ("native", "right"))
    assert chosen.loop(1, alone=True) == "native" and chosen.loop(1, alone=False) == "right"
    cpu_experts._alone()
    assert cpu_experts._alone()
    other = threading.Thread(target=cpu_experts._alone)
    other.start()
    other.join()
    assert not cpu_experts._alone()


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_accelerator_path_on_the_cpu(dtype, activation, bias) -> None:
    """The GPU's code, run by the CPU: bf16 through grouped_mm, the others through the loop."""
    p, w, x, routing = case(dtype, 8, 3, 21, has_bias=bias, activation=activation)
    packed = moekit.compose(p, "local", "torch").pack(w)
    y = torch.full_like(x, float("nan"))
    experts = cpu_experts.Experts(p.replace(device="sm90"), packed)
    _on_any_device(experts, y, x, routing.topk_ids, routing.topk_weights)
    assert rms(y, oracle(x, w, routing, p)) < LIMIT[dtype]


def test_autocast_changes_no_number_on_the_accelerator_path() -> None:
    """It serves the CPU in float16, where outputs were infinite."""
    p, w, x, routing = case(torch.float16, 4, 2, 9)
    kernel = moekit.compose(p, "local", "torch")
    large = ExpertWeights(w.w13, (w.w2.float() * 6e4).half())
    small = moekit.Routing(routing.topk_weights / 2**12, routing.topk_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel(x, kernel.pack(large), small)
    want = oracle(x, large, small, p)
    assert want.abs().max() < 65504 and rms(out, want) < LIMIT[torch.float16]
