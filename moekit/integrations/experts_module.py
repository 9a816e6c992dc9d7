"""Read the problem and the weights of a transformers experts module.

This relies on what transformers' own experts implementations use: the parameters `gate_up_proj`
(`up_proj` without a gate) and `down_proj` with their `_bias` and `_scale_inv`, the flag
`is_transposed`, and the functions `_apply_gate` or `act_fn` between the two products. DBRX has
parameters w1, v1 and w2, with all experts in dimension 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moekit.errors import Unsupported, WeightsError
from moekit.problem import DTYPES, MoEProblem
from moekit.problem.activation import Activation, apply_activation
from moekit.problem.quant import QuantScheme
from moekit.problem.weights import ExpertWeights

_NON_GATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2")


def read(
    module: nn.Module, dtype: torch.dtype, top_k: int, quant: QuantScheme, on_input: bool
) -> tuple[MoEProblem, ExpertWeights]:
    """Return the module's problem, and its weights as views if possible, for `converted`.

    The problem has the input's ``dtype`` if the weights are quantized already; otherwise it has
    the weights' dtype and the scheme ``quant``. on_input: the router weight scales the token
    instead of the result.

    Raises:
        Unsupported: moekit cannot compute the module; the error names its class.
        WeightsError: A parameter has no data.
    """
    if on_input and top_k != 1:
        raise _unsupported(
            module,
            "router weights scale its input, which moekit computes for one expert of each token "
            f"(got num_experts_per_tok={top_k})",
        )
    weights, gated = weights_of(module)
    activation, interleaved = _activation(module, gated)
    weights = replace(weights, interleaved=interleaved)
    stored = weights.w13_scale is not None
    columns = 2 if weights.w13.dtype == torch.uint8 else 1  # in an element
    problem = MoEProblem(
        num_experts=weights.num_experts,
        top_k=top_k,
        hidden_size=weights.w13.shape[2] * columns,
        intermediate_size=weights.w2.shape[2] * columns,
        dtype=dtype if stored else weights.w13.dtype,
        activation=activation,
        has_bias=weights.w13_bias is not None,
        apply_router_weight_on_input=on_input,
        device=weights.w13.device,
    )
    if stored and quant.weight is not None:
        already = f"its weights are quantized already: call install() without quant={quant.name!r}"
        raise _unsupported(module, already)
    if stored:
        return problem.replace(quant=_stored_scheme(module, weights)), weights
    return problem.replace(quant=quant), weights


def converted(weights: ExpertWeights, problem: MoEProblem) -> ExpertWeights:
    """Return the weights in the problem's dtype and scheme, unless transformers quantized them."""
    if weights.w13_scale is not None:
        return weights
    if problem.quant.weight is None:
        return weights._map(lambda t: t.to(problem.dtype))
    # Blocks of scales need gate and up as halves.
    return weights.canonical(problem.replace(quant="none")).quantize(problem.quant)


def _unsupported(module: nn.Module, reason: str) -> Unsupported:
    return Unsupported(f"moekit cannot run {type(module).__name__}: {reason}", [reason])


def weights_of(module: nn.Module) -> tuple[ExpertWeights, bool]:
    """Return the parameters as w13 (E, 2I or I, H) and w2 (E, H, I), and if there is a gate.

    Gradients flow through them. `read` knows whether gate and up alternate.
    """
    if hasattr(module, "v1"):
        return _dbrx_weights(module), True
    gated = getattr(module, "gate_up_proj", None) is not None
    first = "gate_up_proj" if gated else "up_proj"
    found = _parameters(module, first, "down_proj")
    w13, w2 = found[first], found["down_proj"]
    scales = [found.get(f"{name}_scale_inv") for name in (first, "down_proj")]
    known = list(DTYPES.values()) if None in scales else [torch.float8_e4m3fn]
    if all(s is not None and s.dtype == torch.float8_e8m0fnu for s in scales):
        known.append(torch.int8)  # pairs of fp4
    if not {w13.dtype, w2.dtype} <= set(known) or w13.dim() != 3 or w2.dim() != 3:
        got = " and ".join(f"{w.dtype} {tuple(w.shape)}" for w in (w13, w2))
        raise _unsupported(
            module,
            f"{first} and down_proj must have 3 dimensions and be of {', '.join(DTYPES)}, fp8 with "
            f"scales, or fp4 with scales in e8m0 (got {got}); load the model dequantized",
        )
    stated = getattr(module, "is_transposed", None)  # which Llama 4's module lacks
    if w13.shape[2] != w2.shape[1] if stated is None else stated:
        w13, w2 = w13.mT, w2.mT
    w13_scale, w2_scale = (None if scale is None else scale.float() for scale in scales)
    if w13.dtype == torch.int8:
        w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    weights = ExpertWeights(
        w13[: getattr(module, "num_routed_experts", None)],  # LongCat-Flash's identity experts
        w2,
        w13_bias=found.get(f"{first}_bias"),
        w2_bias=found.get("down_proj_bias"),
        w13_scale=w13_scale,
        w2_scale=w2_scale,
    )
    return weights, gated


