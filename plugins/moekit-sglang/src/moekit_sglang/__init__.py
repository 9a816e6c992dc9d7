"""moekit's kernels inside an unmodified SGLang.

SGLang calls `register` in each of its processes, because this package has an entry point in the
group ``sglang.srt.plugins``. From then on moekit computes the routed experts of every MoE layer
that it can compute exactly. The other layers keep SGLang's own kernels, and one line of the log
says why. `moekit.engines` says how a layer goes through the modules.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Let moekit take SGLang's MoE layers, unless MOEKIT_SGLANG=off. Idempotent.

    Raises:
        SystemExit: The variable has an unknown value, or it is ``require`` and SGLang has another
            version or lacks a hook. SGLang would start without moekit after another exception.
    """
    from moekit.errors import MoekitError
    from moekit_sglang.hooks import install
    from moekit_sglang.settings import SGLANG, Mode

    try:
        if (mode := SGLANG.mode()) is not Mode.OFF:
            install(mode)
    except MoekitError as error:
        raise SystemExit(str(error)) from error
