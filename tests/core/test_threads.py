"""Calls from several threads and streams: right, once packed, and without an arena too many."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graph_stand_in import Device, device  # noqa: F401 (a fixture)
from test_graphed import want
from thread_stress import SUBJECTS, Setting, stress, tiny_model

import moekit
from moekit import Pending, Workspace
from moekit.contract import BufferSpec
from moekit.eplb.rebalancer import LoadWindow
from moekit.errors import MoekitError
from moekit.runtime import workspace
from moekit.runtime.graphs import Graphed
from moekit.runtime.workspace import Layout
from moekit.testing.cases import make_case, random_weights

THREADS = 4
CPU = torch.device("cpu")
PROBLEM = moekit.MoEProblem(
    num_experts=8, top_k=2, hidden_size=64, intermediate_size=48, dtype=torch.float32, device="cpu"
)


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(function: Callable[..., Any], threads: int = THREADS) -> list[Any]:
    """Return what ``function`` returns in each thread; all begin together."""
    begin = threading.Barrier(threads)

    def run(thread: int) -> Any:
        begin.wait()
        return function(thread)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


# -- results --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [s.__name__ for s in SUBJECTS if s.__name__ != "graphs"])
def test_threads_get_what_one_thread_gets(name: str) -> None:
    if name == "model":
        pytest.importorskip("transformers", reason="transformers is not installed")
    (subject,) = (s for s in SUBJECTS if s.__name__ == name)
    with torch.inference_mode():
        made = subject(Setting(threads=THREADS))
    outcome = stress(made, calls=100 if name != "model" else 15)
    assert outcome.right, str(outcome)
    assert outcome.made >= THREADS * 15


def test_a_call_may_pass_from_thread_to_thread() -> None:
    """Started in one, run in a second and finished in a third, while others do the same."""
    kernel = moekit.compose(PROBLEM, experts="torch")
    weights = random_weights(PROBLEM)
    packed = kernel.pack(weights)
    cases = [make_case(PROBLEM, T, key=T, weights=weights) for T in (1, 5, 33, 64)]
    expected = [kernel(case.x, packed, case.routing) for case in cases]
    for _ in range(20):
        started = at_once(lambda n: kernel.start(cases[n].x, packed, cases[n].routing))
        at_once(lambda n, calls=started: calls[n].run())
        outs = at_once(lambda n, calls=started: calls[-1 - n].result())[::-1]
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


def test_two_threads_that_wait_for_one_value_get_it() -> None:
    for _ in range(20):
        made: list[int] = []

        def wait(made: list[int] = made) -> int:
            torch.randn(100, 100).mm(torch.randn(100, 100))  # others go on meanwhile
            made.append(7)
            return made[-1]

        pending = Pending(wait)
        assert at_once(lambda _, p=pending: p.result()) == [7] * THREADS and made == [7]
    failing = Pending(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    with pytest.raises(MoekitError, match="failed before"):
        failing.result()


# -- memory ---------------------------------------------------------------------------------


def test_one_thread_has_one_arena_and_the_next_thread_takes_it_up() -> None:
    arenas = Workspace()
    kernel = moekit.compose(PROBLEM, experts="torch", workspace=arenas)
    weights = random_weights(PROBLEM)
    packed = kernel.pack(weights)
    cases = [make_case(PROBLEM, T, key=T, weights=weights) for T in (64, 1, 33)]

    def run(thread: int) -> None:
        for case in cases:
            kernel(case.x, packed, case.routing)

    run(0)
    one = arenas.nbytes
    assert one == kernel.memory(64).workspace
    for _ in range(10):
        at_once(run, threads=1)
        run(0)
    assert arenas.nbytes == one, "calls after one another have an arena each"
    for _ in range(10):
        at_once(run)
    assert one <= arenas.nbytes <= THREADS * one, "more arenas than calls at one time"
    run(0)  # it may outgrow an arena that a thread left after fewer tokens
    left = arenas.nbytes
    run(0)
    assert arenas.nbytes == left <= THREADS * one


def test_arenas_go_with_the_workspace_and_when_they_are_outgrown() -> None:
    arenas = Workspace()
    layouts = [Layout([BufferSpec((n,), torch.uint8)]) for n in (256, 512)]
    storages = []
    gc.disable()
    try:
        for layout in layouts:
            scratch = arenas.take(layout, CPU)
            storages.append(weakref.ref(scratch[0].untyped_storage()))
            scratch.give_back()
            del scratch
        del arenas
        assert [s() for s in storages] == [None, None]
    finally:
        gc.enable()


def test_scratch_is_given_back_when_a_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = moekit.compose(PROBLEM, experts="torch", workspace=Workspace())
    case = make_case(PROBLEM, 9)
    packed = kernel.pack(case.weights)
    expected = kernel(case.x, packed, case.routing)
    held = kernel.workspace.nbytes
    apply = kernel.experts.apply

    def broken(*args: Any) -> None:
        apply(*args)
        raise RuntimeError("no such kernel image")

    with monkeypatch.context() as patched:
        patched.setattr(kernel.experts, "apply", broken)
        with pytest.raises(RuntimeError, match="no such kernel image"):
            kernel(case.x, packed, case.routing)
    assert kernel.workspace.nbytes == held > 0
    assert torch.equal(kernel(case.x, packed, case.routing), expected)


class Streams:
    """A device's streams, which are numbers here."""

    def __init__(self) -> None:
        self.current, self.capturing = 0, False

    def probe(self, _: torch.device) -> Any:
        return (lambda: self.capturing), (lambda: self.current)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(workspace, "_probe", made.probe)
    return made


