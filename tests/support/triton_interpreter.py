"""Make Triton's interpreter faster, safe for several threads, and batch-invariant.

While a kernel runs, the interpreter patches `triton.language` for the whole process, so only one
thread at a time may run a kernel. For each kernel it searches the language for what it patches, and
for each call of a device function it patches the language again. It computes whether integers
overflow, and drops the answer unless it debugs. For each operation it makes the same types again.
Each of these takes up to a third of the time of tests (triton 3.6 to 3.9).

Its `dot` is numpy's product. With AVX2 alone, numpy's BLAS sums a row in another order at another
place of the matrix, so kernels would differ in their last bits between positions of a token.

Importing this chooses the interpreter where there is no GPU, before triton is imported, and patches
triton. The conftest.py files of kernel tests take the fixture ``device`` from here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

os.environ.setdefault("MOEKIT_TUNED", "")  # a table must not steer the choice in tests
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the current CUDA device, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Running(threading.local):
    """The kernels that this thread has begun, and whether the language is patched for them."""

    kernels = 0
    prepared = False


_running = _Running()


_ABSENT = object()


class _Patch:
    """Patches the language as the interpreter did once."""

    def __init__(self, scope: Any) -> None:
        """Record the interpreter's changes, and undo them.

        Args:
            scope: the result of its `_patch_lang`.
        """
        places = [(owner, name) for owner, name, _ in scope._changes]
        patched = [vars(owner)[name] for owner, name in places]
        scope.restore()
        plain = [vars(owner).get(name, _ABSENT) for owner, name in places]
        self._changes = list(zip(places, patched, plain, strict=True))

    def apply(self) -> _Patch:
        for (owner, name), value, _ in self._changes:
            setattr(owner, name, value)
        return self

    def restore(self) -> None:
        for (owner, name), _, value in self._changes:
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):  # the list may have a place twice
                delattr(owner, name)


def prepare_once() -> None:
    """Patch the language when a kernel starts, and leave it patched until the kernel ends.

    The first kernel finds what to patch. Idempotent. Does nothing without triton, or if the
    interpreter works in another way.
    """
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        # Launches import Gluon at some time, which fails on Python 3.10 with a patched language.
        importlib.import_module("triton.experimental.gluon")
        prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        builder, options = interpreter.interpreter_builder, interpreter.interpreter_builder.options
        handle, dot = interpreter.TensorHandle, interpreter.InterpreterBuilder.create_dot
        in_vain = options.sanitize_overflow and not options.debug
        core = interpreter.tl.core
        # `_remember_types` changes these.
        _ = core.block_type, core.tensor, core.tuple, interpreter._get_np_dtype
    except (ImportError, AttributeError):
        return
    if hasattr(prepare, "every_time") or list(inspect.signature(prepare).parameters) != ["fn"]:
        return
    if in_vain:
        builder.options = replace(options, sanitize_overflow=False)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _remember_types(interpreter)
    interpreter.InterpreterBuilder.create_dot = _by_rows(dot, handle)
    running, lock = _running, threading.RLock()
    # Device functions may use more of the language than the kernel does.
    language = {"tl": interpreter.tl, "core": interpreter.tl.core}
    sees_all = FunctionType((lambda: None).__code__, language)
    patches: list[_Patch] = []

    def prepare_first(fn: Any) -> Any:
        if not running.kernels:  # a function that no kernel calls
            return prepare(fn)
        if running.prepared:
            return SimpleNamespace(restore=lambda: None)
        running.prepared = True
        if not patches:
            scope = prepare(sees_all)
            if not hasattr(scope, "_changes"):  # another version's scope
                return scope
            patches.append(_Patch(scope))
        return patches[0].apply()

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Modes of the kit that watch operators would give the turn to a thread that waits here.
        with lock, _disable_current_modes():
            running.kernels += 1
            try:
                return launch(self, *args, **kwargs)
            finally:
                running.kernels -= 1
                running.prepared = running.prepared and running.kernels > 0

    prepare_first.every_time = prepare  # type: ignore[attr-defined]
    launched.one_thread_at_a_time = True  # type: ignore[attr-defined]
    interpreter._patch_lang = prepare_first
    interpreter.GridExecutor.__call__ = launched


def _by_rows(dot: Any, handle: Any) -> Any:
    """Return ``dot``, a method of the interpreter's, that multiplies each row of a matrix alone."""

    def by_rows(self: Any, a: Any, b: Any, added: Any, *options: Any) -> Any:
        rows = handle(a.data[..., :, None, :], a.dtype)
        matrices = handle(b.data[..., None, :, :], b.dtype)
        sums = handle(added.data[..., :, None, :], added.dtype)
        result = dot(self, rows, matrices, sums, *options)
        return handle(result.data[..., 0, :], result.dtype)

    return by_rows


def _remember_types(interpreter: Any) -> None:
    """Make each type of a block once, and what tensors of it have in common.

    The interpreter makes several for each operation, and compares them entry by entry.
    """
    core, slow = interpreter.tl.core, interpreter._get_np_dtype
    block, tensor = core.block_type, core.tensor
    init_block, init_tensor = block.__init__, tensor.__init__
    same_type, same_shape = block.__eq__, core.tuple.__eq__
    blocks: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        extents = tuple(
            [each.value if isinstance(each, core.constexpr) else each for each in shape]
        )
        space = getattr(element_ty, "address_space", None)
        key = element_ty.name, space, extents
        if key not in blocks:
            blocks[key] = made = object.__new__(cls)
            init_block(made, element_ty, shape)
        return blocks[key]

    def init(self: Any, handle: Any, type: Any) -> None:
        common = vars(type).get("of_tensors")
        if common is None:
            init_tensor(self, handle, type)
            vars(type)["of_tensors"] = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            vars(self).update(common, handle=handle)

    def np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = slow(type)
        return dtypes[name]

    block.__new__, block.__init__ = new, lambda *_: None
    block.__eq__ = lambda self, other: self is other or same_type(self, other)
    core.tuple.__eq__ = lambda self, other: (
        core.constexpr(True) if self is other else same_shape(self, other)
    )
    tensor.__init__, interpreter._get_np_dtype = init, np_dtype


if os.environ.get("TRITON_INTERPRET") == "1":
    prepare_once()
