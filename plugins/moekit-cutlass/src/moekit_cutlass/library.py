"""Find the libraries that provide grouped GEMMs, and say why one cannot be used.

This module imports none of the libraries, nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moekit.plugin import MoEProblem, VendorLibrary, importable

W4A8 = "int4_w4a8_g128"
PROVIDER_VARIABLE = "MOEKIT_CUTLASS_PROVIDER"

QUACK_HINT = "pip install 'moekit-cutlass[quack]'"
QUACK = (
    VendorLibrary(
        distribution="quack-kernels", versions=">=0.6.5,<0.7", module="quack",
        install_hint=f"{QUACK_HINT}, or set {PROVIDER_VARIABLE}=torch",
    ),
    VendorLibrary(distribution="nvidia-cutlass-dsl", versions=">=4.7.1,<4.9", module="cutlass"),
)  # fmt: skip
VLLM = VendorLibrary(
    distribution="vllm",
    versions=">=0.33,<0.34",
    path_variable="MOEKIT_VLLM_PATH",
    file="_C_stable_libtorch.abi3.so",
)

# The activations that quack's epilogue computes as moekit defines them, with and without a gate.
# Missing: gelu with a gate (quack's geglu is the tanh form), swigluoai, clamps and biases.
FUSED = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu_erf",
    "gelu_tanh_no_mul": "gelu_tanh_approx",
    "relu2": "relu_sq",
}

# The libraries in order of preference, from each number of expected rows per expert on. H200,
# benchmarks/results: vLLM's operator uses swap-AB for small calls, and torch's kernels are faster
# from 512 rows per expert on; for bf16, quack is faster than torch from 128 rows on.
PREFERRED: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "none": ((0, ("torch", "quack")), (128, ("quack", "torch"))),
    "fp8_tensor": ((0, ("vllm", "torch")), (512, ("torch", "vllm"))),
    "fp8_tensor_static": ((0, ("vllm", "torch")), (512, ("torch", "vllm"))),
    "fp8_channel_token": ((0, ("vllm", "torch")), (512, ("torch", "vllm"))),
    W4A8: ((0, ("vllm",)),),
}
_KNOWN = ("quack", "torch", "vllm")

# Their kernels that prepare pointers have one thread for each local expert, in one block; torch's
# operators also refuse the last one of 1024.
_MOST_EXPERTS = {"torch": 1023, "vllm": 1024}


def forced() -> str:
    """Return the library that MOEKIT_CUTLASS_PROVIDER names, or an empty string."""
    return os.environ.get(PROVIDER_VARIABLE, "").strip().lower()


def providers_for(problem: MoEProblem) -> tuple[list[str], list[str]]:
    """Return the libraries that compute the problem here, and a reason for each that cannot."""
    if forced() not in ("", *_KNOWN):
        known = ", ".join(_KNOWN)
        return [], [
            f"{PROVIDER_VARIABLE}={forced()} names no library: choose one of {known}, or unset it"
        ]
    usable, reasons = [], []
    names = {name for _, order in PREFERRED[problem.quant.name] for name in order}
    for name in sorted(names):
        if reason := _unsupported(name, problem):
            reasons.append(reason)
        else:
            usable.append(name)
    return usable, reasons


def missing(provider: str) -> str:
    """Return why a library cannot be used here, or an empty string."""
    if provider == "quack":
        for module in ("quack", "cutlass.cute", "tvm_ffi"):
            if not importable(module):
                return f"{module} is not installed ({QUACK_HINT})"
        reasons = (reason for part in QUACK for reason in part.unsupported())
        return next(reasons, _misplaced(QUACK[1].folder()))
    if provider == "vllm":
        if VLLM.folder() is None and VLLM.named_folder is None:
            return (
                f"vllm is not installed ({VLLM.install_hint}, or unpack its wheel and set "
                f"{VLLM.path_variable} to the vllm folder in it)"
            )
        return next(iter(VLLM.unsupported()), "")
    return ""


def _misplaced(package: Path | None) -> str:
    """Return why quack compiles nothing with a package in this folder, or an empty string.

    quack takes packages elsewhere for the user's own code, whose every global it must know.
    """
    if package is None or {"site-packages", "dist-packages"} & set(package.parts):
        return ""
    return (
        f"{package.name} lies in {package.parent}, but quack compiles only with packages below a "
        f"folder named site-packages or dist-packages; install it there ({QUACK_HINT})"
    )


def _unsupported(provider: str, problem: MoEProblem) -> str:
    local, dtype, scheme = problem.num_local_experts, problem.dtype_name, problem.quant.name
    if reason := missing(provider):
        return reason
    if forced() not in ("", provider):
        return f"{PROVIDER_VARIABLE}={forced()} excludes {provider}"
    if local > (most := _MOST_EXPERTS.get(provider, local)):
        return f"{provider}'s grouped GEMM takes at most {most} experts, and a rank has {local}"
    if dtype == "bfloat16":
        return ""
    if provider == "torch" and scheme == "none":
        return f"torch's grouped GEMM does not support {dtype}"
    if scheme == W4A8:
        return f"vLLM's cutlass_w4a8_moe_mm returns bfloat16, not {dtype}"
    return ""
