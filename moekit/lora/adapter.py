"""The adapter of one layer's experts, in one layout, and a rank's share of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.problem import MoEProblem

MOST_RANK = 256


def scaling_of(alpha: float, rank: int, rank_stabilized: bool = False) -> float:
    """Return the factor of B A: ``alpha / rank``, or ``alpha / sqrt(rank)`` if rank-stabilized."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)


@dataclass(frozen=True, repr=False)
class Adapter:
    """Low-rank deltas of the E logical experts of a layer: ``W + scaling B A``.

    The first dimension of a matrix is E, or 1 if all experts share it (shared outer). If A and B of
    w13 or w2 are None, it has no delta. Matrices may require a gradient.

    scaling: see `scaling_of`.
    w13_a: (E, G, r, H). G is 1 if gate and up share A, and 2 if each has one. w13_b: (E, 2I or I,
    r), gate before up. w2_a: (E, r, I). w2_b: (E, H, r). All of any float dtype.
    """

    scaling: float
    w13_a: Tensor | None = None
    w13_b: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None

    @classmethod
    def packed(
        cls,
        scaling: float,
        gate_up: tuple[Tensor, Tensor] | None = None,
        down: tuple[Tensor, Tensor] | None = None,
    ) -> Adapter:
        """Make an adapter of packed matrices (E or 1, r, ·) and (E or 1, ·, r).

        A of gate_up may be (E, 2r, H) with B (E, 2I, r): A of gate before A of up.
        """
        (a, b), (w2_a, w2_b) = gate_up or (None, None), down or (None, None)
        if a is not None and b is not None and a.dim() == 3:
            groups = a.shape[1] // b.shape[2] if b.shape[2] and not a.shape[1] % b.shape[2] else 1
            a = a.view(len(a), groups, -1, a.shape[2])
        return cls(scaling, a, b, w2_a, w2_b)

    @property
    def rank(self) -> int:
        """r, the larger one if w13 and w2 differ."""
        return max((b.shape[-1] for b in (self.w13_b, self.w2_b) if b is not None), default=0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by name."""
        return {n: t for n, t in vars(self).items() if isinstance(t, Tensor)}

    def check(self, problem: MoEProblem) -> None:
        """Raise WeightsError, which lists everything that does not fit the model's layer."""
        p, faults = problem, []
        E, H, inner = p.num_experts, p.hidden_size, p.intermediate_size
        rows = 2 * inner if p.activation.gated else inner
        sizes: dict[str, tuple[int | str, ...]] = {
            "w13_a": ("1 or 2", "r", H), "w13_b": (rows, "r"), "w2_a": ("r", inner),
            "w2_b": (H, "r"),
        }  # fmt: skip
        found = self.tensors()
        for name, t in found.items():
            wanted, (first, *rest) = sizes[name], t.shape
            fits = first in (1, E) and len(rest) == len(wanted) and t.is_floating_point()
            if not fits or any(
                type(w) is int and w != n for n, w in zip(rest, wanted, strict=True)
            ):
                said = ", ".join(map(str, (f"{E} or 1", *wanted)))
                faults.append(f"{name} is {tuple(t.shape)} {t.dtype}, expected ({said})")
        for which in ("w13", "w2"):
            a, b = found.get(f"{which}_a"), found.get(f"{which}_b")
            if (a is None) != (b is None):
                faults.append(f"{which} has {'B' if a is None else 'A'} only")
            elif a is not None and b is not None and a.shape[-2] != b.shape[-1]:
                faults.append(f"{which} has A of rank {a.shape[-2]}, and B of rank {b.shape[-1]}")
        groups = 1 if self.w13_a is None or self.w13_a.dim() != 4 else self.w13_a.shape[1]
        if groups not in (1, 2) or (groups == 2 and not p.activation.gated):
            faults.append(f"w13_a has {groups} groups, expected 1, or 2 if the experts have a gate")
        if not found:
            faults.append("it has no matrices, expected A and B of w13, of w2 or of both")
        elif not 1 <= self.rank <= MOST_RANK:
            faults.append(f"its rank is {self.rank}, expected 1 to {MOST_RANK}")
        if not math.isfinite(self.scaling):
            faults.append(f"its scaling is {self.scaling}, expected a finite number")
        if faults:
            raise WeightsError(f"the adapter does not fit this layer: {'; '.join(faults)}")

    def local(self, problem: MoEProblem, experts: Sequence[int] | None = None) -> Adapter:
        """Return this rank's share: L experts, and its slice of w13's rows and of w2's columns.

        Args:
            experts: the logical expert of each physical one of this rank. Default: as `MoEProblem`
                places them.
        """
        self.check(problem)
        p = problem
        if experts is None:
            experts = [p.logical_expert(physical) for physical in p.local_experts]
        run, size = p.local_neurons, p.local_intermediate_size

        def sliced(t: Tensor, dim: int) -> Tensor:
            part = t.narrow(dim, run.start, len(run))
            missing = [*part.shape[:dim], size - len(run), *part.shape[dim + 1 :]]
            return torch.cat([part, part.new_zeros(missing)], dim) if missing[dim] else part

        made: dict[str, Any] = {}
        for name, t in self.tensors().items():
            if len(t) > 1 and list(experts) != list(range(len(t))):
                t = t[torch.tensor(experts, device=t.device)]
            if name == "w13_b" and p.local_intermediate_size != p.intermediate_size:
                halves = t.chunk(2 if p.activation.gated else 1, dim=1)
                t = torch.cat([sliced(half, 1) for half in halves], dim=1)
            elif name == "w2_a" and p.local_intermediate_size != p.intermediate_size:
                t = sliced(t, 2)
            made[name] = t
        return replace(self, **made)
