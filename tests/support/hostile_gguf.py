"""GGUF files as an attacker, a broken disk or a bug would write them; see hostile_checkpoints."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_checkpoints import Case, Change, E, H, I, fifo

NAME = "m.gguf"
DOWN = "blk.0.ffn_down_exps.weight"
BIG = (1 << 63, (1 << 64) - 1, 1 << 40, 1 << 33)


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def array(key: str, of: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, of, count) + data


def info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + dims + struct.pack("<IQ", kind, offset)


_FIELDS = {
    "embedding_length": H, "expert_feed_forward_length": I, "expert_count": E,
    "expert_used_count": 1,
}  # fmt: skip
_SHAPES = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
_SIZE = 2 * E * H * I  # fp16


def fields(**changes: int) -> list[bytes]:
    made = [text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe")]
    return made + [u32(f"qwen3moe.{key}", value) for key, value in (_FIELDS | changes).items()]


def infos(**down: Any) -> list[bytes]:
    """Return the infos of three fp16 tensors; ``down`` changes those of the last."""
    made = []
    for index, (role, shape) in enumerate(_SHAPES.items()):
        says = dict(name=f"blk.0.ffn_{role}_exps.weight", shape=shape, kind=1, offset=index * _SIZE)
        made.append(info(**(says | (down if role == "down" else {}))))
    return made


def file(
    kept: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    count: int | None = None,
    field_count: int | None = None,
    data: int = 3 * _SIZE,
    rest: bytes = b"",
) -> bytes:
    """Return a file; its counts are right unless they are given."""
    kept, tensors = fields() if kept is None else kept, infos() if tensors is None else tensors
    counts = (
        len(tensors) if count is None else count,
        len(kept) if field_count is None else field_count,
    )
    made = magic + struct.pack("<IQQ", version, *counts) + b"".join(kept) + b"".join(tensors)
    return made + bytes(-len(made) % 32) + bytes(data) + rest


def write_base(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(file())


def says(data: bytes) -> Change:
    return lambda path: (path / NAME).write_bytes(data)


def truncated(size: int) -> Change:
    return lambda path: os.truncate(path / NAME, size)


def sparse(path: Path) -> None:
    """Write a sparse file of 206 GB, the sizes of which agree with its fields."""
    hidden, inner = 1 << 17, 1 << 18
    size = 2 * E * hidden * inner
    shapes = {"gate": (E, inner, hidden), "up": (E, inner, hidden), "down": (E, hidden, inner)}
    tensors = [
        info(f"blk.0.ffn_{role}_exps.weight", shape, 1, index * size)
        for index, (role, shape) in enumerate(shapes.items())
    ]
    made = file(fields(embedding_length=hidden, expert_feed_forward_length=inner), tensors, data=0)
    (path / NAME).write_bytes(made)
    os.truncate(path / NAME, len(made) + 3 * size)


def _files() -> Iterator[tuple[str, Change, tuple[str, ...]]]:
    for what, data, words in (
        ("empty", b"", ()),
        ("zeros", bytes(4096), ()),
        ("safetensors", struct.pack("<Q", 2) + b"{}" + bytes(99), ()),
        ("git-lfs", b"version https://git-lfs.github.com/spec/v1\n", ("git lfs pull",)),
        ("version 1", file(version=1), ()),
        ("big endian", file(version=3 << 24), ()),
        ("version 99", file(version=99), ()),
    ):
        yield what, says(data), words
    yield "a FIFO", fifo(NAME), ("no regular file",)
    whole = len(file())
    for size in (10, 24, 60, 200, 400, 600, whole - 3 * _SIZE, whole - 1):
        yield f"truncated to {size}", truncated(size), ()
    yield "sparse and large", sparse, ("cannot be read",)


def _headers() -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    for value in BIG:
        yield f"{value} tensors", file(count=value), ()
        yield f"{value} fields", file(field_count=value), ()
        for of in (0, 7, 8, 9, 12):
            yield (
                f"an array of {value} of type {of}",
                file([*fields(), array("x", of, value)]),
                ("",),
            )
        long = struct.pack("<Q", value)
        yield f"a key of {value} bytes", file([*fields(), long]), (str(value),)
        held = text("x") + struct.pack("<I", 8) + long
        yield f"a text of {value} bytes", file([*fields(), held]), ("bytes should be",)
        yield f"a tensor's name of {value}", file(None, [*infos()[:2], long]), (str(value),)
        yield f"offset {value}", file(None, infos(offset=value)), ()
        yield f"{value} experts stored", file(None, infos(shape=(value, H, I))), ()
        yield f"{value} columns", file(None, infos(shape=(E, H, value))), ()
        yield f"{value} blocks", file(None, infos(shape=(E, H, value), kind=12)), ()
    many = b"".join(text("") for _ in range(1000)) * 4500
    yield "too many values", file([*fields(), array("x", 8, 4_500_000, many)]), ("values",)
    deep = array("x", 9, 1) + struct.pack("<IQ", 9, 1) * 100_000
    yield "deep arrays", file([*fields(), deep]), ()
    for kind in (13, 99, (1 << 32) - 1):
        held = text("x") + struct.pack("<I", kind)
        yield f"a field of type {kind}", file([*fields(), held]), ()
        yield f"an array of type {kind}", file([*fields(), array("x", kind, 1)]), ()
    yield "Latin-1", file([*fields(), text(b"\xe9") + struct.pack("<II", 4, 1)]), ("utf-8",)
    yield "a field twice", file([*fields(), fields()[1]]), ()
    for value in (0, 3, 48, 1 << 30):
        changed = [*fields(), u32("general.alignment", value)]
        yield f"alignment {value}", file(changed), ()
    other = text("general.alignment") + struct.pack("<I", 8) + text("32")
    yield "alignment as a text", file([*fields(), other]), ()


def _tensors() -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    def down(**changes: Any) -> bytes:
        return file(None, infos(**changes))

    yield "99 dimensions", down(shape=(1,) * 99), ()
    for kind in (4, 5, 38, 200, (1 << 32) - 1):
        yield f"a tensor of type {kind}", down(kind=kind), ("GGMLQuantizationType",)
    yield "no multiple of a block", down(shape=(E, H, 100), kind=12), ()
    yield "a scalar of blocks", down(shape=(), kind=12), ()
    yield "integers", down(kind=24), ("int8",)
    yield "fp64", down(kind=28, shape=(E, H, I // 4)), (DOWN,)
    yield "blocks of another size", down(kind=8), ("GGUF Q8_0 in ",)
    yield "another shape", down(shape=(E, H, I // 2)), (DOWN,)
    yield "two dimensions", down(shape=(H, I)), (DOWN,)
    yield "no elements", down(shape=(E, H, 0)), (DOWN,)
    yield "a tensor twice", down(name="blk.0.ffn_up_exps.weight"), ()
    yield "no down", down(name="other"), ("no layer has experts",)
    yield "overlapping", down(offset=_SIZE), ("overlaps",)
    yield "an odd offset", down(offset=2 * _SIZE + 2), ()
    yield "unaligned", down(offset=1), ()
    same = [info(f"t{index}", (E, H, I), 1, 0) for index in range(1000)]
    yield "a thousand of the same bytes", file(None, [*infos(), *same]), ("overlaps",)
    huge = infos(name="blk.0.ffn_down.99999999999999999999.weight")
    yield "an expert of many digits", file(None, huge), ("no layer has experts",)
    for value in (float("nan"), float("inf")):
        bits = struct.pack("<e", value)
        yield f"a value {value}", file(data=3 * _SIZE - 2, rest=bits), (DOWN, "not finite")


def _configs() -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    names = {
        "embedding_length": "hidden_size", "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    }  # fmt: skip
    for field, name in names.items():
        for value in (0, 7, (1 << 32) - 1):
            words = (name,) if value != 7 else ()
            if (field, value) != ("expert_used_count", 7):
                yield f"{field} = {value}", file(fields(**{field: value})), words
        kept = [one for one in fields() if field.encode() not in one]
        yield f"no {field}", file(kept), (name,)
        wrong = text(f"qwen3moe.{field}") + struct.pack("<I", 8) + text("128")
        yield f"{field} as a text", file([*kept, wrong]), (name,)
        lists = array(f"qwen3moe.{field}", 4, 3, struct.pack("<3I", 1, 2, 3))
        yield f"{field} as a list", file([*kept, lists]), ()
    yield "no architecture", file(fields()[1:]), ("hidden_size",)
    number = u32("general.architecture", 5)
    yield "the architecture is a number", file([number, *fields()[1:]]), ("model_type",)


def cases() -> list[Case]:
    made: list[Case] = []
    for name, change, words in _files():
        made.append(Case(f"gguf: {name}", "gguf", change, words))
    sources: tuple[Callable[[], Iterator[tuple[str, bytes, tuple[str, ...]]]], ...]
    sources = (_headers, _tensors, _configs)
    for source in sources:
        for name, data, words in source():
            made.append(Case(f"gguf: {name}", "gguf", says(data), words))
    return made
