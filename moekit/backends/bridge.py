"""Backends fitted to a problem: bridged to another format, padded, or without a transfer.

The classes that do so are imported when they are needed.
"""

from __future__ import annotations

from dataclasses import replace

from moekit.contract import PermuteExpertsUnpermute
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.discovery.answers import create
from moekit.problem import ActivationFormat, MoEProblem


def bridge(
    experts: type[PermuteExpertsUnpermute],
    spec: ExpertsSpec,
    problem: MoEProblem,
    to: ActivationFormat,
) -> PermuteExpertsUnpermute:
    """Create ``experts`` for ``problem``, behind a bridge if their format is not ``to``."""
    spec = spec.native_to(to)
    if spec.format is to:
        return _created(experts, spec, problem)
    from moekit.backends.adapters import BatchedAsStandard, StandardAsBatched

    standard = to is ActivationFormat.STANDARD
    # Every row of the batched layout has one expert, so buffers for top_k=1 are enough.
    inner = _created(experts, spec, problem if standard else problem.replace(top_k=1))
    adapter = BatchedAsStandard if standard else StandardAsBatched
    return adapter(inner, inner.spec.bridged_to(to).made_for(problem), problem)


def _created(
    experts: type[PermuteExpertsUnpermute], spec: ExpertsSpec, problem: MoEProblem
) -> PermuteExpertsUnpermute:
    """Create ``experts`` for ``problem``, padded if the spec needs other sizes."""
    made = spec.padded(problem)
    inner = create(experts, spec, made)
    if made == problem:
        return inner
    from moekit.backends.adapters import PaddedExperts

    return PaddedExperts(inner, problem)


def local_spec(spec: DispatcherSpec) -> DispatcherSpec:
    """Return the spec of a dispatcher that moves nothing, under the name and format of ``spec``.

    It takes the place of a dispatcher that moves tokens where there is nothing to move.
    """
    standard = spec.format is ActivationFormat.STANDARD
    name = "LocalDispatcher" if standard else "LocalBatchedDispatcher"
    return replace(
        spec, target=f"moekit.backends.local:{name}", moves_tokens=False, requires=(), check=None,
        training="moekit.backends.local:TrainableLocal" if standard else None,
        aborts=False, graph_safe=True, deterministic=True, batch_invariant=True,
    )  # fmt: skip
