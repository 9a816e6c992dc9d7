"""What a call may not be: shapes, dtypes, devices, capacity, and values where that is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moekit.errors import CapacityExceeded, InvalidInput, WeightsError
from moekit.problem import MoEProblem

if TYPE_CHECKING:
    from moekit.kernel import PackedWeights, PermuteExpertsUnpermute, Routing
    from moekit.weights import ExpertWeights

_IDS = (torch.int32, torch.int64)
_OF_WEIGHTS = (
    "num_local_experts", "hidden_size", "local_intermediate_size", "scheme", "dtype", "gated",
    "has_bias",
)  # fmt: skip


def weights_of(problem: MoEProblem) -> tuple[object, ...]:
    """What of a problem packed weights depend on."""
    p = problem
    return (
        p.num_local_experts, p.hidden_size, p.local_intermediate_size, p.quant.name, p.dtype_name,
        p.activation.gated, p.has_bias,
    )  # fmt: skip


def check_call(
    problem: MoEProblem,
    experts: PermuteExpertsUnpermute,
    x: Tensor,
    weights: PackedWeights,
    routing: Routing,
    out: Tensor | None,
    by_value: bool,
    made_for: tuple[object, ...],
) -> None:
    """Raises InvalidInput, WeightsError or CapacityExceeded for what the call cannot compute.

    by_value: look into ids and weights, which waits for the device. made_for: `weights_of` the
    problem.
    """
    try:
        p, ids, topk_weights = problem, routing.topk_ids, routing.topk_weights
    except AttributeError:
        raise InvalidInput(
            f"routing is {type(routing).__name__}, want moekit.Routing(topk_weights, topk_ids)"
        ) from None
    shape, device = x.shape, x.device
    if len(shape) != 2 or shape[1] != p.hidden_size:
        raise InvalidInput(f"x has shape {tuple(shape)}, want (T, {p.hidden_size})")
    if x.dtype != p.dtype:
        raise InvalidInput(
            f"x is {x.dtype}, the problem's dtype is {p.dtype}: convert x, or compose for it"
        )
    wanted = (shape[0], p.top_k)
    for name, tensor in (("topk_ids", ids), ("topk_weights", topk_weights)):
        if tensor.shape != wanted:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}, want (T, K) {wanted}")
        if tensor.device != device:
            raise InvalidInput(f"{name} is on {tensor.device}, x on {device}: move one")
    if ids.dtype not in _IDS:
        raise InvalidInput(f"topk_ids are {ids.dtype}, want int32 or int64")
    if topk_weights.dtype != torch.float32:
        raise InvalidInput(f"topk_weights are {topk_weights.dtype}, want float32")
    if device.type != p.device.type:
        raise InvalidInput(
            f"x is on {device}, the kernel was composed for {p.device}: "
            "move x, or set device in the problem"
        )
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        name = "x" if x.requires_grad else "topk_weights"
        raise InvalidInput(
            f"{name} requires a gradient, which expert kernels do not compute: call under "
            f"torch.no_grad(), or pass {name}.detach()"
        )
    backend = getattr(weights, "backend", None)
    if backend != experts.spec.name:
        found = (
            f"are {type(weights).__name__}" if backend is None else f"were packed for {backend!r}"
        )
        raise WeightsError(
            f"the weights {found}, this kernel runs {experts.spec.name!r}: pack them with this "
            "kernel's pack()"
        )
    if weights.made_for is not None and weights.made_for != made_for:
        differing = ", ".join(
            f"{name}={was!r}, not {now!r}"
            for name, was, now in zip(_OF_WEIGHTS, weights.made_for, made_for, strict=True)
            if was != now
        )
        raise WeightsError(
            f"the weights were packed for another problem ({differing}): pack them with this "
            "kernel's pack()"
        )
    packed = next(iter(weights.experts.values()))
    if packed.device != device:
        raise InvalidInput(f"weights are on {packed.device}, x on {device}: move one")
    if p.max_num_tokens is not None and shape[0] > p.max_num_tokens:
        raise CapacityExceeded(
            f"{shape[0]} tokens, but max_num_tokens={p.max_num_tokens}: "
            "split the call, or compose for more"
        )
    if out is not None:
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            raise InvalidInput(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
                f"want {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        if _overlap(x, out):
            raise InvalidInput("out shares memory with x; pass another tensor")
    if by_value and ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high >= p.num_physical_experts:
            raise InvalidInput(
                f"topk_ids span [{low}, {high}], want -1 (no expert) or "
                f"0..{p.num_physical_experts - 1}"
            )
        if experts.slabs:
            _check_distinct(ids)
        # The sum is finite unless an entry is not: one cheap pass for the usual case.
        if not (
            math.isfinite(float(topk_weights.sum()))
            or bool(torch.isfinite(topk_weights[ids >= 0]).all())
        ):
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
                f"the weights {', '.join(tracked)} require a gradient, which expert kernels do not "
                "compute: pack under torch.no_grad(), or pass weights.detach()"
            )
    return weights.detach()


def check_tokens(num_tokens: object) -> int:
    """A number of tokens. Raises InvalidInput."""
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
        raise InvalidInput(f"num_tokens is {num_tokens!r}, want a whole number, 0 or more")
    return num_tokens


def _check_distinct(ids: Tensor) -> None:
    """Slabs have room for each token once."""
    ordered = ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)
    if bool(twice.any()):
        token = int(twice.nonzero()[0])
        raise InvalidInput(
            f"topk_ids of token {token} are {ids[token].tolist()}: a token can name an expert "
            "only once"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges that two tensors span meet."""
    if not (a.numel() and b.numel()):
        return False
    (a0, a1), (b0, b1) = (
        (
            t.data_ptr(),
            t.data_ptr()
            + t.itemsize * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))),
        )
        for t in (a, b)
    )
    return a0 < b1 and b0 < a1


def check_shared(extra: Tensor, x: Tensor) -> Tensor:
    """``extra``, what shared experts made of x and what is added to the result: such as x is."""
    if not isinstance(extra, Tensor):
        raise InvalidInput(f"shared experts returned {extra!r}, want {tuple(x.shape)} {x.dtype}")
    if extra.shape != x.shape or extra.dtype != x.dtype:
        raise InvalidInput(
            f"shared experts returned {tuple(extra.shape)} {extra.dtype}, want {tuple(x.shape)} "
            f"{x.dtype}"
        )
    return extra
