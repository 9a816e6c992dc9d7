"""The stable surface for backend authors: everything that a plugin imports from moekit.

Names listed here change only with a new minor version, after one minor version in which the old
name works and warns. Every other module of moekit may change at any time. `moekit.errors` and
`moekit.testing` keep the same promise.
"""

from moekit.backends.local import local_ids
from moekit.contract import (
    Adapters,
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Unreduced,
)
from moekit.contract.adapters import AdapterExperts, TrainableAdapterExperts
from moekit.contract.fused import FusedSpec
from moekit.contract.fused_kernel import FusedKernel, RouterLogits
from moekit.contract.pending import Pending
from moekit.contract.shared_buffers import CallBuffers, Lease, SharedBuffers
from moekit.contract.sizes import round_up
from moekit.contract.specs import DispatcherSpec, ExpertsSpec, FormatSpec, importable
from moekit.contract.sums import weight_and_reduce
from moekit.contract.training import (
    InputGradients,
    TrainableDispatcher,
    TrainableExperts,
    Wanted,
)
from moekit.discovery.entry_points import hookimpl
from moekit.discovery.library import VendorLibrary
from moekit.discovery.registry import registry
from moekit.problem import (
    SCHEMES,
    Activation,
    ActivationFormat,
    AdapterSlots,
    DeviceSpec,
    ExpertWeights,
    MoEProblem,
    OperandQuant,
    ParallelConfig,
    QuantScheme,
    int4,
    partition,
    quant,
)
from moekit.problem.activation import ACTIVATIONS, apply_activation
from moekit.problem.codes import INT4_ZERO, Codes
from moekit.problem.problem import summary
from moekit.problem.quant import WIRE_SCHEMES
from moekit.problem.quantize import dequantize, quantize, unpack_int4
from moekit.runtime.agreement import (
    Agreement,
    Transfers,
    exchange,
    farewell,
    gpu_fault,
    peer_timeout,
)
from moekit.runtime.environment import ProcessVariables
from moekit.runtime.group import has_backend, resolve
from moekit.runtime.rows import quantize_for_transfer
from moekit.runtime.workspace import Located, Workspace, settle
from moekit.selection.tuned.files import TableFiles, device_file, nearest, size_distance
from moekit.untrusted.arguments import switch
from moekit.untrusted.code import describe as reason_of
from moekit.untrusted.writing import check_writable, replace_file

__all__ = [
    "ACTIVATIONS", "INT4_ZERO", "SCHEMES", "WIRE_SCHEMES", "Activation", "ActivationFormat",
    "AdapterExperts", "AdapterSlots", "Adapters", "Agreement", "BufferSpec", "CallBuffers",
    "Codes", "DeviceSpec", "Dispatched", "DispatcherSpec", "ExpertWeights", "ExpertsSpec",
    "FormatSpec", "FusedKernel", "FusedSpec", "InputGradients", "Lease", "Located", "MoEProblem",
    "OperandQuant", "PackedWeights", "ParallelConfig", "Pending", "PermuteExpertsUnpermute",
    "PrepareAndFinalize", "ProcessVariables", "QuantScheme", "Quantizer", "RouterLogits",
    "Routing", "SharedBuffers", "TableFiles", "TrainableAdapterExperts", "TrainableDispatcher",
    "TrainableExperts", "Transfers", "Unreduced", "VendorLibrary", "Wanted", "Workspace",
    "apply_activation", "check_writable", "dequantize", "device_file", "exchange",
    "farewell", "gpu_fault", "has_backend", "hookimpl", "importable", "int4", "local_ids",
    "nearest", "partition", "peer_timeout", "quant", "quantize", "quantize_for_transfer",
    "reason_of", "registry", "replace_file", "resolve", "round_up", "settle", "size_distance",
    "summary", "switch", "unpack_int4", "weight_and_reduce",
]  # fmt: skip
