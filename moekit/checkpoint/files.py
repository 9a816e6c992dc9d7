"""Read tensors by name from safetensors and GGUF files, and only the bytes that are needed.

moekit reads the format itself instead of using the safetensors library:

- The library maps files, and a process dies of SIGBUS if another one truncates a mapped file. Here
  that is a WeightsError. `headers` also bounds the time and memory that a hostile header can cost.
- Threads read any slice straight into its final place, in huge pages. Loading a checkpoint of
  20.5 GB (bf16, one rank, cold page cache) takes 18.5 s, and merely reading the files into memory
  16.5 s: 0.90 of that speed (benchmarks/results/2026-11-21-cpu-load.md). The library was not
  timed in comparison.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moekit.checkpoint import gguf_header
from moekit.checkpoint.gguf_config import config_of
from moekit.checkpoint.headers import DTYPES, Entry, Version, read_header, shards
from moekit.checkpoint.schema import CONFIG, HF_QUANT_CONFIG
from moekit.errors import InvalidProblem, WeightsError
from moekit.untrusted.arguments import Kind, accept, instance
from moekit.untrusted.files import open_regular, read_json

_MAX_READ = 1 << 30  # Linux reads at most 2 GiB in one call
# Runs of bytes with gaps of at least _FAR are read one by one. Nearer ones are read together with
# the gaps, _SPAN bytes at a time, because copies within a core's cache cost less than system calls.
_FAR = 1 << 14
_SPAN = 1 << 20
_HUGE = 1 << 22  # bytes from which on a tensor lies in huge pages
_SHOWN = 20  # faults that one error spells out
_PATH = instance("the path of a file or of a directory", str, os.PathLike)


class Checkpoint:
    """The tensors of one safetensors or GGUF file, or of the shards of a model, by name.

    Opening reads the headers only. Several threads may read at the same time. ``bytes_read``
    counts the bytes of tensors that were read.

    Args:
        path: A file, or a directory, whose ``*.safetensors.index.json`` names the files if there
            is one. Of a split GGUF model, any of its files, or the directory.

    Attributes:
        metadata: The fields of a GGUF model's first file that have them; otherwise empty.

    Raises:
        WeightsError: Lists all files that are missing, truncated or of another format. Reading
            raises it for a file that was replaced or written to after it was opened.
    """

    def __init__(self, path: str | Path) -> None:
        accept({"path": _PATH}, {"path": path}, WeightsError)
        self.path = Path(path)
        self.bytes_read = 0
        self.duplicates: dict[str, list[Path]] = {}
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, Entry] = {}
        self._versions: dict[Path, Version] = {}
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()
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
        self._sorted = sorted(self._entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    # -- names and shapes ----------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names that start with ``prefix``."""
        start = bisect.bisect_left(self._sorted, prefix)
        stop = bisect.bisect_left(self._sorted, prefix + "\U0010ffff")
        return self._sorted[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype | str:
        """Return the tensor's dtype, or the file's name for it if torch has no such dtype."""
        stored = self._entries[name].dtype
        return DTYPES.get(stored, stored)

    def block(self, name: str) -> str:
        """Return ggml's type of a tensor that consists of its blocks, such as "Q4_K"; else ""."""
        return self._entries[name].block

    def place(self, name: str) -> tuple[Path, int]:
        """Return the tensor's file and its offset there."""
        entry = self._entries[name]
        return entry.file, entry.offset

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The checked fields of config.json in the same directory; empty if there is none.

        Those of a GGUF model come from its metadata.
        """
        if not self.metadata:
            return self._json("config.json", CONFIG)
        return self._checked(self.path, config_of(self.metadata, self._entries), CONFIG)

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

    # -- reading ----------------------------------------------------------------------------

    def read(self, name: str, *parts: slice, shape: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or a part of it.

        Args:
            name: The tensor's name.
            parts: One slice for each leading dimension.
            shape: View the tensor in this shape, of as many elements, before slicing it.

        Raises:
            WeightsError: The file changed, or torch has no such dtype.
        """
        full, ranges = self._cut(name, parts, shape)
        dtype = self.dtype(name)
        if isinstance(dtype, str):
            raise WeightsError(
                f"{name} has dtype {dtype}, which torch {torch.__version__} does not have"
            )
        out = empty([r.stop - r.start for r in ranges], dtype)
        self._read(out, name, full, ranges)
        return out

    def read_into(
        self, out: Tensor, name: str, *parts: slice, shape: Sequence[int] | None = None
    ) -> None:
        """`read` into ``out``, a contiguous CPU tensor of the part's shape and dtype."""
        full, ranges = self._cut(name, parts, shape)
        assert out.is_contiguous() and out.dtype == self.dtype(name)
        assert list(out.shape) == [r.stop - r.start for r in ranges], (name, out.shape, ranges)
        self._read(out, name, full, ranges)

    def _cut(
        self, name: str, parts: Sequence[slice], shape: Sequence[int] | None
    ) -> tuple[list[int], list[range]]:
        full = list(self.shape(name) if shape is None else shape)
        assert math.prod(full) == math.prod(self.shape(name))
        ranges = [range(n) for n in full]
        for dim, part in enumerate(parts):
            ranges[dim] = range(full[dim])[part]
            assert ranges[dim].step == 1
        return full, ranges

    def _read(self, out: Tensor, name: str, full: Sequence[int], ranges: Sequence[range]) -> None:
        """Read the part ``ranges``, which is a regular pattern of equal runs of bytes."""
        if not out.numel():
            return
        entry = self._entries[name]
        size = out.element_size()
        strides = [math.prod(full[dim + 1 :]) * size for dim in range(len(full))]
        first = entry.offset + sum(
            r.start * stride for r, stride in zip(ranges, strides, strict=True)
        )
        # The innermost dimensions that are read whole, and one more, form a run.
        inner = len(full)
        while inner and len(ranges[inner - 1]) == full[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        outer = [len(r) for r in ranges[:inner]]
        run = out.nbytes // max(math.prod(outer), 1)
        if math.prod(outer) == 1:
            self._read_bytes(entry.file, first, _bytes_of(out))
        else:
            *far, near = range(len(outer))
            rows = out.view(-1).view(torch.uint8).view(-1, outer[near], run)
            starts = _starts(first, [outer[dim] for dim in far], strides)
            for row, start in zip(rows, starts, strict=True):
                self._read_runs(entry.file, start, strides[near], row)
        # The bytes are valid only if the file is still the one whose header was read.
        self._check(entry.file, self._open(entry.file).fileno())
        with self._lock:
            self.bytes_read += out.nbytes

    def _read_runs(self, file: Path, first: int, stride: int, out: Tensor) -> None:
        """Read runs of bytes that start every ``stride`` bytes into ``out`` (runs, bytes)."""
        count, run = out.shape
        if stride - run >= _FAR:
            for index in range(count):
                self._read_bytes(file, first + index * stride, _bytes_of(out[index]))
            return
        # Copy in the widest words that fit: fewer and larger elements copy faster.
        word = math.gcd(8, run, stride, out.storage_offset())
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
        at_once = max(1, _SPAN // stride)
        span = torch.empty(min(at_once, count) * stride, dtype=torch.uint8, device="cpu")
        strided = span.view(dtype).view(-1, stride // word)[:, : run // word]
        for start in range(0, count, at_once):
            part = out[start : start + at_once]
            length = (len(part) - 1) * stride + run  # the file may end after the last run
            self._read_bytes(file, first + start * stride, _bytes_of(span[:length]))
            part.view(dtype).copy_(strided[: len(part)])

    def _read_bytes(self, file: Path, offset: int, buffer: memoryview) -> None:
        fd, done = self._open(file).fileno(), 0
        while done < len(buffer):
            try:
                got = os.preadv(fd, [buffer[done : done + _MAX_READ]], offset + done)
            except OSError as error:
                raise WeightsError(f"{file}: cannot be read ({error})") from error
            if not got:
                raise WeightsError(
                    f"{file}: ends at byte {offset + done}, so it was truncated while it was read; "
                    "open the checkpoint again when nobody writes to it"
                )
            done += got

    def _open(self, file: Path) -> Any:
        with self._lock:
            if file not in self._files:
                try:
                    fd = open_regular(file)
                except OSError as error:
                    raise WeightsError(f"{file}: cannot be opened ({error})") from error
                self._files[file] = open(fd, "rb", buffering=0)
            return self._files[file]

    def _check(self, file: Path, fd: int) -> None:
        now, opened = Version.of(fd), self._versions[file]
        if now != opened:
            how = "truncated" if now.size < opened.size else "replaced or written to"
            raise WeightsError(
                f"{file}: {how} after its header was read; open the checkpoint again when nobody "
                "writes to it"
            )

    # -- opening ----------------------------------------------------------------------------

    def _add(self, file: Path) -> None:
        if file.suffix == ".gguf":
            entries, self._versions[file], metadata = gguf_header.read_header(file)
            self.metadata = self.metadata or metadata
        else:
            entries, self._versions[file] = read_header(file)
        for name, entry in entries.items():
            other = self._entries.setdefault(name, entry)
            if other is not entry:
                self.duplicates.setdefault(name, [other.file]).append(file)


def _files_of(path: Path) -> list[Path]:
    """Return the files of a model. A directory with both formats is one of safetensors."""
    if not path.is_dir():
        return gguf_header.shards_of(path)
    if any(path.glob("*.safetensors*")):
        return shards(path)
    return gguf_header.model_in(path) or shards(path)


def listed(faults: Sequence[str]) -> str:
    """Join faults for an error, which spells out the first ones."""
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


@contextmanager
def named(checkpoint: Checkpoint) -> Iterator[None]:
    """Add the checkpoint's path to errors that do not name it."""
    try:
        yield
    except (InvalidProblem, WeightsError) as error:
        if str(checkpoint.path) in str(error):
            raise
        raise type(error)(f"{checkpoint.path}: {error}") from error


def empty(shape: Sequence[int], dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
    """Return an uninitialized CPU tensor, in huge pages if it is large and the system has them.

    The first access to memory in huge pages costs a fraction of that in small ones.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if pin_memory or nbytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(list(shape), dtype=dtype, pin_memory=pin_memory, device="cpu")
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, RuntimeError, OverflowError) as error:
        raise WeightsError(f"no memory for a tensor of shape {tuple(shape)}: {error}") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(list(shape))


def available_memory() -> float:
    """Return the free bytes of this machine, with swap; infinity if it does not say."""
    try:
        said = Path("/proc/meminfo").read_text()
        lines = dict(line.split(":", 1) for line in said.splitlines())
        return sum(1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, LookupError):
        return math.inf


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor, which must outlive it."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _starts(first: int, outer: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the offset of each innermost run, in order."""
    starts = [first]
    for n, stride in zip(outer, strides[: len(outer)], strict=True):
        starts = [start + i * stride for start in starts for i in range(n)]
    return starts
