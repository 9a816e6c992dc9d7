"""Find the vLLM library that holds the Marlin operator, check it, and load it alone.

`unsupported` reads files and imports nothing. Only `load_operator` loads the library.
"""

from __future__ import annotations

import functools
import logging
import mmap
import re
import threading
from collections.abc import Callable
from typing import Any

from moekit.plugin import VendorLibrary

VLLM = VendorLibrary(distribution="vllm", versions=">=0.33,<0.34", path_variable="MOEKIT_VLLM_PATH")
FILE = "_moe_C_stable_libtorch.abi3.so"
NAMESPACE, NAME = "_moe_C", "moe_wna16_marlin_gemm"

logger = logging.getLogger("moekit")

_PATIENCE_SECONDS = 5.0
_COMPILES = (
    f"the first call of Marlin has taken more than {_PATIENCE_SECONDS:g} s: where vllm's library "
    "holds no machine code for a GPU, as for Hopper, CUDA compiles it now, and keeps it for later "
    "processes (CUDA_CACHE_PATH)"
)

ARGUMENTS = (
    "Tensor! a", "Tensor? c_or_none", "Tensor! b_q_weight", "Tensor? b_bias_or_none",
    "Tensor! b_scales", "Tensor? a_scales", "Tensor? global_scale", "Tensor? b_zeros_or_none",
    "Tensor! workspace", "Tensor sorted_token_ids", "Tensor! expert_ids",
    "Tensor! num_tokens_past_padded", "Tensor! topk_weights", "int moe_block_size", "int top_k",
    "bool mul_topk_weights", "int b_type_id", "int size_m", "int size_n", "int size_k",
    "bool use_atomic_add", "bool use_fp32_reduce", "bool is_zp_float",
    "int thread_k", "int thread_n", "int blocks_per_sm",
)  # fmt: skip
_WEIGHT_TYPE = ARGUMENTS.index("int b_type_id")


def unsupported() -> list[str]:
    """Return why the installed library cannot be used.

    A library that is not installed at all is reported by the spec's ``requires``.
    """
    reasons, folder = VLLM.unsupported(), VLLM.folder()
    if reasons or folder is None:
        return reasons
    library = folder / FILE
    if not library.is_file():
        return [f"{folder} holds no {FILE}: install a build of vllm for CUDA"]
    if not _declares_operator(str(library), library.stat().st_mtime_ns):
        return [f"{library} declares {NAME} with other arguments than vllm{VLLM.versions}"]
    return []


@functools.lru_cache(maxsize=8)
def _declares_operator(library: str, mtime_ns: int) -> bool:
    """Return whether the schema text inside the library's file is the known one."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(f"{NAME}(".encode())
        while start >= 0:
            end = data.find(b"\0", start, start + 4096)
            text = data[start:end].decode("ascii", "replace")
            if is_known(text):
                return True
            start = data.find(f"{NAME}(".encode(), start + 1)
    return False


def is_known(schema: str) -> bool:
    """Return whether a schema has the known arguments in the known order.

    White space, the namespace, alias marks and default values are ignored.
    """
    inside = re.search(r"\((.*)\)\s*->", schema, re.S)
    if inside is None:
        return False
    arguments = [re.sub(r"=.*", "", part) for part in inside[1].split(",")]
    plain = [re.sub(r"\([^)]*\)|!", "", part).split() for part in arguments]
    return plain == [part.replace("!", "").split() for part in ARGUMENTS]


def load_operator() -> Callable[..., Any]:
    """Load the library and return the operator.

    Raises:
        ImportError: There is no library, or its operator takes other arguments.
    """
    import torch

    operators = getattr(torch.ops, NAMESPACE)
    if not hasattr(operators, NAME):  # another package may have loaded it
        folder = VLLM.folder()
        if folder is None:
            raise ImportError(
                f"vllm is not installed: {VLLM.install_hint}, or set {VLLM.path_variable}"
            )
        if reasons := unsupported():
            raise ImportError("; ".join(reasons))
        torch.ops.load_library(str(folder / FILE))
    found: Callable[..., Any] = getattr(operators, NAME).default
    if not is_known(str(getattr(found, "_schema", ""))):
        raise ImportError(f"{NAME} takes other arguments than vllm{VLLM.versions}: {found}")
    return found


@functools.cache
def operator() -> Callable[..., None]:
    """Return the operator; the first call loads the library."""
    return Operator(load_operator())


class Operator:
    """Call the operator, and log a warning if the first call for two types of operands is slow."""

    def __init__(self, found: Callable[..., Any]) -> None:
        self._found = found
        self._called: set[tuple[Any, Any]] = set()

    def __call__(self, *arguments: Any) -> None:
        types = arguments[0].dtype, arguments[_WEIGHT_TYPE]
        if types in self._called:
            self._found(*arguments)
            return
        report = threading.Timer(_PATIENCE_SECONDS, logger.warning, (_COMPILES,))
        report.daemon = True
        report.start()
        try:
            self._found(*arguments)
        finally:
            report.cancel()
        self._called.add(types)
