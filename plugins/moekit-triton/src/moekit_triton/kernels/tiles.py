"""Tile and launch parameters of the kernels, as launch plans and tuned tables hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

CHUNK = 128
"""Columns of K that a step of the 4-bit kernel covers."""


class _Tile:
    """JSON form: the fields that differ from their defaults."""

    def to_json(self) -> dict[str, Any]:
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}  # type: ignore[arg-type]
        return {n: value for n, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class GemmConfig(_Tile):
    """Tile and launch parameters of one GEMM.

    Args:
        block_m: rows of a tile.
        block_n: output columns of a tile; with a gated epilogue, twice as many weight rows.
        block_k: columns of K in a step.
        group_m: row blocks that run next to each other per column block, for L2 reuse.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
        tma: weight tiles come through a tensor descriptor.
        persistent: one program per multiprocessor takes tiles by a stride (`sorted_gemm` only).
        splits: programs that share K (4-bit weights and few rows).
        halves: a block whose second half has no rows runs as a half tile.
        wide: two weight tiles side by side share each activation tile, where there is no epilogue.
        specialized: run by specialized warps, where the plan and the device allow it.
        swapped: swap-AB, computing W @ x.T: tiles below 64 rows then run on wgmma, which reads fp8
            directly, while mma.sync converts it to fp16. Specialized: a token tile.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    persistent: bool = False
    splits: int = 1
    halves: bool = False
    wide: bool = False
    specialized: bool = False
    swapped: bool = False

    @property
    def block_size(self) -> tuple[int, int, int]:
        """Return rows, columns and columns of K."""
        return self.block_m, self.block_n, self.block_k

    @property
    def token_tile(self) -> bool:
        """Return whether this is a token tile, a specialized swap-AB tile whose number of tokens
        varies: see `kernels.token_tiles`."""
        return self.specialized and self.swapped

    def unspecialized(self, block_n: int) -> GemmConfig:
        """Return the nearest tile for other kernels; a token tile takes ``block_n`` and group_m 8.

        With a gate (block_n below 256), registers are too few for persistence.
        """
        if not self.specialized:
            return self
        usual = replace(self, block_n=block_n, group_m=8, swapped=False) if self.swapped else self
        wide = usual.block_n == 256
        return replace(usual, specialized=False, persistent=wide, halves=not wide)

    def describe(self) -> str:
        """Return for example ``16x128x128 g4 w4 s3 tma``; `tile_from_text` reads it."""
        flags = ("tma", "persistent", "halves", "wide", "specialized", "swapped")
        words = [f"{self.block_m}x{self.block_n}x{self.block_k}"]
        words += [f"g{self.group_m}"] if self.group_m != 8 else []
        words += [f"w{self.num_warps}", f"s{self.num_stages}"]
        words += [f"k{self.splits}"] if self.splits > 1 else []
        return " ".join(words + [flag for flag in flags if getattr(self, flag)])


def token_tile(block_n: int, group_m: int = 1) -> GemmConfig:
    """Return the token tile with ``block_n`` output columns."""
    return GemmConfig(
        128, block_n, 64, group_m, num_warps=8, num_stages=4, tma=True, specialized=True,
        swapped=True,
    )  # fmt: skip


@dataclass(frozen=True)
class GemvConfig(_Tile):
    """Launch parameters of a dot product kernel.

    Args:
        rows: output columns of a program, each one weight row (two with a gate); a power of two.
        num_warps: warps of a program.
    """

    rows: int
    num_warps: int = 4

    def describe(self) -> str:
        """Return for example ``4 rows w4``."""
        return f"{self.rows} rows w{self.num_warps}"


def gemm_config(values: Mapping[str, Any]) -> GemmConfig:
    """Make a GemmConfig of its JSON form. Raises ValueError for unknown or mistyped values."""
    known = {f.name: int if f.default is MISSING else type(f.default) for f in fields(GemmConfig)}
    for name, value in values.items():
        if name not in known or type(value) is not known[name]:
            raise ValueError(f"unknown or mistyped tile parameter: {name}={value!r}")
    return GemmConfig(**values)


_NUMBERS = {"g": "group_m", "w": "num_warps", "s": "num_stages", "k": "splits"}


def tile_from_text(text: str) -> GemmConfig:
    """Make a GemmConfig of what its `describe` returns. Raises ValueError for other text."""
    size, *words = text.split()
    values: dict[str, Any] = dict(
        zip(("block_m", "block_n", "block_k"), map(_power_of_two, size.split("x")), strict=True)
    )
    for word in words:
        name = _NUMBERS.get(word[:1]) if word[1:].isdecimal() else None
        values[name or word] = int(word[1:]) if name else True
    return gemm_config(values)


def gemv_from_text(text: str) -> GemvConfig:
    """Make a GemvConfig of what its `describe` returns. Raises ValueError for other text."""
    match text.split():
        case [rows, "rows", warps] if warps.startswith("w"):
            return GemvConfig(_power_of_two(rows), _power_of_two(warps[1:]))
    raise ValueError(f"{text.strip()!r} is not a tile such as '4 rows w8'")


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & number - 1:
        raise ValueError(f"{number} is not a power of two")
    return number
