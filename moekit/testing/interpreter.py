"""Make Triton's interpreter faster, and safe for several threads.

While a kernel runs, the interpreter patches `triton.language` for the whole process, so only one
thread at a time may run a kernel. For each call of a device function it patches the language
again, although the kernel has done so already. It computes whether integers overflow, and drops
the answer unless it debugs. Each takes up to a third of the time of tests (triton 3.6 to 3.9).
"""

from __future__ import annotations

import importlib
import inspect
import threading
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any


class _Running(threading.local):
    """The kernels that this thread has begun, and whether the language is patched for them."""

    kernels = 0
    prepared = False


_running = _Running()


def in_kernel() -> bool:
    """Return whether this thread is running an interpreted kernel."""
    return _running.kernels > 0


def prepare_once() -> None:
    """Patch the language once when a kernel starts, and leave it patched until the kernel ends.

    Idempotent. Does nothing without triton, or if the interpreter works in another way.
    """
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        builder, options = interpreter.interpreter_builder, interpreter.interpreter_builder.options
        checked = options.debug or not options.sanitize_overflow
    except (ImportError, AttributeError):
        return
    if hasattr(prepare, "every_time") or list(inspect.signature(prepare).parameters) != ["fn"]:
        return
    if not checked:
        builder.options = replace(options, sanitize_overflow=False)
    running, lock = _running, threading.RLock()
    # Device functions may use more of the language than the kernel does.
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
