"""Checks of what a backend's constructor and methods return.

They run when a kernel is composed and when weights are packed, so calls do not pay for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from moekit.contract import (
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
)
from moekit.contract.specs import BackendSpec
from moekit.errors import BackendBroken, MoekitError
from moekit.problem.weights import ExpertWeights
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import describe

T = TypeVar("T")
BackendT = TypeVar("BackendT", bound=PrepareAndFinalize | PermuteExpertsUnpermute)


def create(backend: Callable[..., BackendT], spec: BackendSpec, *args: Any) -> BackendT:
    """Return ``backend(spec, *args)``, where ``args`` begins with the problem.

    Raises BackendBroken if the constructor raises. moekit's own errors pass through, because they
    already say what to do.
    """
    made = _asked(spec, "cannot be made", lambda: backend(spec, *args))
    for name, given in (("spec", spec), ("problem", args[0])):
        if getattr(made, name, None) != given:
            raise _broken(
                spec,
                f"cannot be made: its {name} is not the one it was given; call super().__init__",
            )
    return made


def check_dispatcher(dispatcher: PrepareAndFinalize) -> int:
    """Return ``max_rows(1)``. Raises BackendBroken if a size is not an int of at least 0."""
    _size(dispatcher.spec, "buffer_bytes()", dispatcher.buffer_bytes)
    _size(dispatcher.spec, "transient_bytes(1)", lambda: dispatcher.transient_bytes(1))
    return _size(dispatcher.spec, "max_rows(1)", lambda: dispatcher.max_rows(1))


def check_experts(experts: PermuteExpertsUnpermute, rows: int) -> None:
    """Raise BackendBroken if a size for ``rows`` rows is not valid."""
    spec = experts.spec
    _size(spec, f"transient_bytes({rows})", lambda: experts.transient_bytes(rows))

    def least_size() -> int:
        return min((n for each in experts.workspace(rows) for n in each.shape), default=0)

    _size(spec, f"workspace({rows})", least_size)


def packed_by(experts: PermuteExpertsUnpermute, weights: ExpertWeights) -> PackedWeights:
    """Return ``experts.pack(weights)``. Raises BackendBroken unless it is PackedWeights."""
    packed = experts.pack(weights)
    if not isinstance(packed, PackedWeights):
        raise _broken(experts.spec, f"pack() returned {shown(packed)}, expected PackedWeights")
    return packed


def _size(spec: BackendSpec, call: str, size: Callable[[], int]) -> int:
    found = _asked(spec, f"{call} failed", size)
    if not isinstance(found, int) or found < 0:
        raise _broken(spec, f"{call} returned {shown(found)}, expected an int of at least 0")
    return found


def _asked(spec: BackendSpec, what: str, answer: Callable[[], T]) -> T:
    try:
        return answer()
    except (KeyboardInterrupt, MoekitError):
        raise
    except BaseException as error:
        raise _broken(spec, f"{what}: {describe(error)}") from error


def _broken(spec: BackendSpec, what: str) -> BackendBroken:
    return BackendBroken(
        f"{spec.kind} {spec.name!r} ({spec.target}) {what}; name another backend, or correct this "
        "one"
    )
