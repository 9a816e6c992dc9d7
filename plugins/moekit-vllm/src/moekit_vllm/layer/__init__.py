"""`FusedMoE` with the interface of vLLM's layer of that name; vLLM need not be installed."""

from moekit_vllm.layer.fused_moe import FusedMoE, SharedFusedMoE

__all__ = ["FusedMoE", "SharedFusedMoE"]
