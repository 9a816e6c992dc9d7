"""Simulated routing, for benchmarks: loads of experts that no router has to be trained for."""

from __future__ import annotations

import torch

from moekit.contract import Routing
from moekit.errors import InvalidProblem
from moekit.runtime.checks import check_tokens
from moekit.untrusted.arguments import shown

SIMULATED = ("uniform", "zipf", "hot", "fixed")
"""uniform: every expert is equally likely. zipf: the r-th most popular expert has likelihood 1 / r.
hot: one expert gets every token, and the other K - 1 choices are uniform. fixed: experts take
turns, so that their loads differ by at most one token."""


def simulate_routing(
    kind: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    index: int = 0,
) -> Routing:
    """Choose ``top_k`` experts for each token at random, with weights that are a softmax.

    Args:
        kind: "uniform", "zipf", "hot" or "fixed"; see `moekit.layer.simulate.SIMULATED`.
        generator: Draws the numbers, on ``device``. None: torch's default generator.
        index: The number of this routing among several, which must not favour the same expert.

    Returns:
        Weights (T, K) fp32, normal values' softmax, and distinct ids (T, K) int64.
    """
    T, E, K = check_tokens(num_tokens), num_experts, top_k
    if kind not in SIMULATED:
        raise InvalidProblem(
            f"routing {shown(kind)} is unknown; choose from {', '.join(SIMULATED)}"
        )
    score_E = torch.zeros(E, dtype=torch.float32, device=device)
    if kind == "zipf":
        rank_E = torch.randperm(E, device=device, generator=generator)
        score_E = -torch.log1p(rank_E.float())
    elif kind == "hot":
        score_E[(5 * index + 1) % E] = torch.inf
    if kind == "fixed":
        ids = torch.arange(index, index + T * K, device=device).view(T, K) % E
    else:
        # Adding Gumbel noise and taking the K largest draws K of E without replacement.
        uniform = score_E.new_empty((T, E)).uniform_(generator=generator)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        ids = (score_E + gumbel).topk(K, dim=1).indices
    normal = score_E.new_empty((T, K)).normal_(generator=generator)
    return Routing(normal.softmax(dim=1), ids.contiguous())
