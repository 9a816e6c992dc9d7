"""Acme's backends for moekit: what they are called, and what they can do.

Nothing else is imported here, so that listing backends stays cheap and safe. Whatever a spec does
not declare, moekit refuses with a reason; the classes never have to check.
"""

from moekit import ActivationFormat, DispatcherSpec, ExpertsSpec, hookimpl


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        ExpertsSpec(
            name="acme",
            target="acme_moe.experts:AcmeExperts",
            format=ActivationFormat.BATCHED,
            reduces=False,
            activations=frozenset({"silu", "gelu", "gelu_tanh"}),
            silu_clamp=False,
            bias=False,
            deterministic=True,
            priority=-10,
        )
    ]


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="acme_sorted",
            target="acme_moe.dispatcher:AcmeSorted",
            format=ActivationFormat.STANDARD,
            moves_tokens=False,
            deterministic=True,
            priority=-10,
        )
    ]
