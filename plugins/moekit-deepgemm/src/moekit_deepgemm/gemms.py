"""The four GEMMs of DeepGEMM that the experts use, with one interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from moekit.plugin import PackedWeights

from . import library

# The library keeps a setting and its compiled kernels per process, without a lock.
_lock = threading.Lock()
_CONTIGUOUS = "4 use_psum_layout expected_m_for_psum_layout"
_CALLS = {
    "m_grouped_bf16_gemm_nt_contiguous": _CONTIGUOUS,
    "m_grouped_fp8_gemm_nt_contiguous": _CONTIGUOUS,
    "m_grouped_bf16_gemm_nt_masked": "5",
    "get_mk_alignment_for_contiguous_layout": "0",
    "set_mk_alignment_for_contiguous_layout": "1",
}


class Gemms:
    """The loaded library: ``out = a @ w.T`` for each expert.

    a is (M, K) or (L, C, K), bf16, or fp8 with scale (G, M) or (L, G, C) fp32, contiguous. w is
    (L, N, K), with w_scale (L, N / 128, K / 128) for fp8. out is bf16, contiguous. Scales have the
    layout that the library reads on Hopper, so it converts and allocates nothing.
    """

    def __init__(self) -> None:
        self._module = library.load()
        # Some wheels have one name for fp8 and fp4.
        names = "m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"
        masked = names[0] if hasattr(self._module, names[0]) else names[1]
        library.check(self._module, {**_CALLS, masked: "5"})
        self._masked = getattr(self._module, masked)

    def contiguous(
        self, a: Tensor, scale: Tensor | None, weights: PackedWeights, name: str, out: Tensor,
        ends_L: Tensor, block_m: int, expected_m: int | None,
    ) -> None:  # fmt: skip
        """Multiply rows from ends_L[l - 1], rounded up to block_m, to ends_L[l] by expert l."""
        w, w_scale = weights[name], weights.get(f"{name}_scale")
        options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected_m}
        with self._errors(), self._alignment(block_m):
            if scale is None:
                self._module.m_grouped_bf16_gemm_nt_contiguous(a, w, out, ends_L, **options)
            else:
                self._module.m_grouped_fp8_gemm_nt_contiguous(
                    (a, scale.t()), (w, w_scale), out, ends_L, **options
                )

    def masked(
        self, a: Tensor, scale: Tensor | None, weights: PackedWeights, name: str, out: Tensor,
        counts_L: Tensor, expected_m: int,
    ) -> None:  # fmt: skip
        """Multiply the first counts_L[l] (int32) rows of expert l; C is a multiple of 128."""
        w, w_scale = weights[name], weights.get(f"{name}_scale")
        with self._errors():
            if scale is None:
                self._module.m_grouped_bf16_gemm_nt_masked(a, w, out, counts_L, expected_m)
            else:
                self._masked((a, scale.transpose(1, 2)), (w, w_scale), out, counts_L, expected_m)

    @contextmanager
    def _alignment(self, block_m: int) -> Iterator[None]:
        """Set the rows of a block, which is a setting of the process, and restore it."""
        before = self._module.get_mk_alignment_for_contiguous_layout()
        self._module.set_mk_alignment_for_contiguous_layout(block_m)
        try:
            yield
        finally:
            self._module.set_mk_alignment_for_contiguous_layout(before)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Let one thread at a time call the library, and turn its errors into BackendBroken."""
        try:
            with _lock:
                yield
        except RuntimeError as error:
            raise library.failed(error) from error
