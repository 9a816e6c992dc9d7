"""Tell what a scheme and a device allow: operand widths, tensor descriptors, specialized warps."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence

import torch
import triton
from moekit_kernels.numerics import INTERPRETED

from moekit.plugin import MoEProblem, switch

from . import GLUON_VARIABLE

logger = logging.getLogger("moekit")

BLOCKS_M = (8, 16, 32, 64, 128)
"""Rows of a tile; 8 only for 4-bit weights."""
PACKED_BLOCK_M = 64
"""Most rows of a tile with 4-bit weights: group sums take as many registers again."""
HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that one program may use on Hopper."""
HOPPER_SMS = 132
"""Multiprocessors of an H100 SXM and an H200, assumed for a device that is not here."""
# Shared memory where it is less than Hopper's.
_SHARED = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}  # fmt: skip
_RAN = ("3.6", "3.8", "3.9")
_COMPILING = (*_RAN, "3.7")
GLUON_VERSIONS: Sequence[str] = _RAN if switch(GLUON_VARIABLE, True) else ()
if switch(GLUON_VARIABLE, False):
    GLUON_VERSIONS = _COMPILING
"""Versions of triton with which specialized warps, in Gluon, are used: those that ran on a GPU;
with MOEKIT_TRITON_GLUON=1 also those that compile them, with 0 none."""


def operand_bits(problem: MoEProblem) -> tuple[int, int]:
    """Return the stored bits of an activation and of a weight."""
    scheme, bits = problem.quant, 8 * problem.dtype.itemsize
    activation = bits if scheme.activation is None else 8 * scheme.activation.torch_dtype.itemsize
    weight = bits if scheme.weight is None else 8 * scheme.weight.torch_dtype.itemsize
    if scheme.weight is not None and scheme.weight.packed:
        weight = 4
    return activation, weight


def hopper(problem: MoEProblem) -> bool:
    """Return whether the device has compute capability 9.0; an unknown device counts as one."""
    return (problem.device.capability or (9, 0)) == (9, 0)


def streams_slowly(problem: MoEProblem) -> bool:
    """Return whether the device is an H100 or H800. They read 3.1 TB/s where an H200 reads 4.5, so
    weights bound the time up to more rows per expert."""
    return hopper(problem) and re.search(r"\bH[18]00\b", problem.device.name) is not None


def shared_memory(problem: MoEProblem) -> int:
    """Return the bytes of shared memory that one program may use."""
    return _SHARED.get(problem.device.capability or (9, 0), HOPPER_SHARED)


def num_sms(problem: MoEProblem) -> int:
    """Return the multiprocessors of the problem's device if it is here, else `HOPPER_SMS`."""
    return _num_sms(problem.device.name) if problem.device.type == "cuda" else HOPPER_SMS


@functools.cache
def _num_sms(name: str) -> int:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found = (torch.cuda.get_device_properties(i) for i in devices)
    return next((p.multi_processor_count for p in found if name in ("", p.name)), HOPPER_SMS)


def fusable(problem: MoEProblem, block_n: int) -> bool:
    """Return whether GEMM 1's tiles hold what the quantization of their result needs."""
    operand = problem.quant.activation
    if operand is None or operand.static:
        return True
    return operand.group == (1, 128) and block_n == 128


def tma_possible(problem: MoEProblem) -> bool:
    """Return whether weights can come through tensor descriptors: Hopper or later, rows of whole 16
    bytes. 4-bit weights never do, their tiles are contiguous anyway."""
    _, w_bits = operand_bits(problem)
    if w_bits == 4 or INTERPRETED:
        return False
    if problem.device.capability is None or problem.device.capability < (9, 0):
        return False
    widths = problem.hidden_size, problem.local_intermediate_size
    return all(n * w_bits // 8 % 16 == 0 for n in widths)


def swap_ab_pays(problem: MoEProblem) -> bool:
    """Return whether tiles below 64 rows are faster with swap-AB: e4m3 on Hopper."""
    operand = problem.quant.activation
    return hopper(problem) and operand is not None and operand.dtype.startswith("float8")


def specializable(problem: MoEProblem) -> bool:
    """Return whether specialized warps can compute both GEMMs: Hopper, one of `GLUON_VERSIONS`,
    silu with a gate and no clamp, no bias, 16 bits or fp8 blocks."""
    p, act = problem, problem.activation
    if INTERPRETED or p.device.capability != (9, 0) or p.has_bias or act.clamped:
        return False
    if act.name != "silu" or not act.gated or p.quant.name not in ("none", "fp8_block"):
        return False
    version = ".".join(triton.__version__.split(".")[:2])
    if GLUON_VERSIONS and version not in GLUON_VERSIONS:
        _tell_slower(version)
    return version in GLUON_VERSIONS


@functools.cache
def _tell_slower(version: str) -> None:
    anyway = "set MOEKIT_TRITON_GLUON=1 to use them anyway, or install another version"
    logger.warning(
        "with triton %s large calls take slower kernels on Hopper, because the fastest ones have "
        "run on GPUs with triton %s alone: %s", version, ", ".join(_RAN),
        anyway if version in _COMPILING else "install one of these",
    )  # fmt: skip
