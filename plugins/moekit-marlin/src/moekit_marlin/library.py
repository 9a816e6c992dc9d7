"""Find the vLLM library that holds the Marlin operator, and load it alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from moekit.plugin import VendorLibrary

logger = logging.getLogger("moekit")

VLLM = VendorLibrary(
    distribution="vllm",
    versions=">=0.33,<0.34",
    path_variable="MOEKIT_VLLM_PATH",
    file="_moe_C_stable_libtorch.abi3.so",
)
OPERATOR = "_moe_C::moe_wna16_marlin_gemm"
ARGUMENTS = (
    "a c_or_none b_q_weight b_bias_or_none b_scales a_scales global_scale b_zeros_or_none "
    "workspace sorted_token_ids expert_ids num_tokens_past_padded topk_weights moe_block_size "
    "top_k mul_topk_weights b_type_id size_m size_n size_k use_atomic_add use_fp32_reduce "
    "is_zp_float thread_k thread_n blocks_per_sm"
)


@functools.cache
def operator() -> Callable[..., None]:
    """Return the operator; the first call loads the library. Raises BackendBroken if the library
    does not load, or its operator takes other arguments."""
    found: Callable[..., None] = VLLM.operator(OPERATOR, ARGUMENTS)
    logger.info(
        "Marlin's first call for a dtype and a weight format may take minutes: where vllm's "
        "library holds no machine code for a GPU, as for Hopper, CUDA compiles it then, and keeps "
        "it for later processes (CUDA_CACHE_PATH)"
    )
    return found
