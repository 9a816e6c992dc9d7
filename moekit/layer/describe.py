"""The text that ``repr`` of a `FusedMoE` layer shows."""

from __future__ import annotations

from moekit.contract import PackedWeights
from moekit.layer.flow import LayerFlow
from moekit.layer.placement import Placement
from moekit.problem import MoEProblem
from moekit.problem.problem import summary

_SHOWN = 4  # experts of a rank


def describe(
    problem: MoEProblem, flow: LayerFlow, placement: Placement, packed: PackedWeights | None
) -> str:
    """Return a line each for the sizes, the combination, the routing, the ranks, the weights."""
    explanation, ranks, parallel = flow.kernel.explanation, flow.ranks, problem.parallel
    assert explanation is not None
    lines = [
        f"{flow.name}: {summary(problem)}",
        f"kernel: {explanation.chosen} ({explanation.why})",
        f"routing: {flow.router.config}",
    ]
    if ranks.size > 1:
        held = placement.on_rank(parallel.ep_rank)
        experts = ", ".join(map(str, held[:_SHOWN])) + ", ..." * (len(held) > _SHOWN)
        outputs = "outputs are summed" if ranks.sums else "outputs are partial sums"
        traffic = "tokens move between ranks" if ranks.moves else outputs
        batches = ranks.size // ranks.copies
        lines.append(
            f"parallelism: rank {ranks.rank} of {ranks.size} (ep_size={parallel.ep_size}, "
            f"tp_size={parallel.tp_size}), {batches} token batch{'es' * (batches > 1)}, experts "
            f"{experts}; {traffic}"
        )
    loaded = "not loaded" if packed is None else f"{packed.nbytes / 2**20:.1f} MiB"
    return "\n".join([*lines, f"weights: {loaded}"])
