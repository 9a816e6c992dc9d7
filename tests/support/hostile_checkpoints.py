"""Checkpoints as an attacker, a broken disk or a bug would write them.

`cases` changes small valid checkpoints of the formats in use systematically. Each case is a folder
with one fault, and the words that the error must contain in addition to the file's name.
As a program, this loads some of them one after the other, with limits of memory and time:

    python tests/support/hostile_checkpoints.py FOLDER FIRST   # from case FIRST on, JSON lines
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_files as files
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LIMIT_SECONDS = 60  # ends a case that hangs, also on a slow machine
LIMIT_BYTES = 4 << 30  # address space beyond what the interpreter and torch take
E, H, I = 2, 128, 128
STEM = "model.layers.0.mlp.experts"
DOWN = f"{STEM}.0.down_proj"

Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """words: Parts of the message."""

    name: str
    base: str
    change: Change
    words: tuple[str, ...]


# -- valid checkpoints -------------------------------------------------------------------------


def _linear_groups(**weights: Any) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=weights, input_activations=None)
    return dict(quant_method="compressed-tensors", config_groups=dict(group_0=group))


_FP8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
_GPTQ = dict(quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=True)
_AWQ = dict(quant_method="awq", bits=4, group_size=32, version="gemm")
_CT = _linear_groups(num_bits=4, type="int", strategy="group", group_size=32)
_PACKED: dict[str, tuple[files.Packer, dict[str, Any] | None]] = {
    "bf16": (files.bf16, None),
    "fp8": (files.fp8(128, 128, "weight_scale_inv"), _FP8),
    "fp8_static": (
        files.fp8(-1, -1, static=True), dict(quant_method="fp8", activation_scheme="static")
    ),
    "gptq": (files.gptq(32, zero_points=True, act_order=True), _GPTQ),
    "awq": (files.awq(32), _AWQ),
    "ct": (files.pack_quantized(32), _CT),
    "modelopt": (files.nvfp4(modelopt=True), dict(quant_method="modelopt", quant_algo="NVFP4")),
}  # fmt: skip
BASES = (*_PACKED, "gpt_oss", "gguf")


def write_bases(folder: Path) -> None:
    """Write valid checkpoints, each in its folder, in one shard with an index."""
    torch.manual_seed(0)
    for name, (packer, config) in _PACKED.items():
        files.write(folder / name, packer, config, E=E, H=H, I=I, shards=1)
    stem, tensors = "model.layers.0.mlp.experts", {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        made = [files.mxfp4(("blocks", "scales"))(files.matrix(n, k))[0] for _ in range(E)]
        for suffix in made[0]:
            tensors[f"{stem}.{name}_{suffix}"] = torch.stack([one[suffix] for one in made])
        tensors[f"{stem}.{name}_bias"] = torch.randn(E, n).bfloat16()
    said = dict(
        model_type="gpt_oss", hidden_size=H, intermediate_size=I, num_local_experts=E,
        num_experts_per_tok=1, num_hidden_layers=1, swiglu_limit=7.0,
        quantization_config=dict(quant_method="mxfp4"),
    )  # fmt: skip
    files.save(folder / "gpt_oss", tensors, said)
    hostile_gguf().write_base(folder / "gguf")


def hostile_gguf() -> Any:
    import hostile_gguf  # which imports this module

    return hostile_gguf


# -- changes -----------------------------------------------------------------------------------


def shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def text(name: str, data: str | bytes) -> Change:
    raw = data if isinstance(data, bytes) else data.encode()
    return lambda path: (path / name).write_bytes(raw)


def fifo(name: str) -> Change:
    def change(path: Path) -> None:
        file = shard(path) if name == "shard" else path / name
        file.unlink(missing_ok=True)
        os.mkfifo(file)

    return change


def field(where: str, value: Any) -> Change:
    """Set a field of config.json; ``where`` is its path with dots."""

    def change(path: Path) -> None:
        file = path / "config.json"
        config = at = json.loads(file.read_text())
        *outer, last = where.split(".")
        for name in outer:
            at = at[name]
        at[last] = value
        file.write_text(json.dumps(config))

    return change


def header(change_header: Callable[[dict[str, Any]], Any]) -> Change:

    def change(path: Path) -> None:
        data = shard(path).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        made = json.loads(data[8 : 8 + length])
        change_header(made)
        raw = json.dumps(made).encode()
        shard(path).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])

    return change


def raw_header(raw: bytes, length: int | None = None) -> Change:
    said = len(raw) if length is None else length
    return lambda path: shard(path).write_bytes(struct.pack("<Q", said) + raw)


def zeros(length: int) -> Change:
    """Write a header of zeros that takes no space on disk."""

    def change(path: Path) -> None:
        shard(path).write_bytes(struct.pack("<Q", length))
        os.truncate(shard(path), length + 8)

    return change


def tensor(name: str, value: Callable[[Tensor], Tensor | None]) -> Change:
    def change(path: Path) -> None:
        tensors = load_file(shard(path))
        made = value(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous()
        save_file(tensors, shard(path))

    return change


def put(index: int, value: float) -> Callable[[Tensor], Tensor]:
    """Set one element by its flat index, as bytes for 8-bit floats."""

    def change(t: Tensor) -> Tensor:
        made = t.clone()
        flat = made.view(torch.uint8) if t.dtype == files.FP8 else made
        flat.view(-1)[index] = value
        return made

    return change


def entry(key: str, value: Any) -> Change:
    def change(made: dict[str, Any]) -> None:
        made[f"{DOWN}.weight"][key] = value

    return header(change)


def same_bytes(made: dict[str, Any]) -> None:
    """Add a thousand tensors that all share the largest one's bytes."""
    for index in range(1000):
        made[f"{STEM}.{index + 2}.down_proj.weight"] = made[f"{DOWN}.weight"]


