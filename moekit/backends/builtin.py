"""The core's own backends, announced through the same hooks as a plugin's."""

from __future__ import annotations

from dataclasses import replace

from moekit.contract.specs import DispatcherSpec, ExpertsSpec, FormatSpec
from moekit.discovery.entry_points import hookimpl
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.quant import BUILTIN, SCHEMES, QuantScheme


def _describe_torch(problem: MoEProblem) -> str:
    from moekit.backends.cpu_experts import describe

    return "" if problem.batch_invariant else describe(problem)


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    local = DispatcherSpec(
        name="local",
        target="moekit.backends.local:LocalDispatcher",
        training="moekit.backends.local:TrainableLocal",
        format=ActivationFormat.STANDARD,
        devices=("any",),
        moves_tokens=False,
        priority=100,
        ids_dtype="any",
        graph_safe=True,
        deterministic=True,
        batch_invariant=True,
        weights_in_fp32=True,
    )
    batched = replace(
        local,
        name="batched_reference",
        target="moekit.backends.reference:BatchedReference",
        training=None,
        format=ActivationFormat.BATCHED,
        priority=-100,
        graph_safe=False,
    )
    return [local, batched]


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    torch = ExpertsSpec(
        name="torch",
        target="moekit.backends.torch_experts:TorchExperts",
        training="moekit.backends.torch_training:TrainableTorch",
        adapters="moekit.backends.torch_experts:TorchExperts",
        adapters_training="moekit.backends.torch_training:TrainableTorch",
        format=ActivationFormat.STANDARD,
        devices=("any",),
        schemes=SCHEMES,
        activations=ACTIVATIONS,
        emulates=True,
        describe=_describe_torch,
        reduces=True,
        deterministic=True,
        batch_invariant=True,
        weights_in_fp32=True,
    )
    reference = replace(
        torch,
        name="reference",
        target="moekit.backends.reference:ReferenceExperts",
        training="moekit.backends.reference:TrainableReference",
        adapters="moekit.backends.reference:ReferenceExperts",
        adapters_training="moekit.backends.reference:TrainableReference",
        describe=None,
        reduces=False,
        priority=-100,
    )
    return [torch, reference]


@hookimpl
def moekit_schemes() -> list[QuantScheme]:
    return list(BUILTIN.values())


@hookimpl
def moekit_formats() -> list[FormatSpec]:
    """Reserve the names of the formats in `moekit.formats.methods` against plugins."""
    names = (
        "compressed-tensors compressed_tensors fp8 fbgemm_fp8 mxfp4 auto-round awq gptq modelopt "
        "modelopt_fp4 modelopt_mixed"
    )
    target = "moekit.formats.methods:Method"
    return [FormatSpec(name=name, target=target) for name in names.split()]
