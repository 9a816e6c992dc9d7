"""moekit dispatcher over torch.distributed: tokens are all-gathered, outputs reduce-scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, MoEProblem, hookimpl

if TYPE_CHECKING:
    from moekit.plugin import Footprint


def _check(problem: MoEProblem) -> list[str]:
    parallel = problem.parallel
    ranks = parallel.ep_size * parallel.tp_size
    if parallel.moves_tokens and ranks % parallel.dp_size:
        return [
            f"the {ranks} ranks (ep_size={parallel.ep_size} x tp_size={parallel.tp_size}) do not "
            f"divide into dp_size={parallel.dp_size} batches of tokens"
        ]
    return []


def _footprint(problem: MoEProblem) -> Footprint:
    from .footprint import footprint

    return footprint(problem)


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="naive",
            target="moekit_naive.dispatcher:NaiveDispatcher",
            format=ActivationFormat.STANDARD,
            devices=("cpu", "cuda"),
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            overlaps=True,
            spans_hosts=True,
            aborts=True,
            footprint=_footprint,
            deterministic=True,
            graph_safe=True,
            check=_check,
        )
    ]
