"""Checks of arguments: a table of kinds for each public class or function.

A value of another kind raises an error that names the argument, the value and the kind:

    _KINDS = {"steps": size(), "name": optional(NAME), "min_gain": real(above=0.0)}
    given = accept(_KINDS, {"steps": steps, "name": name, "min_gain": min_gain})

Tables are for constructors and setup. Calls use the faster `moekit.runtime.checks`. The kinds of
JSON values are in `moekit.untrusted.json_kinds`.
"""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from moekit.errors import InvalidInput, InvalidProblem, MoekitError
from moekit.untrusted.code import printable, text_of

# Bounds of sizes: far above every model and machine, and low enough that loops over ranks or
# experts end soon.
MAX_RANKS = 2**16
MAX_EXPERTS = 2**20
MAX_WIDTH = 2**24
MAX_TOKENS = 2**31 - 1

_short = reprlib.Repr()
_short.maxother = _short.maxstring = _short.maxlong = 60


@dataclass(frozen=True)
class Kind:
    """A set of values.

    wanted: its name in an error ("it must be ...").
    keep: returns the value to store, and raises for a value outside the set.
    """

    wanted: str
    keep: Callable[[Any], Any]


class Inside(Exception):
    """A part of a value is of another kind; the text names the part."""


def accept(
    kinds: Mapping[str, Kind],
    values: Mapping[str, object],
    error: type[Exception] = InvalidProblem,
) -> dict[str, Any]:
    """Return the value of each name in ``kinds`` as its kind keeps it.

    Raises ``error`` for the first value that is of another kind, or what the kind itself raises
    if that is a MoekitError.
    """
    kept = {}
    for name, kind in kinds.items():
        try:
            kept[name] = kind.keep(values[name])
        except MoekitError:
            raise
        except Inside as fault:
            raise error(f"{name}.{fault}") from None
        except Exception:  # a foreign value may raise anything
            raise error(f"{name}={shown(values[name])}: it must be {kind.wanted}") from None
    return kept


def accept_fields(
    owner: object, kinds: Mapping[str, Kind], error: type[MoekitError] = InvalidProblem
) -> None:
    """Check the fields of a frozen dataclass with `accept`, and store what that returns."""
    for name, value in accept(kinds, vars(owner), error).items():
        object.__setattr__(owner, name, value)


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened, whatever its own methods do.

    Tensors are shown by shape, dtype and device.
    """
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"<{shape} {value.dtype}{layout} tensor on {value.device}>"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print some
        return f"<int of {value.bit_length()} bits>"
    return printable(text_of(lambda: _short.repr(value)), 400)


def require(condition: bool) -> None:
    if not condition:
        raise ValueError


def size(least: int = 1, most: int = MAX_TOKENS) -> Kind:
    """Return the kind of Python or numpy integers within the bounds, kept as int; no bools."""

    def keep(value: Any) -> int:
        require(isinstance(value, Integral) and not isinstance(value, bool))
        number = operator.index(value)
        require(least <= number <= most)
        return number

    return Kind(f"an integer of at least {least} and at most {most}", keep)


def real(*, above: float = -math.inf, most: float = math.inf, finite: bool = True) -> Kind:
    """Return the kind of numbers within the bounds, kept as float; no NaN and no bools."""

    def keep(value: Any) -> float:
        require(isinstance(value, Real) and not isinstance(value, bool))
        number = float(value)
        require(number <= most and (number > above or above == -math.inf))
        require(math.isfinite(number) or not finite)
        return number

    bounds = (("above", above), ("at most", most))
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
    return Kind(f"a {'finite ' * finite}number {words}".strip(), keep)


def matching(wanted: str, accepts: Callable[[Any], object]) -> Kind:
    """Return the kind of values for which ``accepts`` is true, kept as they are."""

    def keep(value: Any) -> Any:
        require(bool(accepts(value)))
        return value

    return Kind(wanted, keep)


def instance(wanted: str, *types: type) -> Kind:
    return matching(wanted, lambda value: isinstance(value, types))


def choice(names: Collection[str]) -> Kind:
    def keep(value: Any) -> str:
        require(isinstance(value, str) and value in names)
        return str(value)

    return Kind(f"one of {', '.join(sorted(names))}", keep)


def converted(wanted: str, type_: type, makers: Mapping[type, Callable[[Any], Any]]) -> Kind:
    """Return the kind of ``type_``, or of values that one of ``makers`` converts to it."""

    def keep(value: Any) -> Any:
        for source, make in makers.items():
            if isinstance(value, source):
                return make(value)
        require(isinstance(value, type_))
        return value

    return Kind(wanted, keep)


def either(first: Kind, second: Kind) -> Kind:
    def keep(value: Any) -> Any:
        with suppress(Exception):
            return first.keep(value)
        return second.keep(value)

    return Kind(f"{first.wanted} or {second.wanted}", keep)


def optional(kind: Kind) -> Kind:
    return Kind(
        f"{kind.wanted}, or None", lambda value: None if value is None else kind.keep(value)
    )


FLAG = instance("True or False", bool)
NAME = instance("a name (str)", str)
FUNCTION = matching("a function", callable)
GROUP = matching(
    "a torch.distributed process group that this process is in",
    lambda value: callable(value.size) and callable(value.rank),
)
TIMEOUT = real(above=0.0, most=float(2**31))


def switch(name: str, default: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether variable ``name`` is 1; ``default`` where it is unset or empty.

    Raises InvalidInput for any other value than 0 and 1.
    """
    environ = os.environ if environ is None else environ
    value = environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise InvalidInput(
            f"{name}={value!r}: expected 0 or 1; set one of them, or unset the variable for "
            f"{int(default)}"
        )
    return value == "1" if value else default
