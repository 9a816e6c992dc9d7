"""The hooks by which plugins, and the core itself, announce their backends."""

from __future__ import annotations

import pluggy

from moekit.contract.fused import FusedSpec
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.problem.quant import QuantScheme

GROUP = "moekit"
hookimpl = pluggy.HookimplMarker(GROUP)
"""Decorates the functions of a plugin: `moekit_dispatchers`, `moekit_experts` and so on."""
_hookspec = pluggy.HookspecMarker(GROUP)


class MoekitSpecs:
    """The hooks a plugin may implement."""

    @_hookspec
    def moekit_dispatchers(self) -> list[DispatcherSpec]:  # type: ignore[empty-body]
        """Return the dispatchers that this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_dispatchers():
                return [moekit.DispatcherSpec(name="acme", target="acme_moe.dispatcher:Acme", ...)]
        """

    @_hookspec
    def moekit_experts(self) -> list[ExpertsSpec]:  # type: ignore[empty-body]
        """Return the experts backends that this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_experts():
                return [moekit.ExpertsSpec(name="acme", target="acme_moe.experts:Acme", ...)]
        """

    @_hookspec
    def moekit_schemes(self) -> list[QuantScheme]:  # type: ignore[empty-body]
        """Return the quantization schemes that this plugin adds, as in docs/backends.md."""

    @_hookspec
    def moekit_fused(self) -> list[FusedSpec]:  # type: ignore[empty-body]
        """Return the kernels that are dispatcher and experts at once, as in docs/backends.md."""
