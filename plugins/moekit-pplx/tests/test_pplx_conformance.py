"""moekit's own judgement of the pplx dispatcher: on GPUs, and its logic on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pplx_standin

import moekit
from moekit.discovery.registry import Registry
from moekit.testing import DispatcherConformance


def standin_registry() -> Registry:
    """The installed backends, and `pplx_standin`: `pplx` over the stand-in for its library."""
    known = moekit.registry()
    copy = Registry(plugins=known.plugins)
    spec = known.dispatcher("pplx")
    target = f"{pplx_standin.__name__}:StandInPplx"
    copy.register(replace(spec, name="pplx_standin", target=target, devices=("cpu",), requires=()))
    return copy


class TestPplx(DispatcherConformance):
    backend = "pplx"


class TestPplxStandIn(DispatcherConformance):
    backend = "pplx_standin"
    backends = standin_registry()
    device = "cpu"
