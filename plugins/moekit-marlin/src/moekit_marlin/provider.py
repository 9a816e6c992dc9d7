"""Finds the library that holds the operator, says what is wrong with it, and loads it alone.

Looking (`reasons`) reads files and imports nothing; only `operator` loads the library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH_VARIABLE = "MOEKIT_VLLM_PATH"
"""Names the folder with the .so files, in place of an installed vllm."""

VERSIONS = ">=0.33,<0.34"
_LOWEST, _ABOVE = (0, 33), (0, 34)

LIBRARY = "_moe_C_stable_libtorch.abi3.so"
NAMESPACE, NAME = "_moe_C", "moe_wna16_marlin_gemm"

ARGUMENTS = (
    "Tensor! a", "Tensor? c_or_none", "Tensor! b_q_weight", "Tensor? b_bias_or_none",
    "Tensor! b_scales", "Tensor? a_scales", "Tensor? global_scale", "Tensor? b_zeros_or_none",
    "Tensor! workspace", "Tensor sorted_token_ids", "Tensor! expert_ids",
    "Tensor! num_tokens_past_padded", "Tensor! topk_weights", "int moe_block_size", "int top_k",
    "bool mul_topk_weights", "int b_type_id", "int size_m", "int size_n", "int size_k",
    "bool use_atomic_add", "bool use_fp32_reduce", "bool is_zp_float",
    "int thread_k", "int thread_n", "int blocks_per_sm",
)  # fmt: skip

_operator: Callable[..., Any] | None = None


def operator() -> Callable[..., Any]:
    """The operator; the first call loads the library.

    Raises ImportError when there is none, or one with other arguments.
    """
    global _operator
    if _operator is None:
        _operator = _load()
    return _operator


def reasons() -> list[str]:
    """Why the library that is there cannot be used. None at all is for `requires` to report."""
    folder = find()
    if folder is None:
        named = os.environ.get(PATH_VARIABLE)
        return [f"{PATH_VARIABLE}={named} is no folder"] if named else []
    found = version(folder)
    if found is not None and not _LOWEST <= found < _ABOVE:
        text = ".".join(map(str, found))
        return [
            f"vllm {text} is installed, wanted is vllm{VERSIONS} (pip install 'vllm{VERSIONS}')"
        ]
    library = folder / LIBRARY
    if not library.is_file():
        return [f"{folder} holds no {LIBRARY}: is it a vllm built for CUDA?"]
    if not _declares_operator(str(library), library.stat().st_mtime_ns):
        return [f"{library} declares {NAME} with other arguments than those of vllm{VERSIONS}"]
    return []


def find() -> Path | None:
    """The folder with the libraries: the one that MOEKIT_VLLM_PATH names, else vllm's own."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named) if Path(named).is_dir() else None
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(folders[0]) if folders else None


def version(folder: Path) -> tuple[int, ...] | None:
    """vllm's version by the folder's _version.py, else by the installed metadata, if any says."""
    try:
        text = (folder / "_version.py").read_text()
        match = re.search(r"version_tuple\s*=\s*\((\d+), *(\d+)(?:, *(\d+))?", text)
    except OSError:
        match = None
    if match is None and not os.environ.get(PATH_VARIABLE):
        try:
            match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", importlib.metadata.version("vllm"))
        except importlib.metadata.PackageNotFoundError:
            match = None
    return None if match is None else tuple(int(part) for part in match.groups() if part)


@functools.lru_cache(maxsize=8)
def _declares_operator(library: str, mtime_ns: int) -> bool:
    """Whether the library's text of the operator's schema is the one known here.

    The schema is a plain string in the file, with blanks between arguments as the source has them.
    """
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
    """Same arguments in the same order, whatever the blanks, namespace, alias marks, defaults."""
    inside = re.search(r"\((.*)\)\s*->", schema, re.S)
    if inside is None:
        return False
    arguments = [re.sub(r"=.*", "", part) for part in inside[1].split(",")]
    plain = [re.sub(r"\([^)]*\)|!", "", part).split() for part in arguments]
    return plain == [part.replace("!", "").split() for part in ARGUMENTS]


def _load() -> Callable[..., Any]:
    import torch

    operators = getattr(torch.ops, NAMESPACE)
    if not hasattr(operators, NAME):  # else another package has loaded it
        folder = find()
        if folder is None:
            raise ImportError(f"no vllm here: pip install 'vllm{VERSIONS}', or set {PATH_VARIABLE}")
        if why := reasons():
            raise ImportError("; ".join(why))
        torch.ops.load_library(str(folder / LIBRARY))
    found = getattr(operators, NAME).default
    if not is_known(str(found._schema)):
        raise ImportError(f"{NAME} has other arguments than vllm{VERSIONS}'s: {found._schema}")
    return found  # type: ignore[no-any-return]
