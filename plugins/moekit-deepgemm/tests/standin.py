"""The part of DeepGEMM that this plugin uses, in plain torch, as picky about its input.

Like the library it computes whole blocks, so padding rows of used blocks come out as garbage (NaN
here), and rows of unused blocks stay as they are.
"""

import dataclasses

import torch

import moekit
from moekit.discovery.registry import Registry

__version__ = "2.8.1"
_alignment = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    return _alignment


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    global _alignment
    _alignment = value


def m_grouped_fp8_gemm_nt_contiguous(
    a, b, d, grouped_layout, *, use_psum_layout=False, expected_m_for_psum_layout=None
):
    (x, scale), (w, w_scale) = a, b
    _check_scales(x, scale, w, w_scale)
    _contiguous(_dequantize(x, scale), _weights(w, w_scale), d, grouped_layout, use_psum_layout)


def m_grouped_bf16_gemm_nt_contiguous(
    a, b, d, grouped_layout, *, use_psum_layout=False, expected_m_for_psum_layout=None
):
    assert a.dtype == b.dtype == torch.bfloat16
    _contiguous(a.float(), b.float(), d, grouped_layout, use_psum_layout)


def m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m):
    (x, scale), (w, w_scale) = a, b
    _check_scales(x, scale, w, w_scale)
    _masked(_dequantize(x, scale), _weights(w, w_scale), d, masked_m, expected_m)


def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m):
    assert a.dtype == b.dtype == torch.bfloat16
    _masked(a.float(), b.float(), d, masked_m, expected_m)


def _check_scales(x, scale, w, w_scale) -> None:
    assert x.dtype == w.dtype == torch.float8_e4m3fn
    assert scale.dtype == w_scale.dtype == torch.float32
    *lead, rows, k = x.shape
    assert k % 128 == 0 and rows % 4 == 0
    assert scale.shape == (*lead, rows, k // 128)
    assert scale.transpose(-1, -2).is_contiguous(), "the library would have to convert the scales"
    assert w_scale.shape == (w.shape[0], -(-w.shape[1] // 128), k // 128)
    assert w_scale.is_contiguous()


def _dequantize(x, scale):
    return x.float() * scale.repeat_interleave(128, dim=-1)


def _weights(w, scale):
    wide = scale.repeat_interleave(128, dim=1)[:, : w.shape[1]].repeat_interleave(128, dim=2)
    return w.float() * wide


def _contiguous(x, w, out, ends, use_psum_layout) -> None:
    assert use_psum_layout, "the plain layout computes the unused rows too"
    assert ends.dtype == torch.int32 and ends.shape == (w.shape[0],) and ends.is_contiguous()
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape[0] == x.shape[0]
    assert x.shape[0] % _alignment == 0
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert start <= end <= x.shape[0]
        block_end = -(-end // _alignment) * _alignment
        out[start:block_end] = float("nan")
        out[start:end] = (x[start:end] @ w[expert].T).to(out.dtype)
        start = block_end


def _masked(x, w, out, counts, expected_m) -> None:
    assert counts.dtype == torch.int32 and counts.shape == (w.shape[0],) and counts.is_contiguous()
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape[:2] == x.shape[:2]
    assert expected_m > 0
    assert x.shape[1] % 128 == 0, "the last block would run into the next slab"
    for expert, count in enumerate(counts.tolist()):
        block_end = -(-count // 128) * 128
        out[expert, count:block_end] = float("nan")
        out[expert, :count] = (x[expert, :count] @ w[expert].T).to(out.dtype)


def registry() -> Registry:
    """Return all installed backends, and this plugin's as `standin`, `standin_batched` and
    `standin_mega`, which run on any device."""
    from moekit_deepgemm import moekit_experts, moekit_fused

    found = Registry.discover()
    for spec in moekit_experts():
        found.register(
            dataclasses.replace(
                spec,
                name=spec.name.replace("deepgemm", "standin"),
                devices=("cpu", "cuda"),
                requires=("triton", "moekit_kernels"),
                priority=-100,
            )
        )
    (mega,) = moekit_fused()  # the kit's sizes on a CPU are not the library's
    facts = {"target": "mega_ranks:Mega", "devices": ("cpu",), "check": _check}
    facts |= {"requires": ("triton", "moekit_kernels"), "name": "standin_mega"}
    found.register(dataclasses.replace(mega, **facts))
    return found


def _check(problem: moekit.MoEProblem) -> list[str]:
    sizes = problem.hidden_size, problem.local_intermediate_size
    reasons = [f"{size} is no multiple of 128" for size in sizes if size % 128]
    return reasons + ["its ranks have tokens"] * (not problem.parallel.moves_tokens)


def problem(device: torch.device, **changes) -> moekit.MoEProblem:
    sizes = dict(num_experts=5, top_k=2, hidden_size=256, intermediate_size=128)
    return moekit.MoEProblem(**{**sizes, "quant": "fp8_block", "device": device, **changes})
