"""Tensors by name, from files or from a caller."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moekit.errors import InvalidProblem, WeightsError

_SHOWN = 20  # faults that one error spells out


class Entry(NamedTuple):
    """A named tensor.

    Args:
        place: Its position among the tensors of the file.
        dtype: The file's name of the dtype if torch has no such dtype.
        open: Returns the tensor, a view of the mapped file.
        block: ggml's type of the blocks that a tensor of bytes holds, such as "Q4_K", or "".
    """

    file: Path
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    open: Callable[[], Tensor]
    block: str = ""


class Tensors:
    """Named tensors. Several threads may read at the same time.

    Args:
        path: Where they are, for errors.

    Attributes:
        entries: The tensors by name.
        bytes_read: The bytes of tensors that were read.
        known: What other modules found out about these tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self.is_gguf = False
        self.entries: dict[str, Entry] = {}
        self.duplicates: dict[str, list[Path]] = {}
        self.known: dict[Any, Any] = {}
        self._sorted: list[str] = []
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names that start with ``prefix``."""
        start = bisect.bisect_left(self._sorted, prefix)
        stop = bisect.bisect_left(self._sorted, prefix + "\U0010ffff")
        return self._sorted[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype | str:
        """Return the tensor's dtype, or the file's name for it if torch has no such dtype."""
        return self.entries[name].dtype

    def view(self, name: str, *parts: slice, shape: Sequence[int] | None = None) -> Tensor:
        """Return a part of a tensor without copying it. Do not change it.

        shape: view the tensor in this shape, of as many elements, before slicing it.
        """
        whole = self.entries[name].open()
        part = (whole if shape is None else whole.reshape(tuple(shape)))[parts]
        with self._lock:
            self.bytes_read += part.nbytes
        return part

    def read(self, name: str, *parts: slice) -> Tensor:
        """Return a copy of a tensor, or of a part: one slice for each leading dimension."""
        return self.view(name, *parts).clone(memory_format=torch.contiguous_format)


def listed(faults: Sequence[str]) -> str:
    """Join faults for an error, which spells out the first ones."""
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


@contextmanager
def named(checkpoint: Tensors) -> Iterator[None]:
    """Add the checkpoint's path to errors that do not name it."""
    try:
        yield
    except (InvalidProblem, WeightsError) as error:
        if str(checkpoint.path) in str(error):
            raise
        raise type(error)(f"{checkpoint.path}: {error}") from error
