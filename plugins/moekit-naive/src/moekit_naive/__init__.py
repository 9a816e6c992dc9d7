"""moekit's dispatcher over torch.distributed: all-gather tokens, then add up partial outputs."""

from __future__ import annotations

from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, MoEProblem, hookimpl

from .footprint import footprint


def _check(problem: MoEProblem) -> list[str]:
    parallel = problem.parallel
    ranks = parallel.ep_size * parallel.tp_size
    if parallel.moves_tokens and ranks % parallel.dp_size:
        return [
            f"the number of ranks must be a multiple of dp_size (ep_size={parallel.ep_size} x "
            f"tp_size={parallel.tp_size} = {ranks} ranks, dp_size={parallel.dp_size})"
        ]
    return []


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
            footprint=footprint,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
            graph_safe=True,
            check=_check,
        )
    ]
