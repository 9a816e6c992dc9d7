"""Marlin's operator alone: its layout of weights and its numbers, for every weight type.

MOEKIT_VLLM_PATH=<folder of vllm> python benchmarks/device/marlin_library.py [layout operator]
"""

from __future__ import annotations

import argparse

import torch
from common import DEVICE, run_parts, say, verdict
from moekit_marlin import layout, library
from torch import Tensor

from moekit.problem.quant import E2M1
from moekit.testing import relative_error

# value = (stored - offset) * scale; fp8: offset None. As in the stand-in of the tests.
UINT8B128 = 8 << 8 | 128 << 17 | 1 << 50
FP8 = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
UINT4 = 4 << 8 | 1 << 50
FP4 = 2 | 1 << 8 | 1 << 16 | 1 << 49
TYPES = {
    "int8": (UINT8B128, 8),
    "fp8": (FP8, 8),
    "int4": (UINT4B8, 4),
    "int4+zp": (UINT4, 4),
    "mxfp4": (FP4, 4),
}
GROUPS = {"fp8": (-1, 128), "mxfp4": (32,)}
RAW_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 8e-4}


def words(values: Tensor, bits: int) -> Tensor:
    """Pack (..., n) into int32 (..., n * bits / 32), the first value in the lowest bits."""
    per_word = 32 // bits
    total = (
        values.long().unflatten(-1, (-1, per_word))
        << bits * torch.arange(per_word, device=values.device)
    ).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def repack(args: argparse.Namespace) -> None:
    """Compare `layout.pack_weights` with the library's gptq_marlin_repack and awq_marlin_repack."""
    folder = library.VLLM.folder()
    assert folder is not None
    path = folder / "_C_stable_libtorch.abi3.so"
    if not path.exists():
        say(f"no {path.name} here: not compared")
        return
    torch.ops.load_library(str(path))
    say(torch.ops._C.gptq_marlin_repack.default._schema)
    for bits in (4, 8):
        for n, k in ((64, 128), (128, 64), (256, 256), (768, 2048), (2880, 2944)):
            if n % 64 or k % 16:
                continue
            q_NK = torch.randint(1 << bits, (n, k), dtype=torch.uint8, device=DEVICE)
            ours = layout.pack_weights(q_NK[None], bits)[0]
            gptq = words(q_NK, bits).T.contiguous()  # (K / per_word, N)
            theirs = torch.ops._C.gptq_marlin_repack(gptq, k, n, bits, False)
            same = ours.shape == theirs.shape and torch.equal(ours, theirs)
            order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
            mixed = q_NK.T.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
            awq = torch.ops._C.awq_marlin_repack(words(mixed, bits), k, n, bits, False)
            same_awq = torch.equal(ours, awq)
            state = verdict(f"layout {bits} bits N={n} K={k}", float(not (same and same_awq)), 0)
            say(f"  {bits} bits N={n:5} K={k:5}: gptq {same}, awq {same_awq}  {state}")


# -- the bare operator ----------------------------------------------------------------------------


