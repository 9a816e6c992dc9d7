"""Note launches instead of running them, so that `Launches` repeats them without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moekit_kernels import launch


class Notes:
    """The launches of this process since the last `new`, with addresses in place of tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launches: list[object] = []
        monkeypatch.setattr(launch, "INTERPRETED", False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
        monkeypatch.setattr(launch.Launcher, "__call__", self._launcher())

    def _launcher(self) -> Callable[..., None]:
        def call(launcher: launch.Launcher, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
            values, grid = sorted(more.items()), (*grid, *launch._ONES[len(grid)])
            passed = launch._passed(args, [])
            self._note(*grid, 0, launcher, (), None, None, None, *passed, *values)
            if (launches := getattr(launch._tape, "launches", None)) is not None:
                launches.append((self._note, grid, (launcher, ()), args, values))

        return call

    def _note(self, *args: Any) -> None:
        self._launches.append(_plain(args))

    def new(self) -> list[object]:
        """Return the launches since the last call."""
        new, self._launches = self._launches, []
        return new


def _plain(value: Any) -> Any:
    """Return a value that can be compared: the parts of a descriptor."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if hasattr(value, "block_shape"):
        parts = {**vars(value), "base": value.base.data_ptr()}
        return tuple(sorted((name, str(part)) for name, part in parts.items()))
    return value


def python_calls(call: Callable[[], object]) -> int:
    """Return the number of Python functions that run in a call, except functions of this module."""
    seen = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code.co_filename != __file__

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen
