"""The `Engine` record of vLLM: its variable, its log and the supported versions."""

from moekit.engines.mode import Engine, Mode

__all__ = ["VLLM", "Mode"]

# The sources of 0.26, 0.32 and 0.33 were read; `versions.missing_hooks` checks every version.
VLLM = Engine("vLLM", "MOEKIT_VLLM", "vllm.moekit", first=(0, 26), last=(0, 33))
