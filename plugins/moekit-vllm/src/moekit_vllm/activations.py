"""Activations as vLLM's layers state them: a name and numbers, of which some names use none."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from moekit import Activation
from moekit.errors import InvalidProblem

# vLLM's names that mean something else in moekit. Its "relu2" has a gate, and its "swigluoai"
# alternates rows of gate and up.
RENAMED = {"relu2": "relu2_and_mul", "swigluoai_uninterleave": "swigluoai"}
# The numbers that `vllm_activation` reads.
NUMBERS = (
    "swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta",
    "activation_situ_linear_beta",
)  # fmt: skip


def vllm_activation(name: str, numbers: Mapping[str, float | None]) -> Activation:
    """Return what vLLM computes for an activation (0.33, layers/fused_moe/activation.py).

    The limit clamps, alpha multiplies the gate in its sigmoid, and beta is added to the up
    projection. A linear beta of zero or less means none. Raises InvalidProblem if moekit has no
    such activation, or not with these numbers.
    """
    limit, alpha, beta, situ_beta, situ_linear = map(numbers.get, NUMBERS)
    if name == "situ":
        bound = situ_linear or 0.0
        return Activation("situ", alpha=situ_beta, limit=bound if bound > 0 else None)
    if name in ("swigluoai", "swiglustep"):
        if (limit, alpha) not in product((None, 7.0), (None, 1.702)):
            raise InvalidProblem(
                f"vLLM computes {name!r} with swiglu_limit=7.0, and swigluoai with "
                f"swiglu_alpha=1.702 (got swiglu_limit={limit} and swiglu_alpha={alpha})"
            )
        return Activation(name)
    # silu with a limit, and with alpha and beta: gate * sigmoid(alpha * gate) * (up + beta).
    general = name == "swigluoai_uninterleave"
    if not general and (name != "silu" or limit is None):
        return Activation(RENAMED.get(name, name))
    alpha = 1.0 if alpha is None or not general else alpha
    beta = 0.0 if beta is None or not general else beta
    if limit is not None and beta == 1.0:
        return Activation("swigluoai", alpha=alpha, limit=limit)
    if limit is not None and (alpha, beta) == (1.0, 0.0):
        return Activation("silu", limit=limit)
    raise InvalidProblem(
        f"moekit computes {name!r} with a swiglu_limit, and with swiglu_beta=1.0, or swiglu_alpha="
        f"1.0 and swiglu_beta=0.0 (got swiglu_limit={limit}, swiglu_alpha={alpha}, "
        f"swiglu_beta={beta})"
    )
