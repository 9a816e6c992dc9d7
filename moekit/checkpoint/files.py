"""Give access to the tensors of safetensors and GGUF files, which their libraries read.

Both libraries map files: a tensor is a view of its file until it is copied, so only the bytes that
are needed are read. A process dies if another one truncates a mapped file, therefore a layer is
read only from files that are still the ones that were opened.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

from moekit.checkpoint.schema import CONFIG, HF_QUANT_CONFIG
from moekit.checkpoint.tensors import Entry, Tensors, listed
from moekit.errors import WeightsError
from moekit.untrusted.arguments import Kind, accept, shown
from moekit.untrusted.files import open_regular, read_json

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_LFS = b"version https://git-lfs"
_MAX_INDEX = 100_000_000  # bytes
_MAX_FILES = 10_000
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


class Checkpoint(Tensors):
    """The tensors of one safetensors or GGUF file, or of the shards of a model, by name.

    Opening reads the headers only. Several threads may read at the same time. ``bytes_read``
    counts the bytes of tensors that were read.

    Args:
        path: A file, or a directory, whose ``*.safetensors.index.json`` names the files if there
            is one. Of a split GGUF model, any of its files, or the directory.

    Raises:
        WeightsError: Lists all files that are missing, truncated or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._versions: dict[Path, os.stat_result] = {}
        self._metadata: Mapping[str, Any] = {}
        faults = []
        try:
            files = _files_of(self.path)
        except OSError as error:
            raise WeightsError(
                f"{self.path}: cannot be read ({error.strerror}); pass a folder that you may read"
            ) from error
        for file in files:
            try:
                self._add(file)
            except WeightsError as error:
                faults.append(str(error))
        if faults:
            raise WeightsError(listed(faults))
        self._sorted = sorted(self.entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, whose tensors cannot be read any more."""
        self.entries.clear()

    def _add(self, file: Path) -> None:
        """Open a file. Raises WeightsError for every fault that is found in it."""
        kind = "GGUF" if file.suffix == ".gguf" else "safetensors"
        try:
            with open(open_regular(file), "rb") as stream:
                if stream.read(len(_LFS)) == _LFS:
                    raise ValueError(
                        "it is a git-lfs pointer instead of the tensors: run git lfs pull"
                    )
                self._versions[file] = os.fstat(stream.fileno())
            if kind == "GGUF":
                from moekit.checkpoint import gguf_file

                entries, metadata = gguf_file.open_file(file)
                self.is_gguf, self._metadata = True, self._metadata or metadata
            else:
                entries = _open_safetensors(file)
        except FileNotFoundError as error:
            raise WeightsError(
                f"{file}: no such file; download the whole model and pass its folder"
            ) from error
        except ImportError as error:
            raise WeightsError(
                f"{file}: reading it needs a library: pip install {kind.lower()} ({error})"
            ) from error
        except (OSError, MemoryError) as error:
            why = str(getattr(error, "strerror", None) or error)
            raise WeightsError(
                f"{file}: cannot be read ({why}); pass a file that you may read"
            ) from error
        except (ValueError, LookupError, ArithmeticError, struct.error) as error:
            raise WeightsError(
                f"{file}: truncated or not a {kind} file ({error}); download it again"
            ) from error
        for name, entry in entries.items():
            other = self.entries.setdefault(name, entry)
            if other is not entry:
                self.duplicates.setdefault(name, [other.file]).append(file)

    def check_unchanged(self) -> None:
        """Raise WeightsError if a file was replaced or written to after it was opened."""
        for file, opened in self._versions.items():
            try:
                now = os.stat(file)
            except OSError as error:
                raise WeightsError(f"{file}: cannot be opened ({error})") from error
            if _version(now) != _version(opened):
                how = "truncated" if now.st_size < opened.st_size else "replaced or written to"
                raise WeightsError(
                    f"{file}: {how} after its header was read; open the checkpoint again when "
                    "nobody writes to it"
                )

    # -- configs -------------------------------------------------------------------------------

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The checked fields of config.json in the same directory; empty if there is none.

        For a GGUF model, the fields come from its metadata.
        """
        if not self.is_gguf:
            return self._json("config.json", CONFIG)
        from moekit.checkpoint.gguf_file import config_of

        downs = (name for name in self._sorted if ".ffn_down_exps." in name)
        stored = next((self.dtype(name) for name in downs), None)
        return self._checked(self.path, config_of(self._metadata, stored), CONFIG)

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization config in config.json or in ModelOpt's hf_quant_config.json."""
        for config in (self.config, self.config.get("text_config") or {}):
            for key in ("quantization_config", "compression_config"):
                if config.get(key) is not None:
                    return dict(config[key])
        modelopt = self._json("hf_quant_config.json", HF_QUANT_CONFIG).get("quantization")
        return {} if modelopt is None else {"quant_method": "modelopt", **modelopt}

    def _json(self, name: str, kind: Kind) -> Mapping[str, Any]:
        file = (self.path if self.path.is_dir() else self.path.parent) / name
        try:
            found = read_json(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{file}: cannot be read as JSON ({error}); download it again"
            ) from error
        if not isinstance(found, dict):
            raise WeightsError(f"{file}: must hold an object (got {type(found).__name__})")
        return self._checked(file, found, kind)

    @staticmethod
    def _checked(file: Path, found: dict[str, Any], kind: Kind) -> dict[str, Any]:
        field = f"{file}: config"
        accept({field: kind}, {field: found}, WeightsError)
        return found


def _open_safetensors(file: Path) -> dict[str, Entry]:
    """Open a file, whose header the library checks: tensors cover the data without overlaps. Raises
    ValueError if the file is not of this format."""
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(error) from error
    entries = {}
    for place, name in enumerate(opened.offset_keys()):
        said = opened.get_slice(name)
        kind = said.get_dtype()
        entries[name] = Entry(
            file, place, tuple(said.get_shape()), _DTYPES.get(kind, kind),
            partial(opened.get_tensor, name),
        )  # fmt: skip
    return entries


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# -- which files a model has ---------------------------------------------------------------------


def _files_of(path: Path) -> list[Path]:
    """Return the files of a model. A directory with both formats is one of safetensors."""
    if not path.is_dir():
        return _parts_of_gguf(path)
    if any(path.glob("*.safetensors*")):
        return _shards(path)
    if found := _gguf_in(path):
        return found
    raise WeightsError(
        f"{path}: no *.safetensors or *.gguf file in this directory; pass the folder of a "
        "downloaded model"
    )


def _shards(path: Path) -> list[Path]:
    """Return the safetensors files that the index in a directory names, or all."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        whole = path / "model.safetensors"
        return [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
    usual = path / "model.safetensors.index.json"
    index = usual if usual in indexes else indexes[0]
    try:
        names = _named_by(read_json(index, _MAX_INDEX))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{index}: not a safetensors index ({error})") from error
    return sorted(path / name for name in names)


def _named_by(index: Any) -> set[str]:
    """Return the files that an index names; raise ValueError for names outside its folder.

    A file may be a symbolic link to anywhere, as in the cache of the Hugging Face Hub.
    """
    held = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(held, dict):
        raise ValueError(f"weight_map must be an object (got {shown(held)})")
    for tensor, name in held.items():
        path = PureWindowsPath(name if isinstance(name, str) else "")  # knows all systems' roots
        if not path.parts or path.anchor or ".." in path.parts or "\0" in name or len(name) > 4096:
            raise ValueError(
                f"weight_map[{shown(tensor)}] must name a file in the index's folder "
                f"(got {shown(name)})"
            )
    if len(names := set(held.values())) > _MAX_FILES:
        raise ValueError(f"weight_map must name at most {_MAX_FILES} files (got {len(names)})")
    return names


def _parts_of_gguf(file: Path) -> list[Path]:
    """Return all files of a split model ("x-00001-of-00003.gguf"); of any other, ``[file]``."""
    match = _SPLIT.fullmatch(file.name)
    if not match:
        return [file]
    stem, _, total = match.groups()
    if not 1 <= int(total) <= _MAX_FILES:
        raise WeightsError(f"{file}: a split model has 1 to {_MAX_FILES} files (got {total})")
    return [file.with_name(f"{stem}-{n:05}-of-{total}.gguf") for n in range(1, int(total) + 1)]


def _gguf_in(folder: Path) -> list[Path]:
    """Return the files of the only GGUF model in ``folder``; [] if there is none.

    Files called ``mmproj*`` hold the encoder of images, which has no experts. Raises WeightsError
    if there are several models.
    """
    found = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("mmproj")]
    models = {tuple(_parts_of_gguf(file)): file for file in reversed(found)}
    if len(models) > 1:
        first = ", ".join(file.name for file in list(models.values())[::-1][:10])
        raise WeightsError(
            f"{folder}: {len(models)} models are in this folder ({first}); pass the file of one"
        )
    return [file for files in models for file in files]


def available_memory() -> float:
    """Return the free bytes of this machine, with swap; infinity if it does not say."""
    try:
        said = Path("/proc/meminfo").read_text()
    except OSError:
        return math.inf
    free = re.findall(r"^(?:MemAvailable|SwapFree): +([0-9]+) kB$", said, re.MULTILINE)
    return sum(1024 * int(n) for n in free) if free else math.inf
