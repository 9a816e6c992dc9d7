"""moekit's kernels inside an unmodified vLLM.

vLLM calls `register` in each of its processes, because this package has an entry point in the group
``vllm.general_plugins``. From then on moekit computes the routed experts of every MoE layer that it
can compute exactly. The other layers keep vLLM's own kernels, and one line of the log says why.
`moekit.engines` says how a layer goes through the modules. ``layer`` needs no vLLM.
"""

from __future__ import annotations

from moekit_vllm.experts import repack_
from moekit_vllm.layer import FusedMoE, SharedFusedMoE

__all__ = ["FusedMoE", "SharedFusedMoE", "register", "repack_"]


def register() -> None:
    """Let moekit take vLLM's MoE layers, unless MOEKIT_VLLM=off. Idempotent.

    Raises:
        MoekitError: MOEKIT_VLLM=require, and vLLM has another version or another plugin has
            replaced its layer; or the variable has an unknown value.
    """
    from moekit_vllm.hooks import install
    from moekit_vllm.settings import VLLM, Mode

    if (mode := VLLM.mode()) is not Mode.OFF:
        install(mode)
