"""moekit dispatcher over torch.distributed: tokens are all-gathered, outputs reduce-scattered."""

from __future__ import annotations

from moekit import ActivationFormat, DispatcherSpec, MoEProblem, hookimpl
from moekit.quant import SCHEMES


def _check(problem: MoEProblem) -> list[str]:
    parallel = problem.parallel
    ranks = parallel.ep_size * parallel.tp_size
    if parallel.moves_tokens and ranks % parallel.dp_size:
        return [
            f"the {ranks} ranks (ep_size={parallel.ep_size} x tp_size={parallel.tp_size}) do not "
            f"divide into dp_size={parallel.dp_size} batches of tokens"
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
            wire_schemes=frozenset(n for n, s in SCHEMES.items() if s.activation is not None),
            overlaps=True,
            deterministic=True,
            check=_check,
        )
    ]
