"""The layouts in which adapters of experts are stored, by the names of their tensors.

fused        experts[.base_layer].lora_A   (E r, in), (out, r E): PEFT's target_parameters. The
             rank is outside in A and inside in B, and names tell nothing: shapes do
packed       experts.gate_up_proj.lora_A   (E, r, in), (E, out, r); 1 for E: shared by experts
per expert   experts.3.gate_proj.lora_A    (r, in), (out, r)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.lora.adapter import Adapter, scaling_of
from moekit.problem import MoEProblem

Pair = tuple[Tensor, Tensor]

_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
          "w2": "down", "gate_up_proj": "gate_up", "w13": "gate_up"}  # fmt: skip
_NAME = re.compile(r"(.*)\.lora_([AB])(?:\.[^.]+)?(?:\.weight)?")
# Fields of PEFT's config that change an adapter's numbers.
_REFUSED = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "velora_config",
)


def read(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    problem: MoEProblem,
    module: str,
    *,
    interleaved: bool = False,
) -> Adapter:
    """Return the adapter of one layer's experts.

    Args:
        tensors: of the adapter's file, by name.
        config: of adapter_config.json: ``r``, ``lora_alpha`` and ``use_rslora``; what is not
            understood is refused by name.
        problem: the layer's, of the whole model or of one rank.
        module: the path of the experts in the model, such as "model.layers.3.mlp.experts".
        interleaved: rows of gate and up alternate in the model (gpt-oss).

    Raises WeightsError, which lists names that match nothing, missing experts and wrong shapes.
    """
    if refused := [name for name in _REFUSED if config.get(name)]:
        raise WeightsError(f"the adapter's config has {', '.join(refused)}, which is not supported")
    found = _of_module(tensors, module)
    rank = int(config["r"])
    scaling = scaling_of(float(config["lora_alpha"]), rank, bool(config.get("use_rslora")))
    fused = {where: pair for where, pair in found.items() if where in ("", "base_layer")}
    if fused:
        pairs = _fused(list(fused.values()), problem, str(config.get("peft_version")))
    else:
        pairs = _by_part(found, problem)
    if interleaved and "gate_up" in pairs:
        a, b = pairs["gate_up"]
        pairs["gate_up"] = a, torch.cat([b[:, 0::2], b[:, 1::2]], dim=1)
    made = Adapter.packed(scaling, _gate_up(pairs), pairs.get("down"))
    made.check(problem)
    if made.rank != rank:
        raise WeightsError(
            f"the adapter's matrices have rank {made.rank}, its config says r={rank}"
        )
    return made


def tensors_of(adapter: Adapter, module: str, layout: str = "fused") -> dict[str, Tensor]:
    """Return tensors by name, as `read` takes them.

    layout: "fused", as PEFT saves them; "packed"; "experts". In "fused", gate and up share A.
    """
    pairs: dict[str, Pair] = {}
    if adapter.w13_a is not None and adapter.w13_b is not None:
        pairs["gate_up_proj"] = adapter.w13_a.flatten(1, 2), adapter.w13_b
    if adapter.w2_a is not None and adapter.w2_b is not None:
        pairs["down_proj"] = adapter.w2_a, adapter.w2_b
    made: dict[str, Tensor] = {}
    E = max(len(t) for pair in pairs.values() for t in pair)
    groups = 1 if adapter.w13_a is None else adapter.w13_a.shape[1]
    if layout == "fused" and groups == 2:
        raise WeightsError("gate and up have an A each, which PEFT's fused layout has no place for")
    for number, (name, (a, b)) in enumerate(pairs.items()):
        if layout == "packed":
            made |= _named(f"{module}.{name}", a, b)
            continue
        a, b = a.expand(E, -1, -1), b.expand(E, -1, -1)
        if layout == "fused":
            inner = ".base_layer" * (len(pairs) - 1 - number)
            made |= _named(f"{module}{inner}", a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
            continue
        for expert in range(E):
            parts = {name: (a[expert], b[expert])}
            if name == "gate_up_proj" and groups == 2:
                halves = zip(a[expert].chunk(2), b[expert].chunk(2), strict=True)
                parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
            for part, pair in parts.items():
                made |= _named(f"{module}.{expert}.{part}", *pair)
    return {name: t.contiguous() for name, t in made.items()}


def _named(where: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    path = f"base_model.model.{where}"
    return {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}


def _of_module(tensors: Mapping[str, Tensor], module: str) -> dict[str, Pair]:
    """Return A and B by where they are below the module."""
    sides: dict[str, dict[str, Tensor]] = {}
    others = set()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        path = (match[1] if match else name).removeprefix("base_model.model.")
        if match and (path == module or path.startswith(f"{module}.")):
            sides.setdefault(path[len(module) + 1 :], {})[match[2]] = tensor
        else:
            others.add(path)
    if not sides:
        raise WeightsError(
            f"it has nothing for {module!r}, only for {', '.join(sorted(others)) or 'none'}"
        )
    if halves := [where or module for where, found in sides.items() if len(found) < 2]:
        raise WeightsError(f"A or B is missing for {', '.join(halves)}")
    return {where: (found["A"], found["B"]) for where, found in sides.items()}


def as_packed(a: Tensor, b: Tensor, experts: int, transposed: bool) -> Pair:
    """Return A (E, r, in) and B (E, out, r) of PEFT's fused A (E r, in) and B (out, r E).

    transposed: B A is (in, out), as PEFT before 0.19.1 stores it for parameters (E, out, in).
    """
    a_ErK = a.reshape(experts, -1, a.shape[1])
    b_ENr = b.reshape(len(b), -1, experts).permute(2, 0, 1)
    return (b_ENr.mT, a_ErK.mT) if transposed else (a_ErK, b_ENr)


def _fused(pairs: list[Pair], problem: MoEProblem, version: str) -> dict[str, Pair]:
    """Tell gate_up from down, and a parameter from a transposed one, by all shapes together."""
    E, H, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    rows = 2 * inner if problem.activation.gated else inner
    wanted = {(H, rows): "gate_up", (inner, H): "down"}
    said = [(a.shape[-1], b.shape[0]) for a, b in pairs]
    shapes = ", ".join(f"{tuple(a.shape)} and {tuple(b.shape)}" for a, b in pairs)
    if any(t.dim() != 2 or t.shape[dim] % E for pair in pairs for dim, t in enumerate(pair)):
        raise WeightsError(f"A and B are {shapes}, expected ({E} r, in) and (out, r {E})")
    fits: dict[bool, list[str]] = {}
    for transposed in (False, True):
        order = [wanted.get(each[::-1] if transposed else each, "") for each in said]
        if all(order) and len(set(order)) == len(order):
            fits[transposed] = order
    if len(fits) == 2 and [int(n) for n in re.findall(r"\d+", version)[:3]] >= [0, 19, 1]:
        del fits[True]
    if len(fits) != 1:
        why = "is it of this model?" if not fits else "which is in? state peft_version >= 0.19.1"
        names = " or ".join(f"{name} {sizes}" for sizes, name in wanted.items())
        raise WeightsError(f"A and B are {shapes}, and (in, out) should be {names}: {why}")
    (transposed, order), *_ = fits.items()
    made = (as_packed(*pair, E, transposed) for pair in pairs)
    return dict(zip(order, made, strict=True))


def _by_part(found: dict[str, Pair], problem: MoEProblem) -> dict[str, Pair]:
    """Return packed pairs by part, of packed or per-expert tensors."""
    each: dict[str, dict[int, Pair]] = {}
    made: dict[str, Pair] = {}
    unknown = []
    for where, (a, b) in found.items():
        *number, name = where.split(".")
        part = _PARTS.get(name)
        if part is None or len(number) > 1 or (number and not number[0].isdigit()):
            unknown.append(where or "lora_A and lora_B")
        elif number:
            each.setdefault(part, {})[int(number[0])] = a, b
        else:
            made[part] = (a, b) if a.dim() == 3 else (a[None], b[None])
    if unknown:
        raise WeightsError(f"unknown names: {', '.join(unknown)} (known: {', '.join(_PARTS)})")
    for part, pairs in each.items():
        lacking = [str(e) for e in range(problem.num_experts) if e not in pairs]
        if lacking or len(pairs) > problem.num_experts:
            what = f"lacks experts {', '.join(lacking)}" if lacking else f"has {len(pairs)} experts"
            raise WeightsError(f"{part} {what}, and the layer has {problem.num_experts}")
        ordered = [pairs[expert] for expert in range(problem.num_experts)]
        try:
            made[part] = torch.stack([a for a, _ in ordered]), torch.stack([b for _, b in ordered])
        except RuntimeError as error:
            raise WeightsError(f"{part}: matrices of experts differ in shape: {error}") from error
    return made


def _gate_up(pairs: dict[str, Pair]) -> Pair | None:
    """Return gate and up as one: A (E, G r, H) and B (E, 2I, r)."""
    if "gate_up" in pairs or ("gate" not in pairs and "up" not in pairs):
        return pairs.get("gate_up")
    if "gate" not in pairs:
        return pairs["up"]  # of experts without a gate
    (gate_a, gate_b), (up_a, up_b) = pairs["gate"], pairs.get("up", pairs["gate"])
    if "up" not in pairs:
        up_b = torch.zeros_like(up_b)
    return torch.cat([gate_a, up_a], dim=1), torch.cat([gate_b, up_b], dim=1)
