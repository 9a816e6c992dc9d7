"""moekit composes Mixture-of-Experts layers from interchangeable parts.

A dispatcher (`PrepareAndFinalize`) moves tokens to the ranks of their experts and back; an experts
backend (`PermuteExpertsUnpermute`) runs the many small matrix products. `compose` picks a
combination from whatever is installed, and says why.
"""

from __future__ import annotations

from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Routing,
)
from moekit.contract.explanation import Explanation
from moekit.contract.pending import InFlight, Pending
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.discovery.entry_points import hookimpl
from moekit.discovery.registry import Registry, registry
from moekit.errors import MoekitError
from moekit.kernel import ModularKernel
from moekit.layer.layer import FusedMoE
from moekit.layer.parallelism import LayerParallelism, parallel_config
from moekit.layer.replicas import to_physical
from moekit.layer.route import route
from moekit.layer.routes import RoutingLog
from moekit.layer.simulate import simulate_routing
from moekit.problem import ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.activation import Activation
from moekit.problem.quant import SCHEMES, OperandQuant, QuantScheme
from moekit.problem.weights import ExpertWeights
from moekit.runtime.memory import MemoryReport
from moekit.runtime.workspace import Workspace
from moekit.selection.select import compose, explain
from moekit.version import __version__ as __version__

__all__ = [
    "SCHEMES",
    "Activation",
    "ActivationFormat",
    "BufferSpec",
    "DeviceSpec",
    "Dispatched",
    "DispatcherSpec",
    "ExpertWeights",
    "ExpertsSpec",
    "Explanation",
    "FusedMoE",
    "InFlight",
    "LayerParallelism",
    "MemoryReport",
    "ModularKernel",
    "MoEProblem",
    "MoekitError",
    "OperandQuant",
    "PackedWeights",
    "ParallelConfig",
    "Pending",
    "PermuteExpertsUnpermute",
    "PrepareAndFinalize",
    "QuantScheme",
    "Registry",
    "Routing",
    "RoutingLog",
    "Workspace",
    "compose",
    "explain",
    "hookimpl",
    "parallel_config",
    "registry",
    "route",
    "simulate_routing",
    "to_physical",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
