"""The GGUF format: metadata, tensors and shards of a file, read in bounded time and memory.

moekit reads headers itself, because the gguf library maps whole files and builds an object for
every value of a header that it does not check first. The format is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from moekit.checkpoint.headers import MAX_FILES, MAX_HEADER, MAX_NAME, Entry, Version, opened
from moekit.errors import WeightsError
from moekit.formats.gguf import TYPES
from moekit.untrusted.arguments import shown

_MAX_VALUES = 4_000_000  # in one file; the largest vocabularies have under a million
_MAX_KEPT = 1 << 14  # elements of a kept array, one for each layer
_MAX_TEXT = 1 << 16  # bytes of a kept text
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_DEPTH = 4
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

_STRING, _ARRAY = 8, 9
# struct's codes of the numbers, by the number of their type.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


def shards_of(file: Path) -> list[Path]:
    """Return all files of a split model ("x-00001-of-00003.gguf"); of any other, ``[file]``."""
    match = _SPLIT.fullmatch(file.name)
    if not match:
        return [file]
    stem, _, total = match.groups()
    if not 1 <= int(total) <= MAX_FILES:
        raise WeightsError(f"{file}: a split model has 1 to {MAX_FILES} files (got {total})")
    return [file.with_name(f"{stem}-{n:05}-of-{total}.gguf") for n in range(1, int(total) + 1)]


def model_in(folder: Path) -> list[Path]:
    """Return the files of the only model in ``folder``; [] if there is none.

    Files called ``mmproj*`` hold the encoder of images, which has no experts.

    Raises:
        WeightsError: There are several models.
    """
    found = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("mmproj")]
    models = {tuple(shards_of(file)): file for file in reversed(found)}
    if len(models) > 1:
        first = ", ".join(file.name for file in list(models.values())[::-1][:10])
        raise WeightsError(
            f"{folder}: {len(models)} models are in this folder ({first}); pass the file of one"
        )
    return [file for files in models for file in files]


def read_header(file: Path) -> tuple[dict[str, Entry], Version, dict[str, Any]]:
    """Return the tensors of one file, the file's version, and its metadata.

    A shape has the experts first and the columns last, which is ggml's order reversed. A tensor of
    a quantized type is bytes, its last two dimensions are the blocks of a row and the bytes of a
    block, and `Entry.block` names the type. Metadata has the numbers, short texts and short arrays
    of numbers.

    Raises:
        WeightsError: The file is missing, truncated, or not of this format.
    """
    with opened(file, "a GGUF file") as (stream, version):
        entries, metadata = _Header(file, _Cursor(stream, version.size)).read()
        return entries, version, metadata


class _Cursor:
    """Reads a file of ``size`` bytes from its beginning."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size
        self.position = self.values = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes. Raises ValueError if the file or a header ends before them."""
        if count > self.size - self.position:
            raise ValueError(
                f"{shown(count)} bytes should be at byte {self.position} of {self.size}"
            )
        self.position += count
        if self.position > MAX_HEADER:
            raise ValueError(f"its header has more than {MAX_HEADER} bytes")
        if len(data := self.stream.read(count)) < count:
            raise ValueError("it was truncated while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, each: int) -> int:
        """Return a number of things, which take at least ``each`` bytes of the file."""
        found: int = self.number("Q")
        if found * each > self.size - self.position:
            raise ValueError(f"it says to have {found} {what} in {self.size} bytes")
        self.values += found
        if self.values > _MAX_VALUES:
            raise ValueError(f"its header has more than {_MAX_VALUES} values")
        return found

    def name(self) -> str:
        length = self.number("Q")
        if length > MAX_NAME:
            raise ValueError(f"a name has {length} bytes, more than {MAX_NAME}")
        return self.take(length).decode()


class _Header:
    def __init__(self, file: Path, cursor: _Cursor) -> None:
        self.file, self.cursor = file, cursor

    def read(self) -> tuple[dict[str, Entry], dict[str, Any]]:
        cursor = self.cursor
        if cursor.size < 24:
            raise ValueError(f"it has {cursor.size} bytes, and a header begins with 24")
        if (magic := cursor.take(4)) != b"GGUF":
            raise ValueError(f"it begins with {magic!r} instead of b'GGUF'")
        if (version := cursor.number("I")) not in (2, 3):
            order = " (it may be big endian)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"its version is {version}{order}, and moekit reads 2 and 3")
        tensors = cursor.count("tensors", 24)
        metadata = self._metadata(cursor.count("fields", 13))
        infos = [self._info() for _ in range(tensors)]
        return self._entries(infos, self._alignment(metadata)), metadata

    # -- metadata ------------------------------------------------------------------------------

    def _metadata(self, count: int) -> dict[str, Any]:
        seen, kept = set(), {}
        for _ in range(count):
            if (key := self.cursor.name()) in seen:
                raise ValueError(f"the field {shown(key)} is there twice")
            seen.add(key)
            if (value := self._value(self.cursor.number("I"), 0)) is not None:
                kept[key] = value
        return kept

    def _value(self, kind: int, depth: int) -> Any:
        """Return a value; None, after skipping it, if nobody asks for such a long one."""
        cursor = self.cursor
        if kind in _NUMBERS:
            return cursor.number(_NUMBERS[kind])
        if kind == _STRING:
            data = cursor.take(cursor.number("Q"))
            return data.decode() if len(data) <= _MAX_TEXT else None
        if kind != _ARRAY:
            raise ValueError(f"a field has the type {kind}, which GGUF does not have")
        if depth == _MAX_DEPTH:
            raise ValueError("its arrays are nested too deeply")
        of = cursor.number("I")
        if of in _NUMBERS:
            code = _NUMBERS[of]
            count = cursor.count("numbers", struct.calcsize("<" + code))
            data = cursor.take(count * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", data)) if count <= _MAX_KEPT else None
        count = cursor.count("values", 8)
        for _ in range(count):
            if of == _STRING:
                cursor.take(int.from_bytes(cursor.take(8), "little"))
                continue
            self._value(of, depth + 1)
        return None

    @staticmethod
    def _alignment(metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", 32)
        if type(found) is not int or not 1 <= found <= _MAX_ALIGNMENT or found & (found - 1):
            raise ValueError(
                f"general.alignment must be a power of two up to {_MAX_ALIGNMENT} "
                f"(got {shown(found)})"
            )
        return found

    # -- tensors -------------------------------------------------------------------------------

    def _info(self) -> tuple[str, list[int], int, int]:
        """Return a tensor's name, shape, number of type, and offset in the data."""
        cursor = self.cursor
        name = cursor.name()
        if (dims := cursor.number("I")) > _MAX_DIMS:
            raise ValueError(f"{shown(name)} has {dims} dimensions, more than {_MAX_DIMS}")
        shape = [cursor.number("Q") for _ in range(dims)][::-1]
        return name, shape, cursor.number("I"), cursor.number("Q")

    def _entries(
        self, infos: list[tuple[str, list[int], int, int]], alignment: int
    ) -> dict[str, Entry]:
        data = -(-self.cursor.position // alignment) * alignment
        entries: dict[str, Entry] = {}
        for name, shape, kind, offset in infos:
            if name in entries:
                raise ValueError(f"the tensor {shown(name)} is there twice")
            if offset % alignment:
                raise ValueError(
                    f"{shown(name)} begins at byte {offset} of the data, no multiple of {alignment}"
                )
            entries[name] = self._entry(name, shape, kind, data + offset)
        self._refuse_overlaps(entries)
        return entries

    def _entry(self, name: str, shape: list[int], kind: int, offset: int) -> Entry:
        if kind not in TYPES:  # its size is not known; only reading it is refused
            return Entry(self.file, f"ggml type {kind}", tuple(shape), offset, 0)
        label, elements, nbytes = TYPES[kind]
        dtype, block = label, ""
        if elements > 1:
            if not shape or shape[-1] % elements:
                raise ValueError(
                    f"{shown(name)} is {label} with rows of {shape[-1] if shape else 1}, no "
                    f"multiple of {elements}"
                )
            dtype, block = "U8", label
            shape, nbytes = [*shape[:-1], shape[-1] // elements, nbytes], 1
        size = math.prod(shape) * nbytes
        if offset + size > self.cursor.size:
            raise ValueError(
                f"{shown(name)} ends at byte {shown(offset + size)} of {self.cursor.size}"
            )
        return Entry(self.file, dtype, tuple(shape), offset, size, block)

    @staticmethod
    def _refuse_overlaps(entries: dict[str, Entry]) -> None:
        """Refuse tensors that share bytes: a small file could make many large tensors of them."""
        end, before = 0, ""
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            if entry.nbytes and entry.offset < end:
                raise ValueError(f"{shown(name)} overlaps {shown(before)}")
            if entry.nbytes:
                end, before = entry.offset + entry.nbytes, name
