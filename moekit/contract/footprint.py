"""The memory that a dispatcher needs on a rank, known without creating it, and bytes in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moekit.errors import InvalidInput
from moekit.untrusted.code import printable, shown


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory that a dispatcher needs on a rank when every rank passes ``max_num_tokens``.

    rows: as `PrepareAndFinalize.max_rows`.
    buffers: bytes kept between calls, by purpose.
    transient: bytes that a call allocates and frees.
    source: where the formula for the buffers comes from.
    across: what changes when the ranks are on several hosts, one sentence each.
    """

    rows: int
    buffers: Mapping[str, int]
    transient: int
    source: str
    across: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {"rows": self.rows, "transient": self.transient, **dict(self.buffers)}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise InvalidInput(f"{shown(name)} {shown(size)}: expected an int of at least 0")
        object.__setattr__(self, "buffers", {printable(n): b for n, b in self.buffers.items()})
        object.__setattr__(self, "source", printable(self.source))
        object.__setattr__(self, "across", tuple(map(printable, self.across)))

    @property
    def buffer_bytes(self) -> int:
        return sum(self.buffers.values())


def size_text(nbytes: int) -> str:
    """Return ``nbytes`` in B, KiB, MiB or GiB, with three digits or more."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
