"""Simulated routing, for benchmarks: loads of experts that no router has to be trained for."""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import InvalidInput, InvalidProblem
from moekit.runtime.checks import check_tokens
from moekit.untrusted.arguments import shown

SIMULATED = ("uniform", "zipf", "hot", "fixed")
"""uniform: every expert is equally likely. zipf: the r-th most popular expert has likelihood 1 / r.
hot: one expert gets every token, and the other K - 1 choices are uniform. fixed: experts take
turns, so that their loads differ by at most one token."""

# The constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014) as signed numbers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


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
        num_tokens: T.
        num_experts: E.
        top_k: K.
        device: Where the tensors are.
        generator: Draws the numbers, on ``device``. None: numbers depend on the token's place and
            ``index`` alone, so every call and every rank gets the same, also in a CUDA graph.
        index: The number of this routing among several, which must not favour the same expert.

    Returns:
        Weights (T, K) fp32, normal values' softmax, and distinct ids (T, K) int64.

    Raises:
        InvalidProblem: ``kind`` is unknown, or ``top_k`` exceeds ``num_experts``.
        InvalidInput: ``num_tokens`` is no number of tokens.
    """
    T, E, K = check_tokens(num_tokens), num_experts, top_k
    if not isinstance(kind, str) or kind not in SIMULATED:
        raise InvalidProblem(
            f"routing {shown(kind)} is unknown; choose from {', '.join(SIMULATED)}"
        )
    if any(type(n) is not int for n in (E, K, index)) or not 1 <= K <= E or index < 0:
        raise InvalidProblem(
            f"top_k must be in 1..num_experts, and index at least 0 (got top_k={shown(K)}, "
            f"num_experts={shown(E)}, index={shown(index)})"
        )
    draw = _Draws(torch.device(device), generator, index)
    score_E = torch.zeros(E, dtype=torch.float32, device=draw.device)
    if kind == "zipf":
        score_E = -torch.log1p(draw.order(E).float())
    elif kind == "hot":
        score_E[(5 * index + 1) % E] = torch.inf
    # Adding Gumbel noise and taking the K largest draws K of E without replacement.
    ids = (score_E + _gumbel(draw.uniform(T, E))).topk(K, dim=1).indices
    if kind == "fixed":
        turn = torch.arange(index, index + T * K, device=draw.device)
        ids = (turn % E).view(T, K)
    return Routing(draw.normal(T, K).softmax(dim=1), ids.contiguous())


class _Draws:
    """Random numbers of a generator, or of a hash."""

    def __init__(self, device: torch.device, generator: torch.Generator | None, index: int) -> None:
        if generator is not None and generator.device.type != device.type:
            raise InvalidInput(
                f"the generator is on {generator.device}, the routing on {device}: make both there"
            )
        self.device, self.generator, self.salt = device, generator, index << 40

    def order(self, n: int) -> Tensor:
        if self.generator is None:
            return self._hash(1, n)[0].argsort()
        return torch.randperm(n, device=self.device, generator=self.generator)

    def uniform(self, rows: int, columns: int) -> Tensor:
        if self.generator is None:
            return self._hash(rows, columns)
        shape = (rows, columns)
        return torch.rand(shape, dtype=torch.float32, device=self.device, generator=self.generator)

    def normal(self, rows: int, columns: int) -> Tensor:
        if self.generator is None:  # of the quantiles
            normal: Tensor = torch.special.ndtri(self._hash(rows, columns))
            return normal
        shape = (rows, columns)
        return torch.randn(shape, dtype=torch.float32, device=self.device, generator=self.generator)

    def _hash(self, rows: int, columns: int) -> Tensor:
        """Return uniform numbers in (0, 1), others at each call."""
        self.salt += 1 << 36
        place = torch.arange(self.salt, self.salt + rows * columns, device=self.device)
        z = place * _STEP
        z = (z ^ (z >> 30)) * _FIRST
        z = (z ^ (z >> 27)) * _SECOND
        z = z ^ (z >> 31)
        return ((z & 0xFFFFFF).float().add_(0.5) / 2**24).view(rows, columns)


def _gumbel(uniform: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
