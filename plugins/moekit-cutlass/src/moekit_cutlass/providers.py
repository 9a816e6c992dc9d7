"""One interface to the libraries: a grouped GEMM over expert-sorted rows.

quack compiles a kernel (CuTe DSL, in seconds, kept on disk) for each set of dtypes, tile, cluster,
fused activation, gather and w13 layout, but not for sizes: one warm-up call per provider and tile
compiles everything that later calls need. torch's and vLLM's kernels come compiled.
"""

from __future__ import annotations

import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.errors import BackendBroken
from moekit.plugin import MoEProblem

from . import library
from .kernels import Groups, problem_sizes
from .library import FUSED, VLLM, W4A8, providers_for

logger = logging.getLogger("moekit")

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """A quack GEMM config for SM90, with its cluster (M, N).

    dynamic: Programs fetch tiles from a counter. A fused gather excludes this, and needs N = 1.
    """

    m: int = 128
    n: int = 192
    pingpong: bool = True
    cluster: tuple[int, int] = (2, 1)
    swizzle: int = 8
    dynamic: bool = False


@dataclass(frozen=True)
class QuackPlan:
    """quack's tiles; ``gather``: GEMM 1 reads rows through an index instead of sorted copies."""

    gather: bool = True
    first: Tile = Tile()
    second: Tile = Tile()


def quack_plans(problem: MoEProblem) -> tuple[tuple[int, QuackPlan], ...]:
    """Return (rows per expert from which on, plan), as measured on an H200.

    `benchmarks/device/cutlass_tiles.py plans` compares whole blocks. Expert-sorted rows pay where
    GEMM 1 is wide or has few rows: copying is cheap then, and a plain GEMM 1 is 4 to 10 % faster
    than one that gathers, and may fetch its tiles from a counter.
    """
    few = QuackPlan(False, Tile(128, 192, True, (1, 1)), Tile(128, 160, True, (1, 1)))
    if problem.w13_rows < 4096:
        tile = Tile(128, 192, True, (2, 1))
        return (0, few), (512, QuackPlan(True, tile, tile))
    if problem.w13_rows < 16384:
        tile = Tile(128, 192, True, (1, 1), dynamic=True)
        return (0, few), (512, QuackPlan(False, tile, tile))
    some = QuackPlan(False, Tile(128, 256, False, (1, 1)), Tile(128, 160, True, (1, 2)))
    tile = Tile(128, 192, True, (2, 1), dynamic=True)
    return (0, few), (512, some), (2048, QuackPlan(False, tile, tile))


class Scales(NamedTuple):
    """Scales a (S, 1) and w (L, N), fp32, contiguous; table and layout of int4 weights."""

    a: Tensor
    w: Tensor
    table: Tensor | None = None
    layout: Tensor | None = None


