"""Triton's interpreter without what it repeats.

For every call of a device function it replaces the functions of `triton.language` anew, which the
kernel that calls it did already: a third of such tests' time (triton 3.6 to 3.9).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def prepare_once() -> None:
    """Has the language prepared when a kernel starts, and left so to its end. Idempotent; does
    nothing without triton."""
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    original = getattr(interpreter, "_patch_lang", None)
    if original is not None and not isinstance(original, _Once):
        language = {"tl": interpreter.tl, "core": interpreter.tl.core}
        interpreter._patch_lang = _Once(original, SimpleNamespace(__globals__=language))


class _Once:
    """Called at a kernel's start, which restores the result at its end, and by every function."""

    def __init__(self, original: Callable[[Any], Any], sees_all: Any) -> None:
        """original: prepares what the globals of its argument name; sees_all: an argument that
        names all there is, since a kernel's functions may see more than it does."""
        self._original, self._sees_all = original, sees_all
        self._scope: Any = None

    def __call__(self, fn: object) -> Any:
        if self._scope is not None:
            return SimpleNamespace(restore=lambda: None)
        self._scope = self._original(self._sees_all)
        return self

    def restore(self) -> None:
        scope, self._scope = self._scope, None
        scope.restore()
