"""Time tiles of tokens in CUDA C++ (`cuda_tokens.cu`) beside moekit-triton's of Gluon, in turns.

    python benchmarks/device/cuda_tokens.py [qwen3-30b:4096 ...]

moekit does not use this kernel. It has what Triton 3.6 cannot express on Hopper: tokens in steps
of 8 on wgmma's N, up to 288 in a tile, and two clustered programs that share loads of x by
multicast. Still the tensor cores work in the same share of the cycles, at the same clock
(benchmarks/results/2026-11-24-cuda-tokens.md). Whoever tries again can start here.

For every cell: errors against the fp32 oracle, then microseconds of whole blocks, under load and
after pauses. NVRTC compiles the kernels, each in 10 to 20 s. Needs `cuda.bindings`, which torch's
builds for CUDA bring. Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from common import failures, part, say, verdict
from moekit_bench import random_weights, shape
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from moekit_triton import plans
from moekit_triton.calls import Call
from moekit_triton.heuristics import sorted_plan
from moekit_triton.kernels import specialized_tokens
from moekit_triton.kernels.tiles import GemmConfig, token_tile
from moekit_triton.plans import Copied
from moekit_triton.search import Timer
from triton_middle import calls_of, error_of

CELLS = ("qwen3-30b:4096", "dsv3-ep8:1024", "mixtral:1024")
_LIMIT = 8e-3
_STEP, _MOST = 64, 288
_SHARED = 1024 + 4 * (128 + _MOST) * 128 + 4 * 4096 + 512  # stages, parts of results, barriers
_MOST_UNITS = tl.constexpr(64)


def tile_tokens(config: GemmConfig, gated: bool = False) -> int | None:
    """Return the most tokens of a tile: 288 with 128 weight rows, 144 with 256."""
    return 128 * _MOST // (config.block_n * (2 if gated else 1)) if config.token_tile else None


def list_both(aligned: Any, memory: Sequence[torch.Tensor], tokens: Any) -> Any:
    """Fill the lists of tiles as `token_tiles.list_both_token_tiles` does, for this kernel."""
    experts = aligned.ends_L.numel()
    for tiles, most in zip(memory, tokens, strict=True):
        if most is not None:
            bins = max(triton.next_power_of_2(experts), 32)
            _launch_list((1,), aligned.ends_L, tiles, experts, BLOCK_M=aligned.block_m,
                         TOKENS=most, BINS=bins, num_warps=4)  # fmt: skip
    return tuple(memory)


@triton.jit(do_not_specialize=["experts"])
def _list(
    ends_ptr, tiles_ptr, experts, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List (first row, expert * 64 + eights of tokens): an expert's rows, divided evenly."""
    if PDL:
        wait_then_launch_dependents()
    expert_L = tl.arange(0, BINS)
    known_L = expert_L < experts
    end_L = tl.load(ends_ptr + expert_L, mask=known_L, other=0)
    before_L = tl.load(ends_ptr + expert_L - 1, mask=known_L & (expert_L > 0), other=0)
    start_L = tl.cdiv(before_L, BLOCK_M) * BLOCK_M
    count_L = tl.where(known_L, end_L - start_L, 0)
    tiles_L = tl.cdiv(count_L, TOKENS)
    units_L = tl.cdiv(tl.cdiv(count_L, tl.maximum(tiles_L, 1)), 8)
    first_L = tl.cumsum(tiles_L, axis=0) - tiles_L
    tl.store(tiles_ptr, tl.sum(tiles_L, axis=0))
    for i in range(tl.max(tiles_L, axis=0)):
        row_L = i * units_L * 8
        word_L = expert_L * _MOST_UNITS + tl.minimum(units_L, tl.cdiv(count_L - row_L, 8))
        entry_L = tiles_ptr + 1 + 2 * (first_L + i)
        tl.store(entry_L, start_L + row_L, mask=i < tiles_L)
        tl.store(entry_L + 1, word_L, mask=i < tiles_L)


_launch_list = Launcher(_list)


