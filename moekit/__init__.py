"""moekit composes Mixture-of-Experts layers from interchangeable parts.

A dispatcher (`PrepareAndFinalize`) moves tokens to the ranks of their experts and back; an experts
backend (`PermuteExpertsUnpermute`) runs the many small matrix products. `compose` picks a pair
from whatever is installed, and says why.
"""

from __future__ import annotations

__version__ = "0.1.0"

from moekit.activation import Activation
from moekit.errors import MoekitError
from moekit.kernel import (
    BufferSpec,
    Dispatched,
    InFlight,
    MemoryReport,
    ModularKernel,
    PackedWeights,
    Pending,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Routing,
    Workspace,
)
from moekit.layer import FusedMoE
from moekit.parallel import parallel_config
from moekit.plugins import DispatcherSpec, ExpertsSpec, Registry, hookimpl, registry
from moekit.problem import ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig
from moekit.quant import SCHEMES, OperandQuant, QuantScheme
from moekit.route import route, to_physical
from moekit.select import Explanation, compose, explain
from moekit.weights import ExpertWeights

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
    "Workspace",
    "compose",
    "explain",
    "hookimpl",
    "parallel_config",
    "registry",
    "route",
    "to_physical",
]