def test_only_the_default_stream_has_an_arena(streams: Streams) -> None:
    """Memory of other streams goes back to torch's allocator, which knows whose it is."""
    arenas, layout = Workspace(), Layout([BufferSpec((64,), torch.float32)])
    eager = arenas.take(layout, CPU)
    place = eager[0].data_ptr()
    eager.give_back()
    held = arenas.nbytes
    for streams.current in (1, 7, 1):
        scratch = arenas.take(layout, CPU)
        assert scratch[0].data_ptr() != place, "two streams have one arena"
        scratch.give_back()
        assert arenas.nbytes == held, "a stream left an arena behind"
    streams.current = 0
    assert arenas.take(layout, CPU)[0].data_ptr() == place


def test_a_capture_takes_its_scratch_from_the_graph(streams: Streams) -> None:
    """From torch's allocator, which is the graph's pool then. No arena is lent to it or grows."""
    arenas, layout = Workspace(), Layout([BufferSpec((64,), torch.float32)])
    eager = arenas.take(layout, CPU)
    place = eager[0].data_ptr()
    eager.give_back()
    held = arenas.nbytes
    streams.capturing = True
    captured = [arenas.take(each, CPU) for each in (layout, [BufferSpec((9999,), torch.uint8)])]
    assert place not in [scratch[0].data_ptr() for scratch in captured]
    for scratch in captured:
        scratch.give_back()
    assert arenas.nbytes == held
    streams.capturing = False
    assert arenas.take(layout, CPU)[0].data_ptr() == place


# -- packing --------------------------------------------------------------------------------


def test_the_first_call_packs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import moekit.integrations.transformers as integration

    packings: list[object] = []
    pack = moekit.ModularKernel.pack

    def counted(self: moekit.ModularKernel, weights: Any) -> Any:
        packings.append(weights)
        return pack(self, weights)

    monkeypatch.setattr(moekit.ModularKernel, "pack", counted)
    integration.install(experts="torch")
    try:
        model, ids = tiny_model("cpu"), torch.arange(20)[None]
        with torch.inference_mode():
            expected = model(ids).logits
        for factor in (1.0, -0.5, 3.0):
            del packings[:]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("experts.down_proj"):
                        parameter.mul_(factor)

            def forward(_: int) -> torch.Tensor:
                with torch.no_grad():
                    logits: torch.Tensor = model(ids).logits
                    return logits

            integration.repack(model)
            outs = at_once(forward)
            assert len(packings) == 2, "each layer is packed by one thread alone"
            with torch.no_grad():
                model.set_experts_implementation("eager")
                right = model(ids).logits
                model.set_experts_implementation("moekit")
            for out in outs:
                torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
            assert torch.allclose(right, expected, rtol=1e-3) == (factor == 1.0)
    finally:
        integration.uninstall()


# -- graphs ---------------------------------------------------------------------------------


def test_threads_share_graphs(device: Device) -> None:  # noqa: F811
    """An output in use is not handed out to another thread."""

    def function(x: torch.Tensor, n: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return want(x, n) if out is None else out.copy_(want(x, n))

    graphed = Graphed(function, 4)

    def run(thread: int) -> int:
        draw, wrong = torch.Generator().manual_seed(thread), 0
        for call in range(200):
            rows = 1 + (call + thread) % 5
            x = torch.randn(rows, 3, generator=draw)
            n = torch.randint(1, 9, (rows, 2), generator=draw)
            wrong += not torch.equal(graphed(x, n), want(x, n))
        return wrong

    assert at_once(run) == [0] * THREADS
    assert sorted(device.captures) == [1, 2, 3, 4], "a size was captured twice"
    assert device.replays > 100


# -- what else is shared --------------------------------------------------------------------


def test_load_is_counted_completely() -> None:
    window = LoadWindow(1, 8, steps=2)
    ids = torch.arange(400_000).view(-1, 4) % 8

    def run(thread: int) -> None:
        for _ in range(20):
            window.record(ids)

    at_once(run)
    window.step()
    assert window.total().tolist() == [[THREADS * 20 * 50_000] * 8]