def gemm(g: Any) -> None:
    """Compute what `specialized_tokens.specialized_tokens_gemm` computes, of bf16."""
    from cuda.bindings import driver

    num_experts, w_rows, n, k = g.sizes()
    weights = g.config.block_n * (2 if g.gated else 1)
    x64, x8 = (tensor_map(g.a_SK, (len(g.a_SK), k), (k,), (rows, _STEP)) for rows in (64, 8))
    if g.gated:  # eight rows of gate, eight of up, and so on
        blocks = num_experts * w_rows // 8 - n // 8
        sizes, strides, box = (blocks, 2, 8, k), (8 * k, n * k, k), (weights // 16, 2, 8, _STEP)
        w = tensor_map(g.w_LNK, sizes, strides, box)
    else:
        w = tensor_map(g.w_LNK, (num_experts * w_rows, k), (k,), (weights, _STEP))
    values = [
        *map((ctypes.c_uint64 * 16).from_buffer_copy, (x64, x8, w)),
        *(ctypes.c_void_p(t.data_ptr()) for t in (g.out, g.token_tiles, g.aligned.counters)),
        *map(ctypes.c_int32, (n, k, g.config.group_m)),
    ]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2 * (g.num_sms // 2), 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 384, 1, 1
    config.sharedMemBytes, config.hStream = _SHARED, torch.cuda.current_stream().cuda_stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    kernel = compiled(g.gated, weights // 128)
    checked(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


@functools.cache
def compiled(gated: bool, blocks: int) -> Any:
    """Compile and load a kernel."""
    from cuda.bindings import driver, nvrtc

    wgmmas = "".join(map(_wgmma, range(8, 257, 8)))
    source = Path(__file__).with_suffix(".cu").read_text().replace("// WGMMA\n", wgmmas)
    (program,) = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"cuda_tokens.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-DGATED=%d" % gated,
               b"-DBLOCKS=%d" % blocks]  # fmt: skip
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log := b" " * size)
        raise RuntimeError(log.decode())
    (size,) = checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin := b" " * size))
    (module,) = checked(driver.cuModuleLoadData(cubin))
    (function,) = checked(driver.cuModuleGetFunction(module, b"token_gemm"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, limit, _SHARED))
    return function


def _wgmma(tokens: int) -> str:
    """Return the product of 64 weight rows and ``tokens`` tokens, over 16 columns."""
    count = tokens // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""
template <> struct Wgmma<{tokens}> {{
  static __device__ __forceinline__ void multiply(float* sums, u64 w, u64 x, int accumulate) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{registers}}}, "
        "%{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
        : {sums} : "l"(w), "l"(x), "r"(accumulate));
  }}
}};
"""


def tensor_map(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """Return a CUtensorMap of a bf16 tensor, in rows of 128 swizzled bytes."""
    from cuda.bindings import driver

    (made,) = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(sizes),
            tensor.data_ptr(), [driver.cuuint64_t(size) for size in reversed(sizes)],
            [driver.cuuint64_t(2 * stride) for stride in reversed(strides)],
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return ctypes.string_at(made.getPtr(), 128)


def checked(result: Any) -> tuple[Any, ...]:
    """Return what a call returns beside its status. Raises RuntimeError for an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{status.name} from the CUDA driver or NVRTC")
    return tuple(values)


@contextmanager
def cuda() -> Iterator[None]:
    """Let tiles of tokens run by this kernel."""
    with (
        mock.patch.multiple(plans, tile_tokens=tile_tokens, list_both_token_tiles=list_both),
        mock.patch.object(specialized_tokens, "specialized_tokens_gemm", gemm),
    ):
        yield


def blocks(plan: Copied, calls: Sequence[Call]) -> list[Callable[[], None]]:
    return [lambda call=call: plan.launch(call) for call in calls]  # type: ignore[misc]


def after_pauses(timer: Timer, calls: int) -> list[float]:
    """Return the microseconds of a call right after 30 ms without work: medians of three."""
    took: list[float] = []
    for graph in timer.graphs:
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            time.sleep(0.03)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        took.append(statistics.median(times))
    return took


def cell(name: str, tokens: int) -> None:
    """Check and time a cell."""
    problem = shape(name).problem(device="cuda")
    weights = random_weights(problem, torch.device("cuda"))
    case, want = calls_of(problem, weights, tokens, 3)
    usual = sorted_plan(problem, tokens * problem.top_k / problem.num_experts)
    wanted = {"specialized": Copied(usual.first, usual.second)}
    for rows, group in ((128, 1), (256, 1), (256, 4)):
        plan = Copied(token_tile(rows // 2, group), token_tile(rows, group))
        wanted |= {f"Gluon {rows} g{group}": plan, f"CUDA {rows} g{group}": plan}
    timer, errors = Timer(), []
    for label, plan in wanted.items():
        with cuda() if label.startswith("CUDA") else nullcontext():
            errors.append(error_of(plan, case.calls[0], want))
            timer.add(blocks(plan, case.calls))
    stop = time.monotonic() + 0.5
    while time.monotonic() < stop:
        timer.microseconds(0.0, 1)
    loaded = [us / len(case.calls) for us in timer.microseconds(10e3, 5)]
    paused = after_pauses(timer, len(case.calls))
    for label, error, hot, cold in zip(wanted, errors, loaded, paused, strict=True):
        right = verdict(f"{name} {tokens} {label}", error, _LIMIT)
        say(f"| {name} | {tokens} | {label} | {hot:.1f} | {cold:.1f} | {error:.2e} {right} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", default=CELLS, help="SHAPE:TOKENS")
    args = parser.parse_args()
    torch.manual_seed(0)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    say("\n| shape | T | tiles | us under load | us after a pause | error |")
    say("|---|---|---|---|---|---|")
    for each in args.cells:
        name, tokens = each.rsplit(":", 1)
        with part(each):
            cell(name, int(tokens))
        torch.cuda.empty_cache()
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
