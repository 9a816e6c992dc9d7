"""Checks of what a backend's constructor and methods return.

They run when a kernel is composed and when weights are packed, so calls do not pay for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from moekit.contract import (
    BufferSpec,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
)
from moekit.contract.specs import BackendSpec
from moekit.errors import BackendBroken, MoekitError
from moekit.problem.weights import ExpertWeights
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import describe

BackendT = TypeVar("BackendT", bound=PrepareAndFinalize | PermuteExpertsUnpermute)


def create(backend: Callable[..., BackendT], spec: BackendSpec, *args: Any) -> BackendT:
    """Return ``backend(spec, *args)``, where ``args`` begins with the problem.

    Raises BackendBroken if the constructor raises. moekit's own errors pass through, because they
    already say what to do.
    """
    with _blamed(spec, "cannot be made"):
        made = backend(spec, *args)
    if not (isinstance(backend, type) and isinstance(made, backend)):
        raise _broken(spec, f"cannot be made: its class made {shown(made)}")
    for name, given in (("spec", spec), ("problem", args[0])):
        if getattr(made, name, None) != given:
            raise _broken(
                spec,
                f"cannot be made: its {name} is not the one it was given; call super().__init__",
            )
    return made


def check_dispatcher(dispatcher: PrepareAndFinalize) -> int:
    """Return ``max_rows(1)``. Raises BackendBroken if a size is not an int of at least 0."""
    for name, args in (("buffer_bytes", ()), ("transient_bytes", (1,))):
        _size(dispatcher, name, *args)
    return _size(dispatcher, "max_rows", 1)


def check_experts(experts: PermuteExpertsUnpermute, rows: int) -> None:
    """Raise BackendBroken if a size for ``rows`` rows is not valid."""
    _size(experts, "transient_bytes", rows)
    with _blamed(experts.spec, f"workspace({rows}) failed"):
        buffers = experts.workspace(rows)
        right = isinstance(buffers, Sequence) and all(_is_buffer(each) for each in buffers)
    if not right:
        expected = "a list of BufferSpec with sizes and a torch.dtype"
        raise _broken(
            experts.spec, f"workspace({rows}) returned {shown(buffers)}, expected {expected}"
        )


def packed_by(experts: PermuteExpertsUnpermute, weights: ExpertWeights) -> PackedWeights:
    """Return ``experts.pack(weights)``. Raises BackendBroken unless it is PackedWeights."""
    packed = experts.pack(weights)
    if not isinstance(packed, PackedWeights):
        raise _broken(experts.spec, f"pack() returned {shown(packed)}, expected PackedWeights")
    for name in ("experts", "shared"):
        held = getattr(packed, name)
        if not (isinstance(held, Mapping) and all(isinstance(t, Tensor) for t in held.values())):
            raise _broken(
                experts.spec, f"pack() returned {name} {shown(held)}, expected tensors by name"
            )
    return packed


def _size(backend: PrepareAndFinalize | PermuteExpertsUnpermute, method: str, *args: int) -> int:
    call = f"{method}({', '.join(map(str, args))})"
    with _blamed(backend.spec, f"{call} failed"):
        size = getattr(backend, method)(*args)
    if not _is_size(size):
        raise _broken(backend.spec, f"{call} returned {shown(size)}, expected an int of at least 0")
    return int(size)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_buffer(buffer: object) -> bool:
    return (
        isinstance(buffer, BufferSpec)
        and isinstance(buffer.shape, tuple)
        and all(_is_size(size) for size in buffer.shape)
        and isinstance(buffer.dtype, torch.dtype)
    )


@contextmanager
def _blamed(spec: BackendSpec, what: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, MoekitError):
        raise
    except BaseException as error:
        raise _broken(spec, f"{what}: {describe(error)}") from error


def _broken(spec: BackendSpec, what: str) -> BackendBroken:
    return BackendBroken(
        f"{spec.kind} {spec.name!r} ({spec.target}) {what}; name another backend, or correct this "
        "one"
    )
