"""Tiles: the launch parameters of a GEMM, one type for each kernel, and their text.

    16x128x128 g4 w4 s3 tma       GemmTile
    128x256x64 w8 s4 persistent   SortedTile
    specialized g4 halves         SpecializedTile
    tokens 256                    TokenTile
    4 rows w8                     DotTile

gN are row blocks that run next to each other per column block, for L2 reuse; wN are the warps of a
program, sN the stages of its software pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

CHUNK = 128
"""Columns of K that a step of the 4-bit kernel covers."""

_LETTERS = {"group_m": "g", "num_warps": "w", "num_stages": "s"}
_NAMES = {letter: name for name, letter in _LETTERS.items()}


class _Tile:
    head: ClassVar[str]  # how the text begins: a pattern of the first fields

    def describe(self) -> str:
        """Return the text that `tile_from_text` reads."""
        text = self.head.replace(r"(\d+)", "{}")
        words = [text.format(*(getattr(self, f.name) for f in fields(self)))]  # type: ignore[arg-type]
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is True:
                words.append(f.name)
            elif f.name in _LETTERS and (f.name != "group_m" or value != f.default):
                words.append(f"{_LETTERS[f.name]}{value}")
        return " ".join(words)


@dataclass(frozen=True)
class GemmTile(_Tile):
    """A tile of `gemm`: block_m rows by block_n output columns, in steps of block_k columns of K.

    A gated epilogue needs twice as many weight rows as output columns.

    Args:
        tma: weights come through a tensor descriptor.
        halves: a block whose second half has no rows runs as a half tile.
        wide: two weight tiles side by side share each activation tile, where there is no epilogue.
        swapped: swap-AB, computing W @ x.T: tiles below 64 rows then run on wgmma, which reads fp8
            directly, while mma.sync converts it to fp16.
    """

    head = r"(\d+)x(\d+)x(\d+)"
    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    halves: bool = False
    wide: bool = False
    swapped: bool = False


@dataclass(frozen=True)
class SortedTile(_Tile):
    """A tile of `sorted_gemm`; sizes and halves as in `GemmTile`.

    persistent: one program per multiprocessor takes tiles by a stride.
    """

    head = GemmTile.head
    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4
    persistent: bool = False
    halves: bool = False


@dataclass(frozen=True)
class SpecializedTile(_Tile):
    """A tile of `specialized` and `specialized_fp8`: 128 rows by 256 weight rows."""

    head = "specialized"
    block_m: ClassVar[int] = 128
    block_n: ClassVar[int] = 256
    group_m: int = 8
    halves: bool = False


@dataclass(frozen=True)
class TokenTile(_Tile):
    """A tile of `specialized_tokens`: 128 or 256 weight rows by as many tokens as there are."""

    head = r"tokens (\d+)"
    block_m: ClassVar[int] = 128
    weights: int
    group_m: int = 1

    def __post_init__(self) -> None:
        if self.weights not in (128, 256):
            raise ValueError(f"token tiles have 128 or 256 weight rows, not {self.weights}")

    @property
    def tokens(self) -> int:
        """Return the rows of a full tile."""
        return 128 * 256 // self.weights


@dataclass(frozen=True)
class DotTile(_Tile):
    """A program of dot products: output columns, each one weight row, or two with a gate."""

    head = r"(\d+) rows"
    rows: int
    num_warps: int = 4


OrderedTile = SortedTile | SpecializedTile | TokenTile
"""The tiles for expert-sorted rows."""
Tile = GemmTile | OrderedTile | DotTile


def tile_from_text(text: str, kinds: Sequence[type[Tile]]) -> Tile:
    """Make a tile of one of ``kinds`` from what its `describe` returns.

    Raises ValueError for other text.
    """
    for kind in kinds:
        if match := re.match(rf"\s*{kind.head}(\s|$)", text):
            sizes = [_power_of_two(size) for size in match.groups()[:-1]]
            known, values = {f.name: type(f.default) for f in fields(kind)}, dict[str, Any]()
            for word in text[match.end() :].split():
                name = _NAMES.get(word[0]) if word[1:].isdecimal() else None
                value: int | bool = int(word[1:]) if name else True
                if known.get(name or word) is not type(value):
                    raise ValueError(f"unknown word {word!r} in {text.strip()!r}")
                values[name or word] = value
            make: Any = kind
            tile: Tile = make(*sizes, **values)
            return tile
    made: list[Any] = [*kinds]
    examples = (kind(*[128] * kind.head.count("(")).describe() for kind in made)
    words = " or ".join(map(repr, examples))
    raise ValueError(f"{text.strip()!r} is not a tile such as {words}")


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & number - 1:
        raise ValueError(f"{number} is not a power of two")
    return number