class Provider(ABC):
    """A library's grouped GEMM, with results in ``dtype``."""

    name: ClassVar[str]
    gathers = False  # GEMM 1 takes source rows and an index
    allocates = False  # results are the library's tensors, not the caller's
    activates = False  # GEMM 1 applies the activation
    scratch = 0  # other bytes that the library allocates

    def __init__(self, problem: MoEProblem) -> None:
        self.problem, self.dtype = problem, problem.dtype

    @abstractmethod
    def gemm(
        self, x: Tensor, w_LNK: Tensor, groups: Groups, out: Tensor | None, scales: Scales | None,
        *, first: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run a GEMM from x (S, K) to (S, N), whose rows from the last offset on are undefined.

        first: It is GEMM 1: x is (R, H) if it `gathers`, and the result (S, I) if it `activates`.
        out: The result's tensor, unless it `allocates`. scales: For e4m3 operands.
        """


class Torch(Provider):
    """CUTLASS inside torch: `F.grouped_mm` for bf16, `_scaled_grouped_mm` for e4m3 (to bf16)."""

    name = "torch"
    allocates = True
    scratch = 4 << 20

    def __init__(self, problem: MoEProblem) -> None:
        super().__init__(problem)
        self.dtype = torch.bfloat16

    def gemm(
        self, x: Tensor, w_LNK: Tensor, groups: Groups, out: Tensor | None, scales: Scales | None,
        *, first: bool = False,
    ) -> Tensor:  # fmt: skip
        ends_L = groups.offsets_L1[1:]
        if scales is None:
            return F.grouped_mm(x, w_LNK.mT, offs=ends_L)
        return torch._scaled_grouped_mm(
            x, w_LNK.mT, scales.a.view(-1), scales.w, offs=ends_L,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip


class Vllm(Provider):
    """`cutlass_moe_mm` of vLLM's library, and `cutlass_w4a8_moe_mm` for int4 from `w4a8.pack`.

    The operators check only dtypes: a e4m3, b e4m3 or int32 (L, N, K / 8), scales fp32, out bf16
    (or fp16 for e4m3), and expert_offsets int64 with L entries. Problem sizes are int32 (L, 3), and
    (N, M, K) where the kernels use swap-AB: in calls of at most 64 rows, and always for int4.
    Scales of int4 groups are stored (groups, N); their strides are N and 0. The library allocates
    pointers and workspace itself.
    """

    name = "vllm"
    scratch = 2 << 20
    SWAP_ROWS: ClassVar[int] = 64

    def __init__(self, problem: MoEProblem) -> None:
        super().__init__(problem)
        self._w4a8 = problem.quant.name == W4A8
        self._op = vllm_operator("cutlass_w4a8_moe_mm" if self._w4a8 else "cutlass_moe_mm")

    def gemm(
        self, x: Tensor, w_LNK: Tensor, groups: Groups, out: Tensor | None, scales: Scales | None,
        *, first: bool = False,
    ) -> Tensor:  # fmt: skip
        assert out is not None and scales is not None
        (rows, k), (L, n, _), device = x.shape, w_LNK.shape, x.device
        swap = self._w4a8 or rows <= self.SWAP_ROWS
        sizes = problem_sizes(groups, n, k, swap)
        ab, c = _stride(L, k, device), _stride(L, n, device)
        operands = out, x, w_LNK, scales.a, scales.w
        if self._w4a8:
            groups_strides = _stride(L, n, device, 0)
            self._op(
                *operands, scales.table, 128, *sizes, ab, scales.layout, c, groups_strides, None
            )
        else:
            self._op(*operands, *sizes, ab, ab, c, True, True)
        return out


@functools.cache
def _stride(num_experts: int, value: int, device: torch.device, *more: int) -> Tensor:
    """Return strides as int64 (L,), or with ``more`` values (L, 1 + more), kept for graphs.

    The host waits for the copy, so any stream may read them.
    """
    rows = torch.tensor([[value, *more]] * num_experts, dtype=torch.int64, device="cpu")
    return rows.squeeze(1).to(device)


_ARGUMENTS = {
    "cutlass_moe_mm": "out_tensors a_tensors b_tensors a_scales b_scales expert_offsets "
    "problem_sizes a_strides b_strides c_strides per_act_token per_out_ch",
    "cutlass_w4a8_moe_mm": "out_tensors a_tensors b_tensors a_scales b_scales b_group_scales "
    "b_group_size expert_offsets problem_sizes a_strides b_strides c_strides group_scale_strides "
    "maybe_schedule",
    "cutlass_encode_and_reorder_int4b_grouped": "b_tensors",
}


@functools.cache
def vllm_operator(name: str) -> Any:
    """Return an operator of vLLM's library; the first call loads it, or raises BackendBroken."""
    return VLLM.operator(f"_C::{name}", _ARGUMENTS[name])


class Quack(Provider):
    """quack-kernels: variable-M GEMM over int32 offsets, gather and activation fused into GEMM 1.

    w13 keeps gate and up in halves; the library interleaves them through its tensor map.
    """

    name = "quack"

    def __init__(self, problem: MoEProblem, plan: QuackPlan | None = None) -> None:
        super().__init__(problem)
        self.plan = plan or QuackPlan()
        assert not (self.plan.gather and self.plan.first.dynamic), "no gather with fetched tiles"
        self.gathers = self.plan.gather
        activation = problem.activation
        fusable = activation.limit is None and not problem.has_bias
        self._activation = FUSED.get(activation.name) if fusable else None
        self.activates = self._activation is not None
        self._gemm = quack_entry("quack.gemm_interface", "gemm_act")
        if self.plan.first.dynamic or self.plan.second.dynamic:
            self.scratch = 2 * _LEAST_ALLOCATION  # the counters

    def gemm(
        self, x: Tensor, w_LNK: Tensor, groups: Groups, out: Tensor | None, scales: Scales | None,
        *, first: bool = False,
    ) -> Tensor:  # fmt: skip
        assert out is not None
        tile, activation = self.plan.second, None
        if first:
            tile, activation = self.plan.first, self._activation
        rows_S = groups.rows_S if first and self.gathers else None
        halves = ("B",) if activation is not None and self.problem.activation.gated else None
        call = functools.partial(
            self._gemm,
            x, w_LNK.mT, activation=activation, store_preact=False, postact_out=out,
            cu_seqlens_m=groups.offsets_L1, A_idx=rows_S, tuned=False,
            config=quack_config(tile), concat_layout=halves,
        )  # fmt: skip
        run_compiled((x.dtype, tile, activation, rows_S is None, halves), call)
        return out


_compiled: set[object] = set()
_compiling = threading.Lock()  # one thread at a time compiles a kernel at its first use


def run_compiled(key: tuple[object, ...], call: Callable[[], T]) -> T:
    """Call one of quack's entry points. ``key`` names the kernel that it compiles if need be."""
    with nullcontext() if key in _compiled else _compiling:
        if key not in _compiled:
            logger.info("moekit-cutlass: compiling quack for %s", " ".join(map(str, key)))
        result = call()
        _compiled.add(key)
    return result


_LEAST_ALLOCATION = 512  # the granularity of torch's allocator, in bytes


_CONFIG = (
    "tile_m tile_n pingpong cluster_m cluster_n max_swizzle_size is_dynamic_persistent "
    "device_capacity"
)
_LISTS = "activation cu_seqlens_m A_idx tuned config"
_QUACK = {
    "GemmConfig": f"0 {_CONFIG}",
    "gemm_act": f"2 {_LISTS} store_preact preact_out postact_out concat_layout",
    "gemm_dact": f"3 {_LISTS} dx_out postact_out colvec_scale colvec_reduce dynamic_scheduler",
    "gemm": "9 pingpong is_dynamic_persistent max_swizzle_size add_to_output concat_layout "
    "cu_seqlens_m cu_seqlens_k A_idx",
}


@functools.cache
def quack_entry(module: str, name: str) -> Any:
    """Return a function of quack, or raise BackendBroken."""
    return getattr(library.QUACK[0].load(module, {name: _QUACK[name]}), name)


@functools.cache
def quack_config(tile: Tile) -> Any:
    """Return one object per tile, as quack caches by identity."""
    return quack_entry("quack.gemm_config", "GemmConfig")(
        tile_m=tile.m, tile_n=tile.n, pingpong=tile.pingpong,
        cluster_m=tile.cluster[0], cluster_n=tile.cluster[1], max_swizzle_size=tile.swizzle,
        is_dynamic_persistent=tile.dynamic, device_capacity=9,
    )  # fmt: skip


_CLASSES: Mapping[str, type[Provider]] = {c.name: c for c in (Quack, Torch, Vllm)}


class Band(NamedTuple):
    """A provider, and the expected rows per expert, ``low <= rows < high``, that it serves."""

    low: int
    high: float
    provider: Provider


def bands(problem: MoEProblem) -> tuple[Band, ...]:
    """Return the preferred providers by size, of the libraries that are usable here."""
    scheme = problem.quant.name
    usable, why_not = providers_for(problem)
    if not usable:
        raise BackendBroken(f"no library for {scheme}: {'; '.join(why_not)}")
    found = []
    for low, high, order in _between(library.PREFERRED[scheme]):
        name = next(name for name in order if name in usable)
        if name != Quack.name:
            found.append(Band(low, high, _CLASSES[name](problem)))
            continue
        for start, end, plan in _between(quack_plans(problem)):
            if start < high and low < end:
                found.append(Band(max(low, start), min(high, end), Quack(problem, plan)))
    return tuple(found)


def _between(table: Sequence[tuple[int, T]]) -> Iterator[tuple[int, float, T]]:
    """Yield (low, high, value) for each row of a table of (low, value), with low <= x < high."""
    ends = [*(low for low, _ in table[1:]), float("inf")]
    for (low, what), end in zip(table, ends, strict=True):
        yield low, end, what
