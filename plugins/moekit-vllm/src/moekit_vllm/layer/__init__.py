"""`FusedMoE` with the interface of vLLM's layer of that name; vLLM need not be installed.

fused_moe     the layers
keywords      vLLM's keywords as the records of moekit's layer
quantization  quantization configs as formats of a checkpoint
loading       parameters and the weight loader
"""

from moekit_vllm.layer.fused_moe import FusedMoE, SharedFusedMoE

__all__ = ["FusedMoE", "SharedFusedMoE"]
