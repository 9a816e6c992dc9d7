"""Acme's backends for moekit: their names, and what they can do.

This module imports only `moekit.plugin`, so that listing backends stays cheap and safe. moekit
refuses everything that a spec does not declare, with a reason; the classes need no checks.
"""

from acme_moe import nf4
from moekit.plugin import (
    ActivationFormat,
    DispatcherSpec,
    ExpertsSpec,
    FormatSpec,
    FusedSpec,
    QuantScheme,
    hookimpl,
)


@hookimpl
def moekit_schemes() -> list[QuantScheme]:
    return [nf4.SCHEME]


@hookimpl
def moekit_formats() -> list[FormatSpec]:
    return [FormatSpec(name="acme_nf4", target="acme_moe.nf4_format:Nf4Checkpoint")]


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        ExpertsSpec(
            name="acme",
            target="acme_moe.experts:AcmeExperts",
            format=ActivationFormat.BATCHED,
            reduces=False,
            schemes=frozenset({"none", nf4.SCHEME.name}),
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
        ),
        DispatcherSpec(
            name="acme_all_to_all",
            target="acme_moe.all_to_all:AcmeAllToAll",
            format=ActivationFormat.STANDARD,
            moves_tokens=True,
            spans_hosts=True,
            shared_tokens=False,
            deterministic=True,
            priority=-10,
        ),
    ]


def _routes(how: object) -> list[str]:
    softmax = str(how) in ("softmax", "softmax, renormalized")
    return [] if softmax else [f"chooses experts by softmax alone, not by {how}"]


@hookimpl
def moekit_fused() -> list[FusedSpec]:
    return [
        FusedSpec(
            name="acme_fused",
            target="acme_moe.fused:AcmeFused",
            moves_tokens=True,
            spans_hosts=True,
            shared_tokens=False,
            bias=False,
            deterministic=True,
            routes=_routes,
            priority=-20,
        )
    ]
