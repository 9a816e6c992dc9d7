"""Measured plans by shape, as the package ships them for a device (`tuned/<device>.json`)."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from moekit.plugin import MoEProblem

# A shape is close enough to a measured one if no size differs by more than this factor.
_NEAR = 2.0
_SIZES = ("experts", "hidden", "intermediate")
# Schemes that another's tiles serve: the same operands, scales that serve all of K, and activations
# that are quantized behind GEMM 1 (fp8_tensor_static's are in it).
_TILES_OF = {"fp8_tensor": "fp8_channel_token"}


def table_key(problem: MoEProblem) -> dict[str, Any]:
    """What a table's entry was measured for; sizes may be near, the rest must be equal."""
    p = problem
    return {
        "experts": p.num_local_experts,
        "hidden": p.hidden_size,
        "intermediate": p.local_intermediate_size,
        "scheme": p.quant.name,
        "dtype": p.dtype_name,
        "gated": p.activation.gated,
        "bias": p.has_bias,
    }


def nearest_plan(problem: MoEProblem, per_expert: float) -> Mapping[str, Any] | None:
    """What was measured for the nearest shape and, on a log scale, rows per expert, if any.

    A scheme's own entries go before those of one whose tiles serve it, too (`_TILES_OF`).
    With a bias fewer kinds of tiles are possible (`specializable`): what was measured with one
    serves no other problem, but a problem with a bias takes the others' where it has none.
    """
    key = table_key(problem)
    schemes = key["scheme"], _TILES_OF.get(key["scheme"])
    same = [name for name in key if name not in (*_SIZES, "scheme", "bias")]
    near: list[tuple[bool, bool, float, Mapping[str, Any]]] = []
    for entry in entries(problem.device.name):
        apart = [abs(math.log(entry[name] / key[name])) for name in _SIZES]
        if any(entry[name] != key[name] for name in same) or entry["bias"] > key["bias"]:
            continue
        if entry["scheme"] not in schemes:
            continue
        if max(apart) <= math.log(_NEAR):
            other = entry["scheme"] != key["scheme"], entry["bias"] != key["bias"]
            near.append((*other, sum(apart), entry))
    if not near:
        return None
    *_, entry = min(near, key=lambda found: found[:3])
    wanted = math.log(max(per_expert, 1e-3))

    def apart_from(plan: Mapping[str, Any]) -> float:
        return abs(math.log(plan["rows_per_expert"]) - wanted)

    return min(entry["plans"], key=apart_from)


@functools.cache
def entries(device_name: str) -> tuple[Mapping[str, Any], ...]:
    """Entries shipped for a device, none for an unknown one."""
    return tuple(_read(device_name)) if device_name else ()


def _read(device_name: str) -> Iterator[Mapping[str, Any]]:
    name = re.sub(r"\W+", "_", device_name) + ".json"
    file = resources.files("moekit_triton") / "tuned" / name
    if file.is_file():
        yield from json.loads(file.read_text())["entries"]
