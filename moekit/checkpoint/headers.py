"""The safetensors format: which tensors a file holds, and where; which files make a checkpoint."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from moekit.errors import WeightsError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LFS = b"version https://git-lfs"
_MAX_HEADER = 1 << 30


class Entry(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


def shards(path: Path) -> list[Path]:
    """The files of a checkpoint: ``path`` itself, or those that the folder's index names."""
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        whole = path / "model.safetensors"
        found = [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise WeightsError(f"{path}: no *.safetensors file in this directory")
        return found
    usual = path / "model.safetensors.index.json"
    index = usual if usual in indexes else indexes[0]
    try:
        files = {path / name for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not a safetensors index ({error!r})") from error
    return sorted(files)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file. Layout: u64 length, JSON of that length, data."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(_LFS)) == _LFS:
                raise ValueError("a pointer of git-lfs, not the tensors: git lfs pull")
            stream.seek(0)
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            data, entries = 8 + length, {}
            for name, tensor in header.items():
                start, stop = tensor["data_offsets"]
                entry = Entry(
                    file, tensor["dtype"], tuple(tensor["shape"]), data + start, stop - start
                )
                dtype = DTYPES.get(entry.dtype)
                if dtype and math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
                    raise ValueError(f"{name} has {entry.nbytes} bytes for shape {entry.shape}")
                if not 0 <= start <= stop or data + stop > size:
                    raise ValueError(f"{name} ends at byte {data + stop} of {size}")
                entries[name] = entry
            return entries
    except FileNotFoundError as error:
        why = (
            "the checkpoint is incomplete"
            if file.parent.is_dir() and file.suffix
            else ("no folder either; download a model of a hub first, and give its folder")
        )
        raise WeightsError(f"{file}: no such file; {why}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise WeightsError(
            f"{file}: truncated or not a safetensors file ({error}); fetch it again"
        ) from error
