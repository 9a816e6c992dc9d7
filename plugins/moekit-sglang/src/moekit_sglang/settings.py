"""The `Engine` record of SGLang: its variable, its log and the supported versions."""

from moekit.engines.mode import Engine, Mode

__all__ = ["SGLANG", "Mode"]

# The sources of 0.5.15 and 0.5.23 were read; `versions.missing_hooks` checks every version.
SGLANG = Engine("SGLang", "MOEKIT_SGLANG", "sglang.moekit", first=(0, 5, 15), last=(0, 5, 23))
