"""Kinds of JSON values, for `moekit.untrusted.arguments.accept`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit.untrusted.arguments import Inside, Kind, accept, matching, require, shown


def items(kind: Kind, least: int, most: int) -> Kind:
    """Return the kind of lists of JSON, of so many values of one kind."""

    def keep(value: Any) -> list[Any]:
        require(isinstance(value, list) and least <= len(value) <= most)
        return list(_within(kind, dict(enumerate(value))).values())

    count = str(most) if least == most else f"{least} to {most}"
    return Kind(f"a list of {count}, each {kind.wanted}", keep)


def _within(kind: Kind, values: Mapping[Any, object]) -> dict[Any, Any]:
    """Return the items as their kind keeps them; an error names the place of the wrong one."""
    kept = {}
    for key, item in values.items():
        place = shown(key).strip("'")
        kept[key] = accept({place: kind}, {place: item}, Inside)[place]
    return kept


def record(kinds: Mapping[str, Kind]) -> Kind:
    """Return the kind of objects of JSON; an error names the field that is wrong.

    Fields that are null, missing, or not in ``kinds`` are allowed.
    """

    def keep(value: Any) -> dict[str, Any]:
        require(isinstance(value, dict))
        given = {name: kind for name, kind in kinds.items() if value.get(name) is not None}
        accept(given, value, Inside)
        return dict(value)

    return Kind("an object", keep)


def table(kind: Kind, most: int) -> Kind:
    """Return the kind of objects of JSON whose fields, of any name, are all of one kind."""

    def keep(value: Any) -> dict[str, Any]:
        require(isinstance(value, dict) and len(value) <= most)
        return _within(kind, value)

    return Kind(f"an object of at most {most} fields, each {kind.wanted}", keep)


def text(most: int) -> Kind:
    return matching(
        f"a text of at most {most} characters",
        lambda value: isinstance(value, str) and len(value) <= most,
    )
