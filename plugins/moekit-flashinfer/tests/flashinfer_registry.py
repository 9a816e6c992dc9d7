"""The plugin's backends on the CPU: the library's stand-in in its place."""

from __future__ import annotations

import dataclasses

from moekit_flashinfer import moekit_dispatchers, moekit_experts, moekit_fused

from moekit.contract.specs import DispatcherSpec
from moekit.discovery.registry import Registry

_TARGETS = {
    "flashinfer_alltoall": ("standin_one_sided", "flashinfer_ranks:OneSided"),
    "flashinfer_alltoall_two_sided": ("standin_two_sided", "flashinfer_ranks:TwoSided"),
}


def dispatchers() -> dict[str, DispatcherSpec]:
    """Return the stand-ins by the names of the true dispatchers."""
    made = {}
    for spec in moekit_dispatchers():
        if spec.name in _TARGETS:
            name, target = _TARGETS[spec.name]
            made[spec.name] = dataclasses.replace(
                spec, name=name, target=target, devices=("cpu",), requires=("triton",)
            )
    return made


def registry() -> Registry:
    """The core's backends, both all-to-alls and the experts."""
    backends = Registry.discover({"MOEKIT_PLUGINS": ""})
    for spec in dispatchers().values():
        backends.register(spec)
    for experts in moekit_experts():
        requires = ("triton", "moekit_kernels")
        backends.register(dataclasses.replace(experts, devices=("cpu",), requires=requires))
    for fused in moekit_fused():
        backends.register(
            dataclasses.replace(
                fused, name="standin_mega", target="flashinfer_ranks:Mega", devices=("cpu",),
                requires=("triton",),
            )
        )  # fmt: skip
    return backends
