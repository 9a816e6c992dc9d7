"""Who weights the experts' rows and sums them over K, and the sum in plain torch."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.problem import ActivationFormat, MoEProblem


class Sums(Enum):
    """Who weights the experts' rows by the router and sums them over K: one party, once.

    A kernel decides it when it is composed. Its value says who, for people.
    """

    BY_EXPERTS = "the experts"
    BY_EXPERTS_OR_DISPATCHER = "the experts, or the dispatcher in the calls that it takes"
    BY_KERNEL = "moekit"
    BY_DISPATCHER = "the dispatcher"

    @classmethod
    def of(
        cls,
        problem: MoEProblem,
        experts: ExpertsSpec,
        offered: bool = False,
    ) -> Sums:
        """Return who sums in ``problem``.

        Args:
            experts: as the dispatcher sees them, a bridge included.
            offered: the dispatcher has `takes_unreduced`.
        """
        if experts.fused:
            return cls.BY_EXPERTS
        if experts.format is ActivationFormat.BATCHED or problem.batch_invariant:
            return cls.BY_DISPATCHER
        if not experts.reduces:
            return cls.BY_KERNEL
        return cls.BY_EXPERTS_OR_DISPATCHER if offered else cls.BY_EXPERTS


BY_EXPERTS = (Sums.BY_EXPERTS, Sums.BY_EXPERTS_OR_DISPATCHER)


def output_dtype(
    problem: MoEProblem, experts: ExpertsSpec, dispatcher: DispatcherSpec | None = None
) -> torch.dtype:
    """Return the dtype of the experts' output ``y``.

    It is float32 in fp16 problems if everyone who handles an unweighted y supports that: the
    experts, and the dispatcher if it sums.
    """
    sums = Sums.of(problem, experts)
    taken = dispatcher is None or dispatcher.weights_in_fp32 or sums is not Sums.BY_DISPATCHER
    wide = experts.weights_in_fp32 and not experts.reduces and taken
    return torch.float32 if wide and problem.dtype == torch.float16 else problem.dtype


def weight_and_reduce(
    rows_NH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    out_RH: Tensor,
    places_RK: Tensor | None = None,
) -> Tensor:
    """Write ``sum_k weights[r, k] * rows[places[r, k]]`` to ``out_RH`` and return it.

    The sum runs over the assignments whose id is not -1, in the order of k. Each product and each
    sum is rounded to fp32, so that every implementation gives the same bits.

    Args:
        rows_NH: (N, H), any float dtype; rows that no id uses may hold anything.
        ids_RK: (R, K) integers.
        weights_RK: (R, K) float32.
        out_RH: (R, H), any float dtype; every element is written.
        places_RK: (R, K) integers, anything where the id is -1. Default: ``r * K + k``.
    """
    top_k = ids_RK.shape[1]
    total = torch.zeros(out_RH.shape, dtype=torch.float32, device=out_RH.device)
    for k in range(top_k if len(rows_NH) else 0):
        if places_RK is None:
            rows = rows_NH[k::top_k]
        else:
            rows = rows_NH[places_RK[:, k].clamp(0, len(rows_NH) - 1)]
        used = ids_RK[:, k, None] >= 0
        total += torch.where(used, rows.float() * weights_RK[:, k, None], 0.0)
    return out_RH.copy_(total)
