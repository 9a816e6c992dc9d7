"""The layouts in which adapters of experts are stored, by the names of their tensors.

fused        experts[.base_layer].lora_A   (E r, in), (out, r E): PEFT's target_parameters. Experts
             vary slowest in A and fastest in B. Shapes tell gate_up from down, and names do not
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
from moekit.problem.weights import gate_before_up

Pair = tuple[Tensor, Tensor]

_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
          "w2": "down", "gate_up_proj": "gate_up", "w13": "gate_up"}  # fmt: skip
_STORED = {"w13": "gate_up_proj", "w2": "down_proj"}
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
        tensors: the tensors of the adapter's file, by name.
        config: the content of adapter_config.json: ``r``, ``lora_alpha`` and ``use_rslora``. Fields
            that change numbers and are not supported are refused by name.
        problem: the problem of the layer, for the whole model or for one rank.
        module: the path of the experts in the model, such as "model.layers.3.mlp.experts".
        interleaved: rows of gate and up alternate in the model (gpt-oss).

    Raises WeightsError, which lists names that match nothing, missing experts and wrong shapes.
    """
    if refused := [name for name in _REFUSED if config.get(name)]:
        raise WeightsError(f"the adapter's config has {', '.join(refused)}, which is not supported")
    found, rank = _of_module(tensors, module), int(config["r"])
    try:
        if found.keys() <= {"", "base_layer"}:
            pairs = _fused(list(found.values()), problem, str(config.get("peft_version")))
        else:
            pairs = _by_part(found, problem)
        gate_up = _gate_up(pairs)
    except RuntimeError as error:
        raise WeightsError(f"the adapter's matrices do not fit each other: {error}") from error
    if interleaved and gate_up is not None:
        a, b = gate_up
        gate_up = a, gate_before_up(b)
    scaling = scaling_of(float(config["lora_alpha"]), rank, bool(config.get("use_rslora")))
    made = Adapter.packed(scaling, gate_up, pairs.get("down"))
    made.check(problem)
    if made.rank != rank:
        raise WeightsError(f"the matrices have rank {made.rank}, and the config says r={rank}")
    return made


def tensors_of(adapter: Adapter, module: str, layout: str = "fused") -> dict[str, Tensor]:
    """Return tensors by name, as `read` takes them.

    layout: "fused", as PEFT saves them; "packed"; "experts". In "fused", gate and up share A.
    """
    held, named = adapter.tensors(), list[tuple[str, Tensor, Tensor]]()
    pairs = [(n, held[f"{which}_a"], held[f"{which}_b"]) for which, n in _STORED.items()
             if f"{which}_a" in held]  # fmt: skip
    E, groups = max(map(len, held.values())), 1 if "w13_a" not in held else held["w13_a"].shape[1]
    if layout == "fused" and groups == 2:
        raise WeightsError("gate and up have an A each: PEFT's fused layout has one, use 'packed'")
    for number, (name, a, b) in enumerate(pairs):
        a = a.flatten(1, -2)
        if layout == "packed":
            named.append((f".{name}", a, b))
            continue
        a, b = a.expand(E, -1, -1), b.expand(E, -1, -1)
        if layout == "fused":
            inner = ".base_layer" * (len(pairs) - 1 - number)
            named.append((inner, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)))
        elif name == "gate_up_proj" and groups == 2:
            for part, part_a, part_b in zip(("gate", "up"), a.chunk(2, 1), b.chunk(2, 1)):  # noqa: B905
                named += [(f".{e}.{part}_proj", part_a[e], part_b[e]) for e in range(E)]
        else:
            named += [(f".{e}.{name}", a[e], b[e]) for e in range(E)]
    return {
        f"base_model.model.{module}{where}.lora_{side}.weight": t.contiguous()
        for where, *sides in named
        for side, t in zip("AB", sides, strict=True)
    }


def _of_module(tensors: Mapping[str, Tensor], module: str) -> dict[str, Pair]:
    """Return A and B by their path below the module."""
    sides: dict[str, dict[str, Tensor]] = {}
    others = set()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        path = (match[1] if match else name).removeprefix("base_model.model.")
        if path != module and not path.startswith(f"{module}."):
            others.add(path)
        elif match is None:
            raise WeightsError(f"unknown name: {name} (expected ....lora_A or ....lora_B)")
        elif match[2] in (found := sides.setdefault(path[len(module) + 1 :], {})):
            raise WeightsError(
                f"{path} has several matrices {match[2]}: give one adapter's tensors"
            )
        else:
            found[match[2]] = tensor
    if not sides:
        raise WeightsError(
            f"no tensor is for {module!r}, only for {', '.join(sorted(others)) or 'none'}"
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
    """Return pairs by part. All shapes together tell gate_up from down, and transposed ones."""
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
        why = "is it of this model?" if not fits else "both fit: state peft_version >= 0.19.1"
        names = " or ".join(f"{name} {sizes}" for sizes, name in wanted.items())
        raise WeightsError(f"A and B are {shapes}, and (in, out) should be {names}: {why}")
    (transposed, order), *_ = fits.items()
    made = (as_packed(*pair, E, transposed) for pair in pairs)
    return dict(zip(order, made, strict=True))


def _by_part(found: dict[str, Pair], problem: MoEProblem) -> dict[str, Pair]:
    """Return packed pairs by part, from packed or per-expert tensors."""
    each: dict[str, dict[int, Pair]] = {}  # by expert, -1 for all of them
    made: dict[str, Pair] = {}
    unknown, twice = [], []
    for where, pair in found.items():
        *number, name = where.split(".")
        part = _PARTS.get(name)
        if part is None or len(number) > 1 or (number and not number[0].isdigit()):
            unknown.append(where or "lora_A and lora_B")
            continue
        pairs, expert = each.setdefault(part, {}), int(number[0]) if number else -1
        if expert in pairs:
            twice.append(where)
        pairs[expert] = pair
    if unknown:
        raise WeightsError(f"unknown names: {', '.join(unknown)} (known: {', '.join(_PARTS)})")
    if "gate_up" in each:
        twice += sorted(each.keys() & {"gate", "up"})
    if twice:
        raise WeightsError(f"other tensors are of the same matrices as {', '.join(twice)}")
    for part, pairs in each.items():
        if pairs.keys() == {-1}:
            a, b = pairs[-1]
            made[part] = (a, b) if a.dim() == 3 else (a[None], b[None])
            continue
        lacking = [str(e) for e in range(problem.num_experts) if e not in pairs]
        if lacking or len(pairs) > problem.num_experts:
            what = f"lacks experts {', '.join(lacking)}" if lacking else f"has {len(pairs)} experts"
            raise WeightsError(f"{part} {what}, and the layer has {problem.num_experts}")
        sides = zip(*(pairs[expert] for expert in range(problem.num_experts)), strict=True)
        a, b = (torch.stack(side) for side in sides)
        made[part] = a, b
    return made


def _gate_up(pairs: dict[str, Pair]) -> Pair | None:
    """Return gate and up as one pair: A (E, G r, H) and B (E, 2I, r)."""
    if "gate" not in pairs:
        return pairs.get("gate_up", pairs.get("up"))
    a, b = pairs["gate"]
    up_a, up_b = pairs.get("up", (a, torch.zeros_like(b)))
    return torch.cat([a, up_a], dim=1), torch.cat([b, up_b], dim=1)
