"""Time how fast one rank's experts are loaded, and how fast their files can be read at all.

    python benchmarks/load_checkpoint.py [--gigabytes 2] [--format bf16] [--tp 1] [--ep 1] [--cold]
        [--fresh] [--threads 8] [--repeats 3] [--expert-shape 2048,768] [--directory DIR]

The script writes a synthetic checkpoint (128 experts a layer, sharded, with an index) to
--directory if that holds none, or to a folder that it removes in the end. Then it does three
things in turns, with equally many threads: read all files into memory; read all files into one
small buffer per thread, which leaves out what fresh memory costs; load all layers for one rank,
each into the memory of the one before (--fresh: into new memory). The fractions are the time that
this rank's bytes take at either reader's speed, divided by the loading time; medians. CPU is the
process's, user and system. --cold drops the files from the page cache before each run. The first
round is not counted: it touches memory that a virtual machine may not have had before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

import moekit
from moekit import ParallelConfig
from moekit.checkpoint import Checkpoint, detect, load_layers, problem_from_config
from moekit.checkpoint.load import THREADS

EXPERTS = 128
_BUFFER = 1 << 24


def linear(format: str, n: int, k: int) -> dict[str, Tensor]:
    """Return one Linear's tensors; their values do not matter for the time."""
    if format == "bf16":
        return {"weight": torch.randn(n, k, dtype=torch.bfloat16)}
    if format == "fp8_block":
        scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
        return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    scales = (torch.rand(k // 128, n) + 0.5).half()
    zeros = torch.randint(-(2**31), 2**31 - 1, (k // 128, n // 8)).int()
    shape = (k, n // 8) if format == "awq" else (k // 8, n)
    words = torch.randint(-(2**31), 2**31 - 1, shape).int()
    return {"qweight": words, "scales": scales, "qzeros": zeros}


CONFIGS = {
    "bf16": None,
    "fp8_block": dict(quant_method="fp8", weight_block_size=[128, 128]),
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, sym=False, desc_act=False),
    "awq": dict(quant_method="awq", bits=4, group_size=128, zero_point=True),
}


def write(folder: Path, format: str, nbytes: float, shard: float, H: int, I: int) -> None:
    """Write layers of qwen3_moe experts up to a size, in the order that hubs have."""
    shapes = {"down_proj": (H, I), "gate_proj": (I, H), "up_proj": (I, H)}
    linears = {name: linear(format, *shape) for name, shape in shapes.items()}
    layer_bytes = EXPERTS * sum(t.nbytes for ts in linears.values() for t in ts.values())
    layers = max(1, round(nbytes / layer_bytes))
    shards: list[dict[str, Tensor]] = [{}]
    for layer in range(layers):
        for expert in sorted(range(EXPERTS), key=str):
            for name, tensors in linears.items():
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                if sum(t.nbytes for t in shards[-1].values()) > shard:
                    shards.append({})
                shards[-1] |= {f"{stem}.{suffix}": t.clone() for suffix, t in tensors.items()}
        for index in range(len(shards) - 1):
            _flush(folder, shards, index)
    for index in range(len(shards)):
        _flush(folder, shards, index)
    place = {name: f"{_file(index)}" for index, held in enumerate(shards) for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    config = dict(
        model_type="qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=8, hidden_size=H,
        moe_intermediate_size=I, hidden_act="silu", num_hidden_layers=layers,
    )  # fmt: skip
    if CONFIGS[format]:
        config["quantization_config"] = CONFIGS[format]
    (folder / "config.json").write_text(json.dumps(config))


def save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with nothing but torch."""
    dtypes = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32",
              torch.float16: "F16", torch.int32: "I32"}  # fmt: skip
    header, offset = {}, 0
    for name, t in tensors.items():
        stop = offset + t.nbytes
        header[name] = {
            "dtype": dtypes[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            stream.write(t.view(torch.uint8).numpy())


def _file(index: int) -> str:
    return f"model-{index + 1:05}.safetensors"


def _flush(folder: Path, shards: list[dict[str, Tensor]], index: int) -> None:
    """Write a shard, and keep its names without their data."""
    if all(t.numel() for t in shards[index].values()):
        save(shards[index], folder / _file(index))
        shards[index] = dict.fromkeys(shards[index], torch.empty(0))


def drop_cache(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def into_memory(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        data = torch.empty(file.stat().st_size, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        while done < len(view):
            done += stream.readinto(view[done : done + _BUFFER])


def into_buffer(file: Path) -> None:
    buffer = bytearray(_BUFFER)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def read_all(read: Callable[[Path], None], files: list[Path], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, files))


def seconds(function: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that passed, and the seconds of CPU time."""
    before, start = os.times(), time.perf_counter()
    function()
    wall, after = time.perf_counter() - start, os.times()
    return wall, after.user - before.user + after.system - before.system


def status(field: str) -> float:
    """Return a field of /proc/self/status in GB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e9
    return float("nan")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-gigabytes", type=float, default=1.0)
    parser.add_argument("--format", choices=CONFIGS, default="bf16")
    parser.add_argument("--expert-shape", default="2048,768", help="hidden,intermediate size")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="new memory for every layer")
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args(argv)
    folder = args.directory or Path(tempfile.mkdtemp(prefix="moekit-load-"))
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        H, I = map(int, args.expert_shape.split(","))
        write(folder, args.format, args.gigabytes * 1e9, args.shard_gigabytes * 1e9, H, I)
    try:
        print(measure(folder, args))
    finally:
        if args.directory is None:
            shutil.rmtree(folder)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> str:
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    parallel = ParallelConfig(
        ep_size=args.ep, ep_rank=args.ep - 1, tp_size=args.tp, tp_rank=args.tp - 1, dp_size=1
    )
    found = detect(folder)
    problem = problem_from_config(folder, parallel=parallel, device="cpu")
    threads = args.threads or THREADS
    counted = 0

    def load() -> None:
        nonlocal counted
        with Checkpoint(folder) as checkpoint:
            for _ in load_layers(
                checkpoint,
                found.names,
                found.layers,
                problem,
                reuse=not args.fresh,
            ):
                pass
            counted = checkpoint.bytes_read

    runs = {
        "read into memory": lambda: read_all(into_memory, files, threads),
        "read into a buffer": lambda: read_all(into_buffer, files, threads),
        "load": load,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.repeats + 1):
        for name, run in runs.items():
            if args.cold:
                drop_cache(files)
            times[name].append(seconds(run))
    wall, cpu = (
        {name: statistics.median(t[i] for t in ts[1:]) for name, ts in times.items()}
        for i in (0, 1)
    )
    fractions = [wall[name] * counted / total / wall["load"] for name in list(runs)[:2]]
    lines = [
        f"{found.format}, {len(found.layers)} layers, {total / 1e9:.2f} GB in {len(files)} files, "
        f"{'cold' if args.cold else 'warm'} page cache; torch {torch.__version__}, "
        f"moekit {moekit.__version__}, {os.cpu_count()} cores, {threads} threads",
        f"rank {problem.parallel}: scheme {problem.quant.name}, read {counted / 1e9:.3f} GB = "
        f"{counted * args.ep * args.tp / total:.3f} of its share",
        *(
            f"{name:>18}: {wall[name]:6.2f} s, CPU {cpu[name]:6.2f} s, "
            f"{(counted if name == 'load' else total) / wall[name] / 1e9:6.2f} GB/s"
            f"   ({', '.join(f'{t:.2f}' for t, _ in times[name][1:])})"
            for name in runs
        ),
        f"loading runs at {fractions[0]:.2f} of the speed of reading into memory, "
        f"{fractions[1]:.2f} of reading into a buffer; peak resident {status('VmHWM'):.2f} GB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