def sparse(path: Path) -> None:
    """Write a sparse file of 103 GB whose sizes agree with the config."""
    hidden, inner, header, end = 1 << 17, 1 << 16, {}, 0
    shapes = {
        "gate_proj": [inner, hidden],
        "up_proj": [inner, hidden],
        "down_proj": [hidden, inner],
    }
    for expert in range(E):
        for name, shape in shapes.items():
            begin, end = end, end + 2 * inner * hidden
            header[f"{STEM}.{expert}.{name}.weight"] = dict(
                dtype="BF16", shape=shape, data_offsets=[begin, end]
            )
    raw = json.dumps(header).encode()
    shard(path).write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(shard(path), 8 + len(raw) + end)
    field("hidden_size", hidden)(path)
    field("moe_intermediate_size", inner)(path)


def without_config(then: Change) -> Change:
    def change(path: Path) -> None:
        (path / "config.json").unlink()
        then(path / "config.json")

    return change


def index(value: Any) -> Change:
    return text("model.safetensors.index.json", json.dumps({"weight_map": value}))


# -- the cases ---------------------------------------------------------------------------------

_DEEP = "[" * 100_000
_BAD_JSON: dict[str, str | bytes] = {
    "empty": "",
    "half": '{"hidden_size": 1',
    "deep lists": _DEEP,
    "deep objects": '{"a":' * 100_000,
    "deep and closed": _DEEP + "]" * 100_000,
    "NaN": '{"hidden_size": NaN}',
    "Infinity": '{"hidden_size": Infinity}',
    "-Infinity": '{"hidden_size": -Infinity}',
    "1e999": '{"hidden_size": 1e999}',
    "duplicate": '{"hidden_size": 1, "hidden_size": 2}',
    "a million digits": '{"hidden_size": ' + "9" * 1_000_000 + "}",
    "a NUL": '{"hidden_size\0": 1}',
    "NULs": bytes(1000),
    "Latin-1": b'{"model_type": "\xe9"}',
    "UTF-16": '{"hidden_size": 1}'.encode("utf-16"),
    "a list": "[1, 2]",
    "a number": "5",
    "null": "null",
}
_INTEGERS = ("128", [[1]], True, 1.5, -1, 10**12)
_NO_TEXTS = (5, [], {}, True, "x" * 5000)
_NO_FLAGS = ("yes", 1, [], {})
_GROUPS = (0, "abc", -5, 1.5, [32], 10**30)
_OF_CONFIG: dict[str, dict[str, tuple[Any, ...]]] = {
    "bf16": {
        **dict.fromkeys(
            ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
            (*_INTEGERS, 10**9),
        ),
        "num_hidden_layers": ("x", [3], -1, 10**12),
        **dict.fromkeys(("model_type", "hidden_act", "dtype"), _NO_TEXTS),
        "text_config": (5, [], "x"),
        "swiglu_limit": ("x", -1, {}, True),
        "quantization_config": (5, [], "fp8", True),
    },
    "fp8": {
        "quantization_config.weight_block_size": (
            "128x128", {}, 5, [128], [0, 128], [128, 128, 128], ["a", 1], [1e3, 1], [-1, 128],
            [None, 1],
        ),
        "quantization_config.activation_scheme": (5, []),
        "quantization_config.quant_method": _NO_TEXTS,
    },
    "gptq": {
        "quantization_config.group_size": _GROUPS,
        "quantization_config.sym": _NO_FLAGS,
        "quantization_config.desc_act": _NO_FLAGS,
        "quantization_config.static_groups": _NO_FLAGS,
        "quantization_config.checkpoint_format": (7, [], "marlin"),
    },
    "awq": {
        "quantization_config.group_size": _GROUPS,
        "quantization_config.version": (5, ["gemm"], "gemv"),
    },
    "ct": {
        "quantization_config.config_groups": (5, [], "x", {"g": 5}, {"g": {"targets": 5}}),
        "quantization_config.config_groups.group_0.targets": (5, "Linear", [5], [["Linear"]], {}),
        "quantization_config.config_groups.group_0.weights": (5, [], "int4"),
        "quantization_config.config_groups.group_0.weights.group_size": _GROUPS,
        "quantization_config.config_groups.group_0.weights.strategy": (5, []),
        "quantization_config.config_groups.group_0.weights.num_bits": ("4", 0, 4.0, []),
        "quantization_config.config_groups.group_0.weights.block_structure": (5, {}, [1]),
        "quantization_config.config_groups.group_0.input_activations": (
            5, [], {"num_bits": "8"}, {"dynamic": 3}, {"type": 8}, {"strategy": {}},
            {"group_size": 0},
        ),
    },
    "modelopt": {"quantization_config.quant_algo": (5, {}, [])},
    "gpt_oss": {"swiglu_limit": ("7", -1, ["7"], True), "swiglu_alpha": ("x", {}, -1)},
}  # fmt: skip
_NO_EXPRESSION = "is no regular expression"
_PATTERNS = {
    **dict.fromkeys(("(", "[", "*", "a{9999}{9999}", "a{99999999999}"), _NO_EXPRESSION),
    "x" * 1001: "a text of at most 1000",
}


