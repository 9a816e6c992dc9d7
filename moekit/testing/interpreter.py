"""Triton's interpreter without what it repeats, and for several threads.

It patches the language for the whole process while a kernel runs, so one thread at a time runs one.
For every call of a device function it replaces the functions of `triton.language` anew, which the
kernel that calls it did already: up to a third of such tests' time (triton 3.6 to 3.9).
"""

from __future__ import annotations

import importlib
import inspect
import threading
from types import FunctionType, SimpleNamespace
from typing import Any


class _Running(threading.local):
    """Kernels of this thread that have begun, and whether the language is prepared for them."""

    kernels = 0
    prepared = False


_running = _Running()


def in_kernel() -> bool:
    """Whether this thread is running an interpreted kernel."""
    return _running.kernels > 0


def prepare_once() -> None:
    """Has the language prepared when a kernel starts, and left so to its end.

    Idempotent; does nothing without triton, or with one that goes about it in another way.
    """
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    except (ImportError, AttributeError):
        return
    if hasattr(prepare, "every_time") or list(inspect.signature(prepare).parameters) != ["fn"]:
        return
    running, lock = _running, threading.RLock()
    # A kernel's functions may see more of the language than it does.
    language = {"tl": interpreter.tl, "core": interpreter.tl.core}
    sees_all = FunctionType((lambda: None).__code__, language)

    def prepare_first(fn: Any) -> Any:
        if not running.kernels:  # a function that no kernel calls
            return prepare(fn)
        if running.prepared:
            return SimpleNamespace(restore=lambda: None)
        running.prepared = True
        return prepare(sees_all)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            running.kernels += 1
            try:
                return launch(self, *args, **kwargs)
            finally:
                running.kernels -= 1
                running.prepared = running.prepared and running.kernels > 0

    prepare_first.every_time = prepare  # type: ignore[attr-defined]
    interpreter._patch_lang = prepare_first
    interpreter.GridExecutor.__call__ = launched
