"""moekit's dispatcher over pplx-kernels' intranode all-to-all, for the GPUs of one host."""

from __future__ import annotations

from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, MoEProblem, hookimpl

from .layout import MAX_TOKENS
from .library import PPLX

# The library sends a token through the shared memory of one thread block.
_LARGEST_ROW = 48 * 1024 - 1024


def _check(problem: MoEProblem) -> list[str]:
    if not problem.parallel.moves_tokens:
        return []
    reasons = []
    row = problem.hidden_size * problem.dtype.itemsize
    multiple = 8 if problem.quant.activation is None else 16
    if problem.hidden_size % multiple:
        reasons.append(f"hidden_size {problem.hidden_size} is not a multiple of {multiple}")
    if row > _LARGEST_ROW:
        reasons.append(f"a token has {row} bytes; the library sends at most {_LARGEST_ROW}")
    if (problem.max_num_tokens or 0) > MAX_TOKENS:
        reasons.append(
            f"max_num_tokens={problem.max_num_tokens} exceeds {MAX_TOKENS}: every 128 tokens of a "
            "rank take another round and another set of buffers"
        )
    return reasons


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="pplx",
            target="moekit_pplx.dispatcher:PplxDispatcher",
            format=ActivationFormat.BATCHED,
            dtypes=frozenset({"bfloat16", "float16"}),
            devices=("cuda>=9.0",),
            requires=("pplx_kernels", "triton"),
            install_hint=PPLX.install_hint,
            describe=PPLX.describe,
            # 4 x H200: slower than FlashInfer's all-to-all at every T.
            priority=-10,
            check=_check,
            moves_tokens=True,
            sliced_experts=False,
            shared_tokens=False,
            wire_schemes=WIRE_SCHEMES,
            needs_capacity=True,
            graph_safe=True,
        )
    ]