def _configs() -> Iterator[Case]:
    for name, data in _BAD_JSON.items():
        yield Case(f"config: {name}", "bf16", text("config.json", data), ("config.json",))
    for base, of in _OF_CONFIG.items():
        for where, values in of.items():
            # The message names the field, or the wrong one inside it.
            last = where.rpartition(".")[2]
            for value in values:
                name = f"{base}: {where} = {json.dumps(value)[:40]}"
                yield Case(name, base, field(where, value), (last,))
    for pattern, said in _PATTERNS.items():
        where = "quantization_config.config_groups.group_0.targets"
        change = field(where, [f"re:{pattern}"])
        yield Case(f"targets = {pattern[:40]}", "ct", change, (said,))
    large = text("config.json", " " * (17 << 20) + "{}")
    yield Case("config: 17 MB", "bf16", large, ("config.json", "more than"))
    yield Case("config: a FIFO", "bf16", fifo("config.json"), ("config.json", "no regular file"))
    instead: dict[str, Change] = {
        "missing": lambda file: None,
        "a folder": Path.mkdir,
        "a link to itself": lambda file: file.symlink_to(file.name),
    }
    for what, make in instead.items():
        change = without_config(make)
        yield Case(f"config: {what}", "bf16", change, ("config.json",))

    def of_modelopt(change: Change) -> Change:
        return lambda path: (field("quantization_config", None)(path), change(path))

    name = "hf_quant_config.json"
    yield Case("hf_quant_config: a FIFO", "modelopt", of_modelopt(fifo(name)), (name,))
    for data in ('{"quantization": 5}', '{"quantization": {"quant_algo": 5}}', _DEEP, "[]"):
        change = of_modelopt(text(name, data))
        yield Case(f"hf_quant_config: {data[:40]}", "modelopt", change, (name,))


