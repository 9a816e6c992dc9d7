"""The format of each matrix of a layer: every tensor is read under its own description."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.names import ExpertNames
from moekit.errors import WeightsError
from moekit.formats.format import Format, filled
from moekit.formats.matrix import Matrix
from moekit.formats.methods import format_of, method_of
from moekit.formats.plain import Plain, plain

_Key = tuple[str, int]  # the weight's template, and the expert; 0 for a stack of all
_Held = dict[str, tuple[tuple[int, ...], torch.dtype | str]]


class LayerFormats:
    """The formats of one layer's matrices, on every rank.

    Attributes:
        distinct: Each of them once.
    """

    def __init__(self, formats: Mapping[_Key, Format]) -> None:
        self._of = dict(formats)
        found: list[Format] = []
        for format in self._of.values():
            if not any(format is other or format == other for other in found):
                found.append(format)
        self.distinct = tuple(found) or (plain(),)

    @classmethod
    def all(cls, format: Format) -> LayerFormats:
        """Return the formats of a layer whose matrices all have ``format``."""
        return cls({("", 0): format})

    def of(self, template: str, expert: int) -> Format:
        """Return a matrix's format; of one that is missing, the others'."""
        key = (template, expert if "{expert}" in template else 0)
        return self._of.get(key) or self.distinct[0]


def layer_formats(
    checkpoint: Checkpoint, names: ExpertNames, layer: int, hidden_size: int, intermediate_size: int
) -> LayerFormats:
    """Return the formats in which the experts of ``layer`` are stored.

    Raises:
        WeightsError: moekit does not support one of them.
    """
    key = (names, layer, hidden_size, intermediate_size)
    if key not in checkpoint.known:
        checkpoint.known[key] = LayerFormats(_read(checkpoint, *key))
    found: LayerFormats = checkpoint.known[key]
    return found


def _read(
    checkpoint: Checkpoint, names: ExpertNames, layer: int, H: int, I: int
) -> dict[_Key, Format]:
    held = _tensors(checkpoint, names, layer)
    incomplete = _incomplete(held)  # the load reports what is missing
    inputs = any("input_scale" in t or "activation_scale" in t for t in held.values())
    config = checkpoint.quantization
    transposed = _transposed(names, held)
    # Most matrices of a layer differ in their names alone.
    alike: dict[Any, Format | None] = {}
    found = {}
    for (template, expert), tensors in held.items():
        if (template, expert) in incomplete:
            continue
        n, k = (H, I) if template == names.down else (2 * I if template == names.gate_up else I, H)
        name = filled(template, layer, expert)
        block = checkpoint.block(name) if name in checkpoint else ""
        matrix = Matrix(
            name=name, tensors=tensors, n=n, k=k, block=block, inputs=inputs,
            transposed=transposed,
        )  # fmt: skip
        if block or Plain().read(matrix):
            said: Mapping[str, Any] = {}
        else:
            said = _fields(config, name.removesuffix(".weight"))
        method = str(config.get("quant_method") or "").lower()
        key = (n, k, block, tuple(tensors.items()), repr(said) if said is not config else "")
        if key not in alike:
            full = Matrix(**{**vars(matrix), "config": said, "method": method})
            format = format_of(full)
            alike[key] = format.flipped() if format and transposed else format
        if (known := alike[key]) is not None:  # otherwise the load reports its dtype
            found[template, expert] = known
    if held and not found:
        (template, expert), first = next(iter(held.items()))
        raise WeightsError(
            f"{filled(template, layer, expert)} has {', '.join(first)} of "
            f"{', '.join(str(dtype) for _, dtype in first.values())}, a form that moekit does not "
            "know: add the quantization_config to config.json, or convert the checkpoint"
        )
    return found


def _fields(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the fields of the quantization config that hold for a module."""
    method = method_of(config)
    return config if method is None else method.of_module(config, module) or {}


def _tensors(checkpoint: Checkpoint, names: ExpertNames, layer: int) -> dict[_Key, _Held]:
    """Return the (shape, dtype) of each tensor of each matrix, by suffix, without the experts."""
    held: dict[_Key, _Held] = defaultdict(dict)
    for template in filter(None, (names.gate_up, names.gate, names.up, names.down)):
        before, each, after = template.replace("{layer}", str(layer)).partition("{expert}")
        stem = (after if each else before).removesuffix("weight")
        joins = "" if stem.endswith(".") else "_"
        for name in checkpoint.names(before.removesuffix("weight")):
            expert, rest = 0, name.removeprefix(before) if each else name
            if each:
                number = rest.partition(".")[0]
                if not number.isdecimal() or (len(number) > 1 and number[0] == "0"):
                    continue
                expert, rest = int(number), rest.removeprefix(number)
            if not rest.startswith(stem):
                continue
            suffix = rest.removeprefix(stem)
            if joins:
                suffix = (
                    "weight" if not suffix else suffix.removeprefix(joins) * (suffix[0] == joins)
                )
            if suffix and suffix != "bias":
                shape = checkpoint.shape(name)
                held[template, expert][suffix] = (
                    shape if each else shape[1:],
                    checkpoint.dtype(name),
                )
    return held


def _transposed(names: ExpertNames, held: Mapping[_Key, _Held]) -> bool:
    """Return whether matrices are stored (in, out): shapes decide if ``names`` leave it open."""
    if names.transposed is not None:
        return names.transposed
    shapes = [held.get((t, 0), {}).get("weight") for t in (names.gate_up or names.up, names.down)]
    if None in shapes:
        return False
    first, second = (shape[0][-2:] for shape in shapes if shape)
    # H is the inputs of the first matrix and the outputs of the second; not both are square.
    return len(first) == len(second) == 2 and first[1] != second[0] and first[0] == second[1]


def _incomplete(held: Mapping[_Key, _Held]) -> set[_Key]:
    """Return the matrices that lack a tensor which most others with their name have."""
    sets = defaultdict(list)
    for (template, _), tensors in held.items():
        sets[template].append(frozenset(tensors))
    usual = {template: Counter(each).most_common(1)[0][0] for template, each in sets.items()}
    return {key for key, tensors in held.items() if tensors.keys() < usual[key[0]]}
