"""Calls launch on the GPU of their tensors, whichever one the thread has made its own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import moekit
from moekit import kernel as kernels
from moekit.backends.reference import oracle
from moekit.runtime import device as devices
from moekit.testing.cases import make_case

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, dtype=torch.float32, device="cpu"
)


@pytest.fixture
def entered(monkeypatch) -> list[int]:
    """The indices of the devices that were made current, where the first one is."""
    found: list[int] = []

    @contextmanager
    def device_index(index: int):
        found.append(index)
        yield

    fake = SimpleNamespace(current_device_index=lambda: 0, device_index=device_index)
    made = SimpleNamespace(device=torch.device, accelerator=fake, compiler=torch.compiler)
    monkeypatch.setattr(devices, "torch", made)
    return found


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda:1", [1]), ("cuda:0", []), ("cuda", []), ("cpu", []), ("cpu:0", []), ("meta", [])],
)
def test_another_device_becomes_current(entered, device, index) -> None:
    with devices.on_device(SimpleNamespace(device=torch.device(device))):
        assert entered == index


@pytest.mark.parametrize("x", [None, 3, SimpleNamespace(device="cuda:1")])
def test_what_is_no_tensor_is_left_to_the_checks(entered, x) -> None:
    with devices.on_device(x):
        assert not entered


@pytest.mark.parametrize("device", ["mps", "cuda", "meta", "cpu:0"])
def test_a_device_without_index_asks_for_no_driver(monkeypatch, device) -> None:
    """torch's build for CUDA raises RuntimeError on machines without a driver."""

    def raising() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system")

    fake = SimpleNamespace(current_device_index=raising)
    made = SimpleNamespace(device=torch.device, accelerator=fake, compiler=torch.compiler)
    monkeypatch.setattr(devices, "torch", made)
    assert devices.elsewhere(torch.device(device)) is None


def test_every_step_of_a_call_is_on_the_device_of_x(monkeypatch) -> None:
    inside, steps = [], []

    @contextmanager
    def on_device(x):
        inside.append(x.device)
        yield
        inside.pop()

    def seen(step):
        def wrapped(self, *args):
            steps.append((step.__name__, list(inside)))
            return step(self, *args)

        return wrapped

    monkeypatch.setattr(kernels, "on_device", on_device)
    monkeypatch.setattr(kernels, "elsewhere", lambda x: None if inside else 0)
    kernel = moekit.compose(PROBLEM, "local", "torch")
    for part, name in ((kernel.dispatcher, "prepare"), (kernel.dispatcher, "finalize"),
                       (kernel.experts, "apply"), (kernel.experts, "pack")):  # fmt: skip
        monkeypatch.setattr(type(part), name, seen(getattr(type(part), name)))
    monkeypatch.setattr(kernel, "_on_accelerator", True)
    case = make_case(PROBLEM, 5)
    packed = kernel.pack(case.weights)
    kernel(case.x, packed, case.routing)
    flight = kernel.start(case.x, packed, case.routing)
    flight.run()
    flight.result()
    kernel.warmup(packed, 1)
    assert {name for name, _ in steps} == {"prepare", "finalize", "apply", "pack"}
    assert all(where == [torch.device("cpu")] for _, where in steps)
    assert not inside


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("experts", ["torch", "triton"])
def test_a_new_thread_calls_on_the_second_gpu(experts) -> None:
    if experts not in moekit.registry().experts:
        pytest.skip("moekit-triton is not installed")
    problem = PROBLEM.replace(dtype=torch.bfloat16, device="cuda")
    case = make_case(problem, 33)
    x, weights = case.x.to("cuda:1"), case.weights._map(lambda tensor: tensor.to("cuda:1"))
    routing = moekit.Routing(
        case.routing.topk_weights.to("cuda:1"), case.routing.topk_ids.to("cuda:1")
    )
    kernel, outs = moekit.compose(problem, "local", experts), []

    def work() -> None:  # the thread's current device is the first one
        outs.append(kernel(x, kernel.pack(weights), routing))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    want = oracle(x, weights, routing, problem)
    assert float((outs[0].float() - want).norm() / want.norm()) < 1e-2