def _indexes() -> Iterator[Case]:
    name = "model.safetensors.index.json"
    for what, data in _BAD_JSON.items():
        yield Case(f"index: {what}", "bf16", text(name, data), (name,))
    for value in (5, [], None, {"a": 5}, {"a": None}, {"a": ["x"]}, {"a": ""}, {"a": {}}):
        words = (name, "weight_map")
        yield Case(f"index: weight_map = {value}", "bf16", index(value), words)
    for file in (
        "../bf16/model-00001-of-00001.safetensors", "/etc/passwd", "a/../../x.safetensors",
        "..", "C:\\x.safetensors", "..\\x.safetensors", "\\\\host\\x", "a\0b", "x" * 5000,
    ):  # fmt: skip
        yield Case(f"index: {file[:40]!r}", "bf16", index({"a": file}), (name, "weight_map"))
    yield Case("index: a missing file", "bf16", index({"a": "x.safetensors"}), ("x.safetensors",))
    yield Case("index: a folder", "bf16", index({"a": "."}), ("weight_map",))
    yield Case("index: a FIFO", "bf16", fifo(name), (name, "no regular file"))
    many = index({str(i): f"{i}.safetensors" for i in range(5000)})
    yield Case("index: 5000 missing files", "bf16", many, ("more",))


def _headers() -> Iterator[Case]:
    weight = f"{DOWN}.weight"
    yield Case("shard: a FIFO", "bf16", fifo("shard"), ("no regular file",))
    yield Case("shard: empty", "bf16", lambda path: shard(path).write_bytes(b""), ())
    yield Case("shard: 103 GB of nothing", "bf16", sparse, ("cannot be read",))
    yield Case("header: no JSON", "bf16", raw_header(b"{"), ())
    for length in (2**64 - 1, 2**63, 2**40, 10**9):
        yield Case(f"header: {length} bytes", "bf16", raw_header(b"{}", length), ("header",))
    yield Case("header: 1 GiB of zeros", "bf16", zeros(1 << 30), ("header",))
    # The library checks these.
    for key, value in (("dtype", "F4"), ("shape", [2**62, 4]), ("data_offsets", [0, 10**30])):
        yield Case(f"header: {key} = {value}", "bf16", entry(key, value), ())
    yield Case("header: overlaps", "bf16", header(same_bytes), ("offset",))
    long = header(lambda made: made.update({"n" * 100_000: made.pop(weight)}))
    yield Case("header: a long name", "bf16", long, ("is missing",))
    yield Case(
        "shard: truncated", "bf16",
        lambda path: os.truncate(shard(path), shard(path).stat().st_size - 10), ("not fully",),
    )  # fmt: skip
    yield Case(
        "shard: git-lfs", "bf16",
        lambda path: shard(path).write_text("version https://git-lfs.github.com/spec/v1\n"),
        ("git lfs pull",),
    )  # fmt: skip


# The parts of a matrix in each format, and of gpt-oss, with all experts in one tensor.
_ROLES = {
    "bf16": (f"{DOWN}.weight",),
    "fp8": (f"{DOWN}.weight", f"{DOWN}.weight_scale_inv"),
    "fp8_static": (f"{DOWN}.weight", f"{DOWN}.weight_scale", f"{DOWN}.input_scale"),
    "gptq": tuple(f"{DOWN}.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx")),
    "awq": tuple(f"{DOWN}.{suffix}" for suffix in ("qweight", "qzeros", "scales")),
    "ct": tuple(f"{DOWN}.weight_{suffix}" for suffix in ("packed", "scale")),
    "modelopt": tuple(f"{DOWN}.weight{suffix}" for suffix in ("", "_scale", "_scale_2")),
    "gpt_oss": tuple(f"{STEM}.down_proj_{suffix}" for suffix in ("blocks", "scales", "bias")),
}  # fmt: skip
_RESHAPED: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda t: None,
    "longer": lambda t: t.repeat(3, *[1] * (t.dim() - 1)) if t.dim() else t.expand(3),
    "with 9 dims": lambda t: t.reshape(1, -1, *[1] * 7).expand(-1, -1, 2, *[-1] * 6),
    "of other integers": lambda t: torch.zeros(
        t.shape, dtype=torch.int8 if t.dtype == torch.int64 else torch.int64
    ),
}  # fmt: skip
_NAN, _INF = float("nan"), float("inf")


