"""Dispatchers for GPUs that reach each other over NVLink; they need nothing but torch and Triton.

nvlink_ht   standard format: ranks write rows straight into the memory of the ranks that need
            them, and read the experts' output back
nvlink_ll   batched format: the same, with a row for each assignment at its expert's place
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from moekit.errors import InvalidInput
from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, MoEProblem, hookimpl

from .settings import Settings

_MOST_ROWS = 2**31 - 1
_PRIORITY = 3


def _check(problem: MoEProblem) -> list[str]:
    reasons = []
    try:
        Settings.read()
    except InvalidInput as error:
        reasons.append(str(error))
    if problem.device.arch:
        reasons.append(f"needs NVIDIA GPUs, and was asked for {problem.device}")
    if (memory := _symmetric_memory()) != "CUDA":
        reasons.append(
            f"torch's symmetric memory is set to {memory!r}, and needs to be 'CUDA': unset "
            "TORCH_SYMMMEM, or call torch.distributed._symmetric_memory.set_backend('CUDA') before "
            "any is allocated"
        )
    if problem.hidden_size % 16:
        reasons.append(f"hidden_size must be a multiple of 16 (got {problem.hidden_size})")
    return reasons


def _symmetric_memory() -> str:
    """Return torch's backend of symmetric memory, without importing that module."""
    loaded = sys.modules.get("torch.distributed._symmetric_memory")
    ask = getattr(loaded, "get_backend", None)  # None also while another thread imports it
    found = ask("cuda") if ask else os.environ.get("TORCH_SYMMMEM")
    return found or "CUDA"


def _check_batched(problem: MoEProblem) -> list[str]:
    reasons, parallel = _check(problem), problem.parallel
    per_expert = (problem.max_num_tokens or 0) * parallel.dp_size
    rows = per_expert * (-(-problem.num_physical_experts // parallel.ep_size) * parallel.ep_size)
    if max(rows, per_expert * problem.top_k) > _MOST_ROWS:
        reasons.append(
            f"max_num_tokens={problem.max_num_tokens} makes {rows} rows on all ranks, and at most "
            f"{_MOST_ROWS} can be numbered: lower it, or use nvlink_ht"
        )
    return reasons


def _prefer(problem: MoEProblem) -> int:
    """Precede FlashInfer on up to four GPUs, and so DeepEP: on more, they were not compared."""
    return 25 if problem.parallel.num_ranks <= 4 else _PRIORITY


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    standard = DispatcherSpec(
        name="nvlink_ht",
        target="moekit_nvlink.dispatcher:HighThroughputDispatcher",
        training="moekit_nvlink.training:TrainableHighThroughput",
        format=ActivationFormat.STANDARD,
        devices=("cuda>=8.0",),
        requires=("triton", "moekit_kernels"),
        install_hint="pip install 'triton>=3.6' ./plugins/moekit-kernels",
        priority=_PRIORITY,
        prefer=_prefer,
        moves_tokens=True,
        wire_schemes=WIRE_SCHEMES,
        needs_capacity=True,
        most_top_k=32,
        most_ranks=64,
        ids_dtype="any",
        deterministic=True,
        graph_safe=True,
        check=_check,
    )
    batched = replace(
        standard,
        name="nvlink_ll",
        target="moekit_nvlink.dispatcher:LowLatencyDispatcher",
        training=None,
        format=ActivationFormat.BATCHED,
        priority=2,
        prefer=None,
        check=_check_batched,
    )
    return [standard, batched]
