"""Tuned tables: launch plans measured by shape, one file per device (``tuned/nvidia-h200.json``).

The user's tables (`moekit.plugin.TableFiles` says where) count before the shipped ones.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from moekit.plugin import MoEProblem, TableFiles, nearest, size_distance

from .plans import Direct, Gathered, Sorted, TilePlan, plan_from_text

_SIZES = ("experts", "hidden", "intermediate")
# Schemes that another one's tiles serve: the same operands, scales that serve all of K, activations
# quantized after GEMM 1 (fp8_tensor_static quantizes them in GEMM 1).
_TILES_OF = {"fp8_tensor": "fp8_channel_token"}

# The device whose tables serve other devices of its compute capability: its plans beat the rules,
# which were fitted on few shapes (docs/measured.md).
_SERVES: Mapping[object, str] = {(9, 0): "NVIDIA H200"}

Measured = tuple[float, TilePlan]
"""Rows per expert, and the plan that was fastest there."""


@dataclass(frozen=True)
class Entry:
    """The measurements of one problem: `table_key` and the plans."""

    key: Mapping[str, Any]
    plans: Sequence[Measured]


def table_key(problem: MoEProblem) -> dict[str, Any]:
    """Return what identifies an entry: sizes may be near, the rest must be equal."""
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


_KEY_TYPES = dict.fromkeys(_SIZES, int) | {"scheme": str, "dtype": str, "gated": bool, "bias": bool}


def parse(table: Any) -> list[Entry]:
    """Read a table's JSON. Raises ValueError, TypeError or LookupError for one that is wrong.

    Entries measured with this version of triton come last, so they count before others.
    """
    entries = sorted(table["entries"], key=lambda e: e.get("triton") == triton.__version__)
    return [_entry(values) for values in entries]


def _entry(values: Mapping[str, Any]) -> Entry:
    key = {name: values[name] for name in _KEY_TYPES}
    for name, kind in _KEY_TYPES.items():
        if type(key[name]) is not kind or kind is int and key[name] < 1:
            above = ", at least 1" if kind is int else ""
            raise ValueError(f"{name}={key[name]!r} must be of type {kind.__name__}{above}")
    plans = [(float(each["rows_per_expert"]), _plan(each["plan"])) for each in values["plans"]]
    if not plans or min(rows for rows, _ in plans) <= 0:
        raise ValueError("plans need a positive rows_per_expert each, and there must be one")
    return Entry(key, plans)


def _plan(text: str) -> TilePlan:
    plan = plan_from_text(text)
    if isinstance(plan, Direct) or not isinstance(plan, (Gathered, Sorted)):
        raise ValueError(f"plan={text!r} is not of a kind that is tuned")
    return plan


def _merge(tables: Iterable[list[Entry]]) -> list[Entry]:
    """Join the entries of a key; the later plan wins where both have one for the same rows."""
    plans: dict[str, dict[float, TilePlan]] = {}
    keys = {}
    for entry in itertools.chain(*tables):
        keys[str(entry.key)] = entry.key
        plans.setdefault(str(entry.key), {}).update(entry.plans)
    by_rows = operator.itemgetter(0)
    return [Entry(key, sorted(plans[name].items(), key=by_rows)) for name, key in keys.items()]


FILES: TableFiles[list[Entry], list[Entry]] = TableFiles(
    shipped=Path(__file__).with_name("tuned"),
    parse=parse,
    merge=_merge,
    remedy="run `python -m moekit tune triton`",
    owner="triton",
)


def measured_plans(problem: MoEProblem) -> Sequence[Measured]:
    """Return the plans of the nearest measured shape, none if no shape is near.

    An entry of the problem's own scheme comes before one of a scheme with the same tiles. With a
    bias fewer kinds of tiles are possible (`capabilities.specializable`): an entry measured with a
    bias serves only problems with one; these fall back to entries without. A device without a near
    shape takes the plans of another device of its compute capability (`_SERVES`).
    """
    if not problem.device.name:
        return ()
    for device in (problem.device.name, _SERVES.get(problem.device.capability)):
        if device is not None and (plans := nearest_plans(FILES.known(device), problem)):
            return plans
    return ()


def has_shape(problem: MoEProblem) -> bool:
    """Return whether this very shape was measured on the problem's device."""
    key = table_key(problem)
    return any(entry.key == key for entry in FILES.known(problem.device.name))


def nearest_plans(entries: Sequence[Entry], problem: MoEProblem) -> Sequence[Measured]:
    """Return the plans of the entry that is nearest to ``problem``, none if none is near."""
    wanted = table_key(problem)
    sizes = [wanted[name] for name in _SIZES]
    for scheme in (wanted["scheme"], _TILES_OF.get(wanted["scheme"])):
        for bias in (True, False) if wanted["bias"] else (False,):
            same = wanted | {"scheme": scheme, "bias": bias}
            found = nearest(
                [e for e in entries if all(e.key[n] == same[n] for n in same if n not in _SIZES)],
                lambda entry: size_distance((entry.key[name] for name in _SIZES), sizes),
            )
            if found is not None:
                return found[0].plans
    return ()