def _tensors() -> Iterator[Case]:
    for base, names in _ROLES.items():
        for name in names:
            stem = name.rpartition(".")[0] if base != "gpt_oss" else f"{STEM}.down_proj"
            for what, how in _RESHAPED.items():
                # The part that is examined first decides the form of all others, and the bias of
                # down whether there are biases.
                decides = (base, what) == ("fp8_static", "with 9 dims")
                decides = decides or (name.endswith("bias") and what == "missing")
                words = (STEM if decides else stem,)
                yield Case(f"{base}: {name} is {what}", base, tensor(name, how), words)
    nans = {"bf16": (_NAN, _INF, -_INF), "fp8": (0x7F, 0xFF)}
    for base, at, value in [(b, at, v) for b in nans for at in (0, 5000, -1) for v in nans[b]]:
        change = tensor(f"{DOWN}.weight", put(at, value))
        yield Case(f"{base}: weight[{at}] = {value}", base, change, (f"{DOWN}.weight",))
    scales = {
        "fp8": "weight_scale_inv", "fp8_static": "weight_scale", "gptq": "scales", "awq": "scales",
        "ct": "weight_scale", "modelopt": "weight_scale_2",
    }  # fmt: skip
    for base, suffix in scales.items():
        name = f"{DOWN}.{suffix}"
        for value in (_NAN, _INF, -_INF):
            change = tensor(name, put(0, value))
            yield Case(f"{base}: {suffix} = {value}", base, change, (DOWN,))
    for value in (_NAN, _INF, -1.0, 0.0):
        change = tensor(f"{DOWN}.input_scale", put(0, value))
        yield Case(f"fp8_static: input_scale = {value}", "fp8_static", change, ("input_scale",))
    change = tensor(f"{DOWN}.weight_scale", put(0, 0x7F))
    yield Case("modelopt: weight_scale = NaN", "modelopt", change, (f"{DOWN}.weight_scale",))
    change = tensor(f"{STEM}.down_proj_scales", put(0, 255))
    yield Case("gpt_oss: scales = NaN", "gpt_oss", change, ("down_proj_scales",))
    for name, said in (("down_proj_bias", "w2_bias"), ("gate_up_proj_bias", "w13_bias")):
        change = tensor(f"{STEM}.{name}", put(0, _NAN))
        yield Case(f"gpt_oss: {name} = NaN", "gpt_oss", change, (said,))
    for at, value in ((0, -1), (0, 2**31 - 1), (5, 77)):
        change = tensor(f"{DOWN}.g_idx", put(at, value))
        yield Case(f"gptq: g_idx[{at}] = {value}", "gptq", change, (f"{DOWN}.g_idx",))


def cases() -> list[Case]:
    return [
        *_configs(), *_indexes(), *_headers(), *_tensors(), *hostile_gguf().cases()
    ]  # fmt: skip


# -- running them ------------------------------------------------------------------------------


def load(path: Path) -> None:
    from moekit.checkpoint import load_experts, problem_from_config

    load_experts(path, None, 0, problem_from_config(path, device="cpu"))


def run(case: Case, bases: Path, folder: Path) -> str:
    """Return what is wrong with moekit's error for the case; "" if nothing is."""
    from moekit.errors import MoekitError

    shutil.copytree(bases / case.base, folder)
    case.change(folder)
    try:
        load(folder)
    except MoekitError as error:
        said = str(error)
        missing = [word for word in (str(folder), *case.words) if word not in said]
        if len(said) > 20_000:
            return f"the message has {len(said)} characters"
        return f"{missing} not in: {said}" if missing else ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "no error"


def mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main(folder: Path, first: int) -> None:
    load(folder / "bases" / "bf16")  # so that modules and threads are mapped
    limit = mapped() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number, case in enumerate(cases()[first:], first):
        print(json.dumps(dict(started=number)), flush=True)
        signal.alarm(LIMIT_SECONDS)  # ends the process, even inside C code
        began = time.monotonic()
        wrong = run(case, folder / "bases", folder / "case")
        signal.alarm(0)
        seconds = time.monotonic() - began
        print(json.dumps(dict(case=case.name, wrong=wrong, seconds=seconds)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
