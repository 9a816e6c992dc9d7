"""Records as JSON, and the records of several ranks as one: both follow the dataclasses' fields.

A field's metadata may hold ``key``, its name in JSON where that differs, and ``merge``, a function
from the values of all ranks to one.
"""

from __future__ import annotations

import json
import math
import statistics
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from moekit.errors import MoekitError
from moekit.plugin import replace_file

from .internals import parse_json

T = TypeVar("T")

# Numbers that `from_json` bounds: what it expects, and whether a number fits. Reports divide by
# them or average their logarithms; the bounds of times and shares are those of tuned tables.
Positive = Annotated[float, "above 0", lambda number: number > 0]
Microseconds = Annotated[float, "at least 0.001", lambda number: number >= 1e-3]
Share = Annotated[float, "at least 0", lambda number: number >= 0]


def named(key: str, **options: Any) -> Any:
    """Return a dataclass field that JSON calls ``key``."""
    return field(metadata={"key": key}, **options)


def merged_by(merge: Callable[[Sequence[Any]], Any], key: str = "", **options: Any) -> Any:
    """Return a dataclass field whose values on several ranks ``merge`` makes one of."""
    return field(metadata={"merge": merge, **({"key": key} if key else {})}, **options)


def _known(reduce: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    """Return ``reduce`` for the values of all ranks; its result is None if a rank has no value."""
    return lambda values: None if None in values else reduce(values)


median, mean, worst = _known(statistics.median), _known(statistics.fmean), _known(max)
# The range that holds all ranges.
widest = _known(lambda ranges: (min(low for low, _ in ranges), max(high for _, high in ranges)))


def merge(records: Sequence[T]) -> T:
    """Make one record of all ranks'; fields without ``merge`` are taken from the first."""
    first: Any = records[0]
    changes = {}
    for f in fields(first):
        values = [getattr(record, f.name) for record in records]
        if "merge" in f.metadata:
            changes[f.name] = f.metadata["merge"](values)
        elif is_dataclass(values[0]):
            changes[f.name] = merge(values)
        else:
            changes[f.name] = values[0]
    return type(first)(**changes)  # type: ignore[no-any-return]


def to_json(value: Any) -> Any:
    """Return a record as what the json module writes. JSON has no NaN: it becomes null."""
    if is_dataclass(value):
        return {_key(f): to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(cls: type[T], data: object, where: str = "the record") -> T:
    """Return the record that `to_json` made ``data`` of.

    Unknown keys are ignored, and fields with a default may lack, so that the recordings of other
    versions can be read.

    Raises:
        MoekitError: Something is missing or has the wrong type or value; the message names it.
    """
    result: T = _decode(cls, data, where)
    return result


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, expected, fits = arguments
        value = _decode(kind, data, where)
        if not fits(value):
            raise MoekitError(f"{where} must be {expected} (got {data})")
        return value
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), data, where)
    if is_dataclass(hint):
        return _decode_fields(hint, data, where)
    if origin is tuple:
        _expect(list, data, where)
        if arguments[-1] is not ... and len(data) != len(arguments):
            raise MoekitError(f"{where} must have {len(arguments)} elements, not {len(data)}")
        hints = arguments if arguments[-1] is not ... else arguments[:1] * len(data)
        pairs = enumerate(zip(hints, data, strict=True))
        return tuple(_decode(h, each, f"{where}[{i}]") for i, (h, each) in pairs)
    if origin is dict:
        _expect(dict, data, where)
        return {name: _decode(arguments[1], each, f"{where}.{name}") for name, each in data.items()}
    if hint is Any:
        return data
    if hint is float and type(data) is int:
        return float(data)
    _expect(hint, data, where)
    return data


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    _expect(dict, data, where)
    hints, values = typing.get_type_hints(cls, include_extras=True), {}
    for f in fields(cls):
        if (key := _key(f)) in data:
            values[f.name] = _decode(hints[f.name], data[key], f"{where}.{key}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise MoekitError(f"{where} has no {key!r}")
    return cls(**values)


def _expect(kind: Any, data: object, where: str) -> None:
    if type(data) is not kind:
        raise MoekitError(f"{where} must be {kind.__name__}, not {type(data).__name__}")


def _key(f: Field[Any]) -> str:
    return str(f.metadata.get("key", f.name))


def read_recording(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``; MoekitError if it cannot be read, or holds none."""
    try:
        data = parse_json(file.read_bytes())
    except OSError as error:
        raise MoekitError(
            f"{file} cannot be read ({error.strerror}): expected a recording made with --json"
        ) from error
    except ValueError as error:
        raise MoekitError(f"{file} is not a recording made with --json: {error}") from error
    if not isinstance(data, dict):
        raise MoekitError(f"{file} is not a recording made with --json: no JSON object")
    return data


def write_recording(file: Path, record: Any) -> None:
    """Write a record as JSON; `replace_file` says how."""
    replace_file(file, json.dumps(to_json(record), indent=1, allow_nan=False) + "\n")