def raw_weight(kind: str, experts: int, n: int, k: int, group: int, dtype: torch.dtype):
    """Return (type id, weight, scale, zeros) of the operator, and dequantized fp32 (L, N, K)."""
    type_id, bits = TYPES[kind]
    groups = 1 if group < 0 else k // group
    if kind == "mxfp4":
        q = torch.randint(16, (experts, n, k), dtype=torch.uint8, device=DEVICE)
        scale = torch.exp2(torch.randint(-20, -4, (experts, groups, n), device=DEVICE).float())
        codes = torch.tensor([*E2M1, *(-v for v in E2M1)], device=DEVICE)
        each = scale.transpose(1, 2).repeat_interleave(group, 2)
        stored = layout.pack_exponents(scale).view(torch.float8_e8m0fnu)
        return (type_id, layout.pack_weights(q, bits), stored, None), codes[q.long()] * each
    if kind == "fp8":
        f8 = torch.randn(experts, n, k, device=DEVICE).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)
        q, values = f8.view(torch.uint8), f8.float()
    else:
        q = torch.randint(1 << bits, (experts, n, k), dtype=torch.uint8, device=DEVICE)
        values = q.float()
    scale = (torch.rand(experts, groups, n, device=DEVICE) + 0.5) * 0.01
    exponent = {torch.bfloat16: 120, torch.float16: 8}[dtype] if kind == "fp8" else 0
    stored = (scale * 2.0**exponent).to(dtype)
    each = stored.float().mul(2.0**-exponent).transpose(1, 2).repeat_interleave(k // groups, 2)
    zeros = None
    if kind == "int4+zp":
        z = torch.randint(16, (experts, groups, n), dtype=torch.uint8, device=DEVICE)
        values = values - z.float().transpose(1, 2).repeat_interleave(k // groups, 2)
        zeros = layout.pack_zeros(z)
    elif kind != "fp8":
        values = values - (1 << bits - 1)
    packed = layout.pack_weights(q, bits)
    return (type_id, packed, layout.permute_scales(stored), zeros), values * each


def operator(args: argparse.Namespace) -> None:
    """Check every weight type, group and block size, within the operator's own rounding."""
    call = library.operator()
    experts, pairs = 3, 50
    locks = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        for kind in TYPES:
            if (kind, dtype) == ("mxfp4", torch.float16):  # no such kernel
                continue
            for group in GROUPS.get(kind, (-1, 32, 64, 128)):
                worst, failed = 0.0, ""
                for n, k in ((128, 128), (128, 192), (192, 256), (512, 384), (1024, 2048)):
                    if k % max(group, 1):
                        continue
                    (type_id, w, s, z), real = raw_weight(kind, experts, n, k, group, dtype)
                    x = torch.randn(pairs, k, device=DEVICE).to(dtype)
                    bias = torch.randn(experts, n, device=DEVICE).to(dtype)
                    ids = torch.randint(experts, (pairs,), device=DEVICE)
                    for block in (8, 16, 32, 48, 64):
                        lists = listed(ids, experts, block)
                        for b in (None, bias):
                            out = torch.full((pairs, n), float("nan"), dtype=dtype, device=DEVICE)
                            stored_b = None if b is None else layout.permute_channels(b)
                            try:
                                call(
                                    x, out, w, stored_b, s, None, None, z, locks, *lists,
                                    x.new_ones(1, dtype=torch.float32), block, 1, False, type_id,
                                    pairs, n, k, False, True, False, -1, -1, -1,
                                )  # fmt: skip
                            except RuntimeError as error:
                                failed = f"{str(error).splitlines()[0][:160]} (N={n} K={k} {block})"
                                continue
                            want = torch.einsum("rk,rnk->rn", x.float(), real[ids])
                            want = want if b is None else want + b.float()[ids]
                            error = relative_error(out, want)
                            if not error <= RAW_LIMIT[dtype]:
                                where = f"N={n} K={k} block={block} bias={b is not None}"
                                failed = f"{error:.3g} at {where}"
                            worst = max(worst, error)  # NaN is in `failed`
                if bool(locks.any()):
                    failed = "locks are not zero afterwards"
                    locks.zero_()
                name = f"operator {kind} group {group} {dtype}"
                state = verdict(name, 1.0 if failed else worst, RAW_LIMIT[dtype])
                say(f"  {name:44} worst {worst:.2e}  {state}  {failed}")


def listed(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's entries, experts and num_rows for ids (A,), by torch on the host."""
    flat = ids.flatten().cpu()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts)
    entries: list[int] = []
    owners: list[int] = []
    for expert, mine in enumerate(order.split(counts.tolist())):
        rows = mine.tolist()
        rows += [len(flat)] * (-len(rows) % block)
        entries += rows
        owners += [expert] * (len(rows) // block)

    def ints(v: list[int]) -> Tensor:
        return torch.tensor(v or [0], dtype=torch.int32, device=DEVICE)

    return ints(entries), ints(owners), ints([len(entries)])


if __name__ == "__main__":
    run_parts(__doc__, {"layout": repack, "operator": operator})
