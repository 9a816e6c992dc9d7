"""Checks of arguments: a table of kinds for each public class or function.

A value of another kind raises an error that names the argument, the value and the kind:

    _KINDS = {"steps": size(), "name": optional(NAME), "min_gain": real(above=0.0)}
    given = accept(_KINDS, {"steps": steps, "name": name, "min_gain": min_gain})

Tables are for constructors and setup. Calls use the faster `moekit.runtime.checks`.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from moekit.errors import InvalidProblem, MoekitError
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


class _Inside(Exception):
    """A field of an object is of another kind."""


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
        except _Inside as fault:
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


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def size(least: int = 1, most: int = MAX_TOKENS) -> Kind:
    """Return the kind of Python or numpy integers within the bounds, kept as int; no bools."""

    def keep(value: Any) -> int:
        _require(isinstance(value, Integral) and not isinstance(value, bool))
        number = operator.index(value)
        _require(least <= number <= most)
        return number

    return Kind(f"an integer of at least {least} and at most {most}", keep)


def real(*, above: float = -math.inf, most: float = math.inf, finite: bool = True) -> Kind:
    """Return the kind of numbers within the bounds, kept as float; no NaN and no bools."""

    def keep(value: Any) -> float:
        _require(isinstance(value, Real) and not isinstance(value, bool))
        number = float(value)
        _require(number <= most and (number > above or above == -math.inf))
        _require(math.isfinite(number) or not finite)
        return number

    bounds = (("above", above), ("at most", most))
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
    return Kind(f"a {'finite ' * finite}number {words}".strip(), keep)


def matching(wanted: str, accepts: Callable[[Any], object]) -> Kind:
    """Return the kind of values for which ``accepts`` is true, kept as they are."""

    def keep(value: Any) -> Any:
        _require(bool(accepts(value)))
        return value

    return Kind(wanted, keep)


def instance(wanted: str, *types: type) -> Kind:
    return matching(wanted, lambda value: isinstance(value, types))


def choice(names: Collection[str]) -> Kind:
    def keep(value: Any) -> str:
        _require(isinstance(value, str) and value in names)
        return str(value)

    return Kind(f"one of {', '.join(sorted(names))}", keep)


def converted(wanted: str, type_: type, makers: Mapping[type, Callable[[Any], Any]]) -> Kind:
    """Return the kind of ``type_``, or of values that one of ``makers`` converts to it."""

    def keep(value: Any) -> Any:
        for source, make in makers.items():
            if isinstance(value, source):
                return make(value)
        _require(isinstance(value, type_))
        return value

    return Kind(wanted, keep)


def sequence(wanted: str, type_: type) -> Kind:
    """Return the kind of lists and tuples of ``type_``, kept as they are."""
    return matching(
        f"a list or tuple of {wanted}",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(v, type_) for v in value),
    )


def items(kind: Kind, least: int, most: int) -> Kind:
    """Return the kind of lists of JSON, of so many values of one kind."""

    def keep(value: Any) -> list[Any]:
        _require(isinstance(value, list) and least <= len(value) <= most)
        return list(_within(kind, dict(enumerate(value))).values())

    count = str(most) if least == most else f"{least} to {most}"
    return Kind(f"a list of {count}, each {kind.wanted}", keep)


def _within(kind: Kind, values: Mapping[Any, object]) -> dict[Any, Any]:
    """Return the items as their kind keeps them; an error names the place of the wrong one."""
    kept = {}
    for key, item in values.items():
        place = shown(key).strip("'")
        kept[key] = accept({place: kind}, {place: item}, _Inside)[place]
    return kept


def record(kinds: Mapping[str, Kind]) -> Kind:
    """Return the kind of objects of JSON; an error names the field that is wrong.

    Fields that are null, missing, or not in ``kinds`` are allowed.
    """

    def keep(value: Any) -> dict[str, Any]:
        _require(isinstance(value, dict))
        given = {name: kind for name, kind in kinds.items() if value.get(name) is not None}
        accept(given, value, _Inside)
        return dict(value)

    return Kind("an object", keep)


def table(kind: Kind, most: int) -> Kind:
    """Return the kind of objects of JSON whose fields, of any name, are all of one kind."""

    def keep(value: Any) -> dict[str, Any]:
        _require(isinstance(value, dict) and len(value) <= most)
        return _within(kind, value)

    return Kind(f"an object of at most {most} fields, each {kind.wanted}", keep)


def text(most: int) -> Kind:
    return matching(
        f"a text of at most {most} characters",
        lambda value: isinstance(value, str) and len(value) <= most,
    )


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
