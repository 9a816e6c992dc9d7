"""Tensors in memory, in place of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moekit.checkpoint.files import Checkpoint


class HeldTensors(Checkpoint):
    """Tensors in memory in place of files.

    Args:
        name: Stands for the path in errors.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self.bytes_read = 0
        self.duplicates = {}
        self.metadata = {}
        self.quantization = {}
        self._held: dict[str, Tensor] = {}

    def hold(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor under a name."""
        self._held[name] = tensor

    def drop(self, name: str) -> None:
        """Forget a tensor, if it is held."""
        self._held.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._held if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._held[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._held[name].dtype

    def block(self, name: str) -> str:
        return ""

    def place(self, name: str) -> tuple[Path, int]:
        return self.path, 0

    def _read(self, out: Tensor, name: str, full: Sequence[int], ranges: Sequence[range]) -> None:
        cuts = tuple(slice(r.start, r.stop) for r in ranges)
        out.copy_(self._held[name].reshape(tuple(full))[cuts])
        self.bytes_read += out.nbytes
