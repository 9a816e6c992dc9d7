"""Launches are repeated with the addresses of later calls, and never with stale ones."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from moekit_kernels import launch, rows
from moekit_kernels.launch import Launcher, Launches
from noted_launches import Notes

from moekit.problem.quant import scheme


class Kernel:
    """Stands in for a function of `triton.jit`, and for what it compiles to."""

    arg_names = ("x", "more", "SIZE")
    function, packed_metadata = 5, ("metadata",)

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self

    def run(self, *args: object) -> None:
        self.launched.append(args)


@dataclass
class Descriptor:
    base: torch.Tensor
    block_shape: list[int]


@pytest.fixture
def notes(monkeypatch) -> Notes:
    return Notes(monkeypatch)


def test_a_launcher_tells_what_it_launches(monkeypatch, notes) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    kernel, repeated = Kernel(), Launches()
    launcher = Launcher(kernel)
    x, y = torch.empty(2, 64)
    for each in (x, y, x):
        repeated((), [each], [], lambda each=each: launcher((3,), each[8:], (each, 2), SIZE=7))
    head, tail = (3, 1, 1, 9, 5, ("metadata",), None, None, None), (7,)
    assert kernel.launched == [
        (*head, each.data_ptr() + 32, (each.data_ptr(), 2), *tail) for each in (y, x)
    ], "the first call goes through Triton"


def test_repeated_launches_take_the_new_addresses(notes) -> None:
    launcher, repeated, ran = Launcher(Kernel()), Launches(), []

    def call(x, y, memory):
        def function():
            ran.append(x.shape)
            launcher((2, 3), x[1:], (y, (memory, None, 2.5)), Descriptor(memory[16:], [16]), SIZE=8)
            launcher((1,), (x,), torch.empty(0), SIZE=8)
            return memory[:12].view(3, 4), None

        return repeated(("key",), [x, None, y], [memory], function)

    first, second = ([torch.empty(4, 8), torch.empty(4), torch.empty(64)] for _ in range(2))
    call(*first)
    notes.new()
    rows, nothing = call(*second)
    made = notes.new()
    assert ran == [first[0].shape], "the function runs once"
    kept = weakref.ref(first[2])
    first.clear()
    assert kept() is None, "a recording keeps no memory"
    assert nothing is None and rows.shape == (3, 4) and rows.data_ptr() == second[2].data_ptr()
    repeated = Launches()
    call(*second)
    assert notes.new() == made
    call(torch.empty(5, 8), *second[1:])
    assert len(ran) == 3, "another shape is another recording"


def test_a_variable_turns_it_off(notes, monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_TRITON_REPEAT", "0")
    repeated, ran, x = Launches(), [], torch.empty(4)
    for _ in range(3):
        repeated((), [x], [], lambda: ran.append(x))
    assert len(ran) == 3


def test_what_cannot_be_repeated_runs_each_time(notes) -> None:
    """A function runs in every call if an argument or a result is not in the given memory."""
    launcher, x, elsewhere, ran = Launcher(Kernel()), torch.empty(64), torch.empty(4), []

    def call(name, given, argument, made=None):
        def function():
            ran.append(name)
            launcher((1,), argument, SIZE=8)
            return made

        return repeated((name,), given, [], function)

    repeated = Launches()
    for _ in range(3):
        call("elsewhere", [x], elsewhere)
        call("overlap", [x, x[8:16]], x[8:])
        assert call("result", [x], x, (elsewhere,)) == (elsewhere,)
    assert len(ran) == 9
    assert len(notes.new()) == 9


@pytest.mark.parametrize("inference", [False, True])
def test_what_torch_does_is_never_left_out(notes, inference) -> None:
    """A function that also runs an operator runs each time; views and empty memory do no work."""
    launcher, repeated, ran = Launcher(Kernel()), Launches(), []
    x, y = torch.ones(2, 64)

    def call(name, work):
        def function():
            ran.append(name)
            work()
            launcher((1,), x, y.view(8, 8)[2:], torch.split(y, [32, 32])[1], SIZE=8)

        repeated((name,), [x, y], [], function)

    works = {
        "zero": x.zero_, "copy": lambda: y.copy_(x), "read": x[0].item, "elsewhere": lambda: x + y,
        "none": lambda: torch.empty(3),
    }  # fmt: skip
    with torch.inference_mode(inference):
        for name, work in works.items():
            for _ in range(2):
                call(name, work)
    assert ran == [name for name in works for _ in range(1 if name == "none" else 2)]


@pytest.mark.parametrize("masked", [False, True])
def test_quantizing_repeats_its_launch(monkeypatch, notes, masked) -> None:
    operand = scheme("fp8_block").activation

    def quantized(x: torch.Tensor) -> list[object]:
        """Return the launch, with a letter for each tensor's address."""
        mask = torch.ones(5, dtype=torch.bool) if masked else None
        q, scale = rows.quantize_activations(x, operand, None, mask)
        found = zip((x, q, scale, mask), "xqsm", strict=True)
        names = {each.data_ptr(): name for each, name in found if each is not None}
        (launched,) = notes.new()
        assert set(names) <= set(launched)
        return [names.get(each, each) if type(each) is int else each for each in launched]

    launches = Launches()
    monkeypatch.setattr(rows, "launches_of", lambda *what: launches)
    made = [quantized(torch.empty(5, 256)) for _ in range(3)]
    assert len(launches._recordings) == 1 and None not in launches._recordings.values()
    assert made[0] == made[1] == made[2]


def test_a_failure_is_not_recorded_and_threads_have_their_own_tapes(notes) -> None:
    launcher, repeated, x = Launcher(Kernel()), Launches(), torch.empty(64)

    def fail() -> None:
        launcher((1,), x, SIZE=1)
        raise ValueError

    with pytest.raises(ValueError):
        repeated((), [x], [], fail)
    assert launch._tape.launches is None

    def beside() -> None:
        other = threading.Thread(target=lambda: launcher((2,), x, SIZE=2))
        other.start()
        other.join()
        launcher((1,), x, SIZE=1)

    repeated((), [x], [], beside)
    notes.new()
    repeated((), [x], [], beside)
    assert [each[0] for each in notes.new()] == [1]
