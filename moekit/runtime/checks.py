"""Checks of a call's arguments: shapes, dtypes, devices, capacity, and values if asked.

They refuse what would give a wrong number, a crash or a hang. Other values of a wrong type raise
Python's own error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moekit.contract import PackedWeights, PermuteExpertsUnpermute, PrepareAndFinalize, Routing
from moekit.contract.fused import FusedSpec
from moekit.errors import (
    BackendBroken,
    CapacityExceeded,
    InvalidInput,
    InvalidProblem,
    WeightsError,
)
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.untrusted.arguments import MAX_TOKENS, TIMEOUT, accept, shown
from moekit.untrusted.arguments import size as size_kind

ID_DTYPES = (torch.int32, torch.int64)
_STRIDED = torch.strided
# Up to this many ids are checked as Python integers, which takes a microsecond.
_FEW = 32
_PACK = "pack them with this kernel's pack()"


def weights_of(problem: MoEProblem) -> dict[str, object]:
    """Return the parts of a problem that packed weights depend on."""
    p = problem
    return {
        "num_local_experts": p.num_local_experts,
        "hidden_size": p.hidden_size,
        "local_intermediate_size": p.local_intermediate_size,
        "scheme": p.quant.name,
        "dtype": p.dtype_name,
        "gated": p.activation.gated,
        "has_bias": p.has_bias,
    }


def check_call(
    problem: MoEProblem,
    experts: PermuteExpertsUnpermute,
    x: Tensor,
    weights: PackedWeights,
    routing: Routing,
    out: Tensor | None,
    by_value: bool,
    made_for: Mapping[str, object],
) -> None:
    """Raise InvalidInput, WeightsError or CapacityExceeded for arguments that are wrong.

    Args:
        by_value: also look into ids and weights, which waits for the device.
        made_for: `weights_of` the problem.
    """
    ids, topk_weights = routing.topk_ids, routing.topk_weights
    shape, device = x.shape, x.device
    if not (x.layout is ids.layout is topk_weights.layout is _STRIDED):
        raise InvalidInput("x, topk_ids and topk_weights must be dense: pass x.to_dense()")
    if len(shape) != 2 or shape[1] != problem.hidden_size:
        raise InvalidInput(f"x has shape {tuple(shape)}, expected (T, {problem.hidden_size})")
    if x.dtype != problem.dtype:
        raise InvalidInput(
            f"x is {x.dtype}, expected {problem.dtype}: convert x, or set dtype or params_dtype"
        )
    wanted = (shape[0], problem.top_k)
    for name, tensor in (("topk_ids", ids), ("topk_weights", topk_weights)):
        if tensor.shape != wanted:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}, expected (T, K) {wanted}")
        if tensor.device != device:
            raise InvalidInput(f"{name} is on {tensor.device}, x on {device}: move one")
    if ids.dtype not in ID_DTYPES:
        raise InvalidInput(f"topk_ids are {ids.dtype}, expected int32 or int64")
    if topk_weights.dtype != torch.float32:
        raise InvalidInput(f"topk_weights are {topk_weights.dtype}, expected float32")
    if device.type != problem.device.type:
        raise InvalidInput(
            f"x is on {device}, expected {problem.device}: move x, or set device in the problem"
        )
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        name = "x" if x.requires_grad else "topk_weights"
        raise InvalidInput(
            f"{name} requires a gradient, which this call does not compute: call a kernel composed "
            f"for problem.replace(training=True), or pass {name}.detach()"
        )
    if getattr(weights, "made_for", None) is not made_for:  # else this kernel has packed them
        check_weights(weights, experts.spec.name, made_for)
    packed = next(iter(weights.experts.values()))
    if packed.device != device:
        raise InvalidInput(f"weights are on {packed.device}, x on {device}: move one")
    if weights.adapters is not None or routing.adapter_ids is not None:
        from moekit.runtime import adapters

        adapters.check(problem, routing, weights.adapters, x, by_value)
    most = problem.max_num_tokens
    if most is not None and shape[0] > most:
        raise CapacityExceeded(
            f"{shape[0]} tokens, but max_num_tokens={most}: split the call, or compose for more"
        )
    if (called := routing.max_tokens) is not None and not (
        shape[0] <= called <= (called if most is None else most)
    ):
        raise InvalidInput(
            f"max_tokens={called}, expected the most tokens that any rank passes to this call: "
            f"this rank passes {shape[0]}, and max_num_tokens={most}"
        )
    if out is not None:
        _check_out(out, x, weights, routing)
    if (logits := getattr(routing, "logits", None)) is not None:  # a fused kernel's argument
        _check_logits(logits, x, experts, by_value)
    elif by_value and ids.numel():
        _check_values(ids, topk_weights, problem.num_physical_experts)


def check_weights(weights: PackedWeights, backend: str, made_for: Mapping[str, object]) -> None:
    """Raise WeightsError for weights of another backend or problem."""
    if not isinstance(weights, PackedWeights) or weights.backend != backend:
        packed = isinstance(weights, PackedWeights)
        found = f"packed for {weights.backend!r}" if packed else type(weights).__name__
        raise WeightsError(f"the weights are {found}, this kernel runs {backend!r}: {_PACK}")
    if (was := weights.made_for) is None:
        return
    if changes := [f"{n}={was[n]!r}, not {v!r}" for n, v in made_for.items() if was[n] != v]:
        raise WeightsError(
            f"the weights were packed for another problem ({', '.join(changes)}): {_PACK}"
        )


def device_of(weights: PackedWeights) -> torch.device:
    """Return the device of packed weights."""
    return next(iter(weights.experts.values())).device


def _check_out(out: Tensor, x: Tensor, weights: PackedWeights, routing: Routing) -> None:
    """Raise InvalidInput unless the result can be written to ``out`` without harm."""
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise InvalidInput(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"expected {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    check_tensor("out", out)
    if not out.is_contiguous() and _meets_itself(out):
        raise InvalidInput(
            f"out has strides {out.stride()}, so several elements share memory: pass a tensor "
            "with memory for each element, for example torch.empty_like(x)"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise InvalidInput("out requires a gradient: call under torch.no_grad()")
    packed = (*weights.experts.values(), *weights.shared.values())
    for tensor in (x, routing.topk_ids, routing.topk_weights, *packed):
        if tensor.layout is _STRIDED and overlap(tensor, out):
            raise InvalidInput(
                "out shares memory with x, the routing or the weights: pass another tensor"
            )


def _check_values(ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
    check_ids(ids, num_experts)
    # The sum is finite unless an entry is not: one cheap pass for the usual case.
    if math.isfinite(float(topk_weights.sum())):
        return
    if not bool(torch.isfinite(topk_weights[ids >= 0]).all()):
        raise InvalidInput(
            "topk_weights hold NaN or infinity where a token has an expert: "
            "look for NaN in the router logits"
        )


def detached(weights: ExpertWeights) -> ExpertWeights:
    """Return ``weights`` without autograd. Raises WeightsError if that would drop a gradient."""
    if torch.is_grad_enabled():
        tracked = [name for name, t in weights.tensors().items() if t.requires_grad]
        if tracked:
            raise WeightsError(
                f"the weights {', '.join(tracked)} require a gradient: pass them unpacked to a "
                "kernel composed with training=True, or pass weights.detach()"
            )
    return weights.detach()


_TOKENS = size_kind(0)


def check_tokens(count: object, name: str = "num_tokens") -> int:
    """Return ``count``. Raises InvalidInput unless it is a number of tokens."""
    if type(count) is int and 0 <= count <= MAX_TOKENS:
        return count
    kept: int = accept({name: _TOKENS}, {name: count}, InvalidInput)[name]
    return kept


def check_tensor(name: str, value: object) -> None:
    """Raise InvalidInput unless ``value`` is a dense tensor, neither sparse nor nested."""
    if not isinstance(value, Tensor) or value.layout is not _STRIDED or value.is_nested:
        raise InvalidInput(f"{name} is {shown(value)}, expected a dense torch.Tensor")


def check_parts(
    dispatcher: PrepareAndFinalize, experts: PermuteExpertsUnpermute, peer_timeout: object
) -> None:
    """Raise InvalidProblem for parts that do not make a kernel."""
    accept({"peer_timeout": TIMEOUT}, {"peer_timeout": peer_timeout})
    if dispatcher.problem != experts.problem.dispatched:
        raise InvalidProblem(
            "dispatcher and experts were made for different problems: make both for the same "
            "problem, or call moekit.compose"
        )
    if dispatcher.spec.format is not experts.spec.format:
        raise InvalidProblem(
            f"the dispatcher gives {dispatcher.spec.format.value} tokens, but the experts take "
            f"{experts.spec.format.value} ones: call moekit.compose, which converts between them"
        )
    if experts.problem.adapters is not None:
        from moekit.contract.adapters import AdapterExperts

        if not isinstance(experts, AdapterExperts):
            raise BackendBroken(
                f"the class that {experts.spec.name!r} declares for adapters does not derive from "
                "AdapterExperts: correct it, or name another backend"
            )
    if dispatcher.spec.fused or experts.spec.fused:
        if id(dispatcher) != id(experts):
            raise InvalidProblem("a fused kernel is dispatcher and experts: pass it for both")
    elif experts.spec.reduces and dispatcher.problem.batch_invariant:
        raise InvalidProblem("the dispatcher and the experts both apply the router weights")


def _check_logits(
    logits: Tensor, x: Tensor, experts: PermuteExpertsUnpermute, by_value: bool
) -> None:
    """Raise InvalidInput if the kernel does not route, or the logits do not fit."""
    spec, p = experts.spec, experts.problem
    if not isinstance(spec, FusedSpec) or spec.routes is None or p.apply_router_weight_on_input:
        raise InvalidInput(f"{spec.name} takes no router logits here: pass moekit.route(logits, K)")
    check_tensor("logits", logits)
    if logits.shape != (x.shape[0], p.num_experts) or logits.device != x.device:
        wanted = f"({x.shape[0]}, {p.num_experts}) on {x.device}"
        raise InvalidInput(f"logits are {shown(logits)}, expected {wanted}")
    if by_value and not bool(logits.amax(dim=1).isfinite().all()):
        raise InvalidInput(
            "the router logits of a token hold NaN or infinity, or only -infinity: check the layer "
            "that computes them"
        )


def check_ids(ids: Tensor, end: int) -> None:
    """Raise InvalidInput unless ids (T, K) are in -1..end-1, and each token's experts differ.

    This waits for the device.
    """
    K = ids.shape[1]
    if ids.numel() <= _FEW:
        rows = ids.tolist()
        if not (rows and K) or (
            min(map(min, rows)) >= 0
            and max(map(max, rows)) < end
            and all(map(K.__eq__, map(len, map(set, rows))))
        ):
            return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < -1 or high >= end:
        raise InvalidInput(
            f"topk_ids span [{low}, {high}], expected -1 (no expert) or 0..{end - 1}"
        )
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token = int(twice.any(dim=1).nonzero()[0])
        raise InvalidInput(
            f"topk_ids of token {token} are {ids[token].tolist()}: a token can name an expert "
            "only once"
        )


def _meets_itself(tensor: Tensor) -> bool:
    """Return True if elements may share memory; False only where strides rule it out."""
    end = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= end:
            return True
        end += (length - 1) * stride
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + tensor.itemsize * (1 + reach)


def check_shared(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)``.

    Raises InvalidInput if its shape or dtype differ from those that x has, or if the function
    changed x in place. Tensors of `torch.inference_mode` count no changes: these are not checked.
    """
    changes = None if torch.compiler.is_compiling() or x.is_inference() else x._version
    extra = function(x)
    if changes is not None and x._version != changes:
        raise InvalidInput(
            "shared experts changed their input in place, and the routed experts still read it: "
            "return a new tensor"
        )
    if extra.shape != x.shape or extra.dtype != x.dtype:
        raise InvalidInput(
            f"shared experts returned {tuple(extra.shape)} {extra.dtype}, "
            f"expected {tuple(x.shape)} {x.dtype}"
        )
    return extra