def _dbrx_weights(module: Any) -> ExpertWeights:
    found = _parameters(module, "w1", "v1", "w2")
    shape = module.moe_num_experts, -1, module.hidden_size
    w1, v1, w2 = (found[name].view(shape) for name in ("w1", "v1", "w2"))
    return ExpertWeights(torch.cat([w1, v1], dim=1), w2.mT)


def _parameters(module: nn.Module, *names: str) -> dict[str, Tensor]:
    """Return the parameters by name; refuse other ones, and ones without data."""
    found: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    found |= {name: getattr(module, name) for name in getattr(module, "parametrizations", ())}
    known = {f"{name}{part}" for name in names for part in ("", "_bias", "_scale_inv")}
    if not set(names) <= set(found):
        raise _unsupported(
            module,
            "it must have the parameters gate_up_proj (or up_proj) and down_proj of transformers' "
            f"experts interface (found: {', '.join(found) or 'none'})",
        )
    if unknown := sorted(set(found) - known):
        raise _unsupported(module, f"its parameters {', '.join(unknown)} are unknown")
    if getattr(module, "has_post_expert_norm", False):
        raise _unsupported(module, "no backend has a norm after each expert")
    for name, p in found.items():
        if type(p) not in (nn.Parameter, Tensor):
            raise _unsupported(
                module,
                f"{name} must be a plain tensor that is local to this rank (got "
                f"{type(p).__name__})",
            )
        if p.device.type == "meta":
            raise WeightsError(
                f"{name} of {type(module).__name__} has no data (device meta), perhaps because of "
                "install(free_original=True): load the model again, or give it weights with "
                "load_state_dict(..., assign=True)"
            )
    return found


def _stored_scheme(module: Any, weights: ExpertWeights) -> str:
    """Return the scheme of transformers' FP8 experts, which may hold fp4."""
    if weights.w13.dtype == torch.uint8:
        return "mxfp4_w4a16"
    block, activation = getattr(module, "block_size", None), module.activation_scheme
    if block is None or tuple(block) != (128, 128) or activation != "dynamic":
        raise _unsupported(
            module,
            f"fp8 with block_size={block} and {activation} activations; moekit supports blocks of "
            "(128, 128) and dynamic activations",
        )
    return "fp8_block"


def _activation(module: nn.Module, gated: bool) -> tuple[Activation, bool]:
    """Find what the module computes between its products, and whether gate and up alternate.

    Names do not decide: every candidate is compared with the module on values beyond all limits
    that the module mentions. So a clamp, a factor or an order that moekit does not know is
    refused and never dropped.
    """
    numbers = {n: float(v) for n, v in vars(module).items() if isinstance(v, (int, float))}
    limits = sorted({v for n, v in numbers.items() if "limit" in n and 0 < v < math.inf})
    alphas = sorted({v for n, v in numbers.items() if "alpha" in n})
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(96, 64, generator=generator, dtype=torch.float32, device="cpu")
    h[32:64] *= 4 * max(limits, default=8.0)
    h[64:] *= 1000.0
    h = h.to(next(module.parameters()).device)
    with torch.no_grad():
        want = _between(module, gated)(h)
    for candidate in _candidates(gated, limits, alphas):
        for interleaved in (False, True) if gated else (False,):
            halves = torch.cat([h[:, 0::2], h[:, 1::2]], dim=1) if interleaved else h
            got = apply_activation(halves, candidate)
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5):
                return candidate, interleaved
    raise _unsupported(
        module,
        "what it computes between its two products is none of moekit's activations "
        f"(act_fn {getattr(module, 'act_fn', None)!r}, limits {limits}, alphas {alphas})",
    )


def _between(module: Any, gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the module's function between its two products."""
    if hasattr(module, "_apply_gate") and gated:
        return module._apply_gate  # type: ignore[no-any-return]
    act: Callable[[Tensor], Tensor] = getattr(module, "act_fn", None) or module.activation_fn
    return (lambda h: act(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]) if gated else act


def _candidates(gated: bool, limits: list[float], alphas: list[float]) -> Iterator[Activation]:
    if not gated:
        yield from map(Activation, _NON_GATED)
        return
    for limit in (None, *limits):
        yield Activation("silu", limit=limit)
    yield from map(Activation, ("gelu", "gelu_tanh", "relu2_and_mul"))
    for limit in limits:
        yield Activation("swiglustep", limit=limit)
    for alpha, limit in product(alphas, limits):
        yield Activation("swigluoai", alpha=alpha, limit=limit)
