"""The core's own backends, announced through the same hooks as those of plugins."""

from __future__ import annotations

from moekit.discovery.hooks import hookimpl
from moekit.discovery.specs import DispatcherSpec, ExpertsSpec
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.quant import SCHEMES


def _describe_torch(problem: MoEProblem) -> str:
    from moekit.backends.cpu_experts import describe

    return "" if problem.batch_invariant else describe(problem)


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="local",
            target="moekit.backends.local:LocalDispatcher",
            format=ActivationFormat.STANDARD,
            devices=("any",),
            moves_tokens=False,
            priority=100,
            graph_safe=True,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
        ),
        DispatcherSpec(
            name="batched_reference",
            target="moekit.backends.reference:BatchedReference",
            format=ActivationFormat.BATCHED,
            devices=("any",),
            moves_tokens=False,
            priority=-100,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
        ),
    ]


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        ExpertsSpec(
            name="torch",
            target="moekit.backends.torch_experts:TorchExperts",
            format=ActivationFormat.STANDARD,
            devices=("any",),
            schemes=frozenset(SCHEMES),
            activations=ACTIVATIONS,
            emulates=True,
            describe=_describe_torch,
            reduces=True,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
        ),
        ExpertsSpec(
            name="reference",
            target="moekit.backends.reference:ReferenceExperts",
            format=ActivationFormat.STANDARD,
            devices=("any",),
            schemes=frozenset(SCHEMES),
            activations=ACTIVATIONS,
            emulates=True,
            reduces=False,
            priority=-100,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
        ),
    ]
