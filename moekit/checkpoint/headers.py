"""The safetensors format: which files make a checkpoint, and where its tensors lie."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import torch

from moekit.errors import WeightsError
from moekit.untrusted.arguments import shown
from moekit.untrusted.files import open_regular, parse_json, read_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_LFS = b"version https://git-lfs"
# The library has the same limit of a header; no model in use comes near the other limits.
MAX_HEADER = 100_000_000
MAX_NAME = 4096
_MAX_DIMS = 32
MAX_FILES = 10_000


class Entry(NamedTuple):
    """The place of a tensor in a checkpoint: its file, bytes, shape and dtype."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int
    block: str = ""  # ggml's type of the blocks that a tensor of bytes holds


class Version(NamedTuple):
    """Identifies a file and its state; it differs after the file was written to or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> Version:
        found = os.fstat(fd)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def shards(path: Path) -> list[Path]:
    """Return the files of the checkpoint in a directory: those that its index names, or all."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        whole = path / "model.safetensors"
        found = [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise WeightsError(
                f"{path}: no *.safetensors or *.gguf file in this directory; pass the folder of a "
                "downloaded model"
            )
        return found
    usual = path / "model.safetensors.index.json"
    index = usual if usual in indexes else indexes[0]
    try:
        names = _files_of(read_json(index, MAX_HEADER))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{index}: not a safetensors index ({error})") from error
    return sorted(path / name for name in names)


def _files_of(index: Any) -> set[str]:
    """Return the files that an index names; raise ValueError for names outside its folder.

    A file may be a symbolic link to anywhere, as in the cache of the Hugging Face Hub.
    """
    held = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(held, dict):
        raise ValueError(f"weight_map must be an object (got {shown(held)})")
    for tensor, name in held.items():
        if not isinstance(name, str) or not name or len(name) > MAX_NAME:
            raise ValueError(f"weight_map[{shown(tensor)}] must name a file (got {shown(name)})")
        path = PureWindowsPath(name)  # it knows the separators and roots of all systems
        if path.anchor or ".." in path.parts or "\0" in name:
            raise ValueError(
                f"weight_map[{shown(tensor)}] must name a file in the index's folder "
                f"(got {shown(name)})"
            )
    if len(names := set(held.values())) > MAX_FILES:
        raise ValueError(f"weight_map must name at most {MAX_FILES} files (got {len(names)})")
    return names


def read_header(file: Path) -> tuple[dict[str, Entry], Version]:
    """Return the tensors of one file, and the file's version.

    The format: a u64 length, JSON of that length, then data, which the tensors cover without
    overlaps, holes or a rest.

    Raises:
        WeightsError: The file is missing, truncated, or not of this format.
    """
    with opened(file, "a safetensors file") as (stream, version):
        if version.size < 8:
            raise ValueError(f"it has {version.size} bytes, and a header begins with 8")
        length = int.from_bytes(stream.read(8), "little")
        if length > (most := min(version.size - 8, MAX_HEADER)):
            raise ValueError(f"its header would have {length} bytes, more than {most}")
        if stream.read(1) != b"{":
            raise ValueError("its header is no JSON object")
        header = parse_json(b"{" + stream.read(length - 1))
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise ValueError("__metadata__ is no object")
        return _entries(file, header, 8 + length, version.size), version


@contextmanager
def opened(file: Path, what: str) -> Iterator[tuple[BinaryIO, Version]]:
    """Open a file to read its header; raise WeightsError for every fault that is found in it."""
    try:
        with open(open_regular(file), "rb") as stream:
            if stream.read(len(_LFS)) == _LFS:
                raise ValueError("it is a git-lfs pointer instead of the tensors: run git lfs pull")
            stream.seek(0)
            yield stream, Version.of(stream.fileno())
    except FileNotFoundError as error:
        why = (
            "the checkpoint is incomplete"
            if file.parent.is_dir() and file.suffix
            else "there is no such folder either: download the model and pass its folder"
        )
        raise WeightsError(f"{file}: no such file; {why}") from error
    except OSError as error:
        raise WeightsError(
            f"{file}: cannot be read ({error.strerror or error}); pass a file that you may read"
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"{file}: truncated or not {what} ({error}); download it again"
        ) from error


def _entries(file: Path, header: dict[str, Any], data: int, size: int) -> dict[str, Entry]:
    """Return the entries of a header; raise ValueError unless they cover bytes data..size-1."""
    entries = {name: _entry(file, name, tensor, data) for name, tensor in header.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.offset + entry.nbytes > size:
            raise ValueError(f"{name} ends at byte {entry.offset + entry.nbytes} of {size}")
        if entry.offset != end:
            how = (
                "overlaps the previous tensor" if entry.offset < end else "leaves a hole before it"
            )
            raise ValueError(f"{name} {how}: it begins at byte {entry.offset}, not {end}")
        end = entry.offset + entry.nbytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return entries


def _entry(file: Path, name: str, tensor: Any, data: int) -> Entry:
    if len(name) > MAX_NAME:
        raise ValueError(f"{shown(name)}: the name has {len(name)} characters, above {MAX_NAME}")
    if not isinstance(tensor, dict):
        raise ValueError(f"{name} must be an object (got {shown(tensor)})")
    dtype: Any = tensor.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"{name}.dtype must be a string (got {shown(dtype)})")
    shape, offsets = _integers(name, tensor, "shape"), _integers(name, tensor, "data_offsets")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{name}.shape must have at most {_MAX_DIMS} numbers (got {len(shape)})")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name}.data_offsets must be [begin, end] (got {shown(offsets)})")
    begin, end = offsets
    known = DTYPES.get(dtype)
    if known and math.prod(shape) * known.itemsize != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes for shape {shown(tuple(shape))}")
    return Entry(file, dtype, tuple(shape), data + begin, end - begin)


def _integers(name: str, tensor: dict[str, Any], field: str) -> list[int]:
    found = tensor.get(field)
    if type(found) is list:
        for n in found:
            if type(n) is not int or n < 0:
                break
        else:
            return found
    raise ValueError(f"{name}.{field} must be integers of at least 0 (got {shown(found)})")
