"""The part of one layer's stored tensors that a rank loads: its formats, cuts and faults."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.names import ExpertNames, layers_in, names_in, no_experts
from moekit.checkpoint.schemes import misfit, neuron_ranges
from moekit.checkpoint.tensors import Tensors
from moekit.errors import WeightsError
from moekit.formats.format import BIAS, Format, Part, filled, stored
from moekit.formats.method import PLAIN, Matrix, Plain
from moekit.formats.methods import format_of, method_of
from moekit.problem import MoEProblem

_Key = tuple[str, int]  # the weight's template, and the expert; 0 for a stack of all
_Held = dict[str, tuple[tuple[int, ...], torch.dtype | str]]


class LayerFormats:
    """The formats of one layer's matrices, on every rank.

    Attributes:
        distinct: Each of them once.
        text: What errors call them: each with one of its matrices, if there are several.
    """

    def __init__(self, formats: Mapping[_Key, Format], layer: int = 0) -> None:
        self._of = dict(formats)
        found: list[tuple[Format, str]] = []
        for (template, expert), format in self._of.items():
            if not any(format is other or format == other for other, _ in found):
                found.append((format, filled(template, layer, expert)))
        self.distinct = tuple(format for format, _ in found) or (PLAIN,)
        each = sorted(f"{format} in {name}" for format, name in found)
        self.text = " and ".join(each) if len(each) > 1 else str(self.distinct[0])

    def of(self, template: str, expert: int) -> Format:
        """Return a matrix's format; of one that is missing, the others'."""
        key = (template, expert if "{expert}" in template else 0)
        return self._of.get(key) or self.distinct[0]


def layer_formats(
    checkpoint: Checkpoint, names: ExpertNames, layer: int, hidden_size: int, intermediate_size: int
) -> LayerFormats:
    """Return the formats in which the experts of ``layer`` are stored. Raises WeightsError if
    moekit does not support one of them."""
    key = (names, layer, hidden_size, intermediate_size)
    if key not in checkpoint.known:
        checkpoint.known[key] = LayerFormats(_read(checkpoint, *key), layer)
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
    method = str(config.get("quant_method") or "").lower()
    # Most matrices of a layer differ in their names alone.
    alike: dict[Any, Format | None] = {}
    found = {}
    for (template, expert), tensors in held.items():
        if (template, expert) in incomplete:
            continue
        n, k = (H, I) if template == names.down else (2 * I if template == names.gate_up else I, H)
        name = filled(template, layer, expert)
        block = checkpoint.entries[name].block if name in checkpoint else ""
        matrix = Matrix(
            name=name, tensors=tensors, n=n, k=k, block=block, inputs=inputs,
            transposed=transposed,
        )  # fmt: skip
        if not block and not Plain().read(matrix):
            matrix = replace(matrix, config=_fields(config, name.removesuffix(".weight")))
        said = matrix.config
        key = (n, k, block, tuple(tensors.items()), repr(said) if said is not config else "")
        if key not in alike:
            format = format_of(replace(matrix, method=method))
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
        called = template.replace("{layer}", str(layer))
        prefix, each, _ = called.partition("{expert}")
        stem = re.escape(called.removesuffix("weight"))
        stem = stem.replace(r"\{expert\}", "(0|[1-9][0-9]{0,8})", 1) if each else f"(){stem}"
        pattern = re.compile(stem + ("(.+)" if stem.endswith(".") else "(?:_(.+))?"), re.DOTALL)
        for name in checkpoint.names(prefix.removesuffix("weight")):
            if (match := pattern.fullmatch(name)) and match[2] != "bias":
                shape = checkpoint.shape(name)
                held[template, int(match[1] or 0)][match[2] or "weight"] = (
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


@dataclass(frozen=True)
class Piece:
    """This rank's rows and columns of one stored matrix (n, k).

    Args:
        template: The matrix's name.
        rows, columns: The part.
        neurons: Its neurons, of all I.
        room: Rows of w13 or columns of w2 that it occupies there, padded with zeros.
        at: Its first row there.
        left: Its first column there.
    """

    template: str
    n: int
    k: int
    rows: range
    columns: range
    neurons: range
    room: int
    at: int = 0
    left: int = 0


class Stored(NamedTuple):
    """A stored tensor: one part of a matrix, of one expert or of all of them."""

    part: Part
    name: str
    expert: list[slice]  # selects the expert if the tensor holds all of them
    shape: tuple[int, ...]


class Share:
    """The part of one layer that a rank loads: names, cuts and format of its matrices.

    Args:
        format: How the matrices are stored. None: as the checkpoint's tensors show.

    Attributes:
        formats: The format of each matrix.
        format: The format that they have in common, or one of them; see `setting_fault`.
        neurons: The rank's neurons; see `neuron_ranges`.
        w13: The pieces of gate, then of up; or pieces of both if their rows alternate.
        w2: The pieces of w2.
        experts: The logical expert of each physical expert.
    """

    def __init__(
        self,
        checkpoint: Tensors,
        names: ExpertNames | str,
        layer: int,
        problem: MoEProblem,
        experts: Sequence[int],
        dequantize: bool,
        format: Format | None = None,
    ) -> None:
        self.checkpoint, self.layer, self.problem = checkpoint, layer, problem
        self.experts, self.dequantize = list(experts), dequantize
        self.names = names_in(checkpoint, names, layer)
        if format:
            self.formats = LayerFormats({("", 0): format})
        else:
            assert isinstance(checkpoint, Checkpoint)
            H, I = problem.hidden_size, problem.intermediate_size
            self.formats = layer_formats(checkpoint, self.names, layer, H, I)
        self.format = self.formats.distinct[0]
        self.neurons = self._neurons()
        self.w13, self.w2 = self._w13(), self._w2()

    def _neurons(self) -> tuple[range, ...]:
        p, weight = self.problem, self.problem.quant.weight
        if weight is not None and weight.group[0] > 1:
            return (p.local_neurons,)
        grids = ((-1, -1), (-1, -1)) if weight is None else (self.format.group, weight.group)
        parallel = p.parallel
        return neuron_ranges(p.intermediate_size, parallel.tp_size, parallel.tp_rank, *grids)

    def _w13(self) -> tuple[Piece, ...]:
        names, H, I = self.names, self.problem.hidden_size, self.problem.intermediate_size
        both = names.gate_up
        # (name, rows, the first one, rows per neuron)
        if names.up and names.gate:
            stored = [(names.gate, I, 0, 1), (names.up, I, 0, 1)]
        elif names.up or not self.problem.activation.gated:
            stored = [(names.up or both, I, 0, 1)]
        elif names.interleaved:
            stored = [(both, 2 * I, 0, 2)]
        else:
            stored = [(both, 2 * I, 0, 1), (both, 2 * I, I, 1)]
        pieces, at = [], 0
        for name, n, base, per in stored:
            for run in self.neurons:
                rows = range(base + per * run.start, base + per * run.stop)
                room = per * self._room(run)
                pieces.append(Piece(name, n, H, rows, range(H), run, room, at=at))
                at += room
        return tuple(pieces)

    def _w2(self) -> tuple[Piece, ...]:
        H, I = self.problem.hidden_size, self.problem.intermediate_size
        rooms = [self._room(run) for run in self.neurons]
        return tuple(
            Piece(self.names.down, H, I, range(H), run, run, room, left=sum(rooms[:index]))
            for index, (run, room) in enumerate(zip(self.neurons, rooms, strict=True))
        )

    def _room(self, run: range) -> int:
        """Return the room of a run; a rank's only run is padded to the rank's share."""
        return len(run) if len(self.neurons) > 1 else self.problem.local_intermediate_size

    @property
    def padded(self) -> bool:
        """Return whether the rank's neurons are padded with zeros."""
        return sum(map(len, self.neurons)) < self.problem.local_intermediate_size

    def of(self, which: str) -> tuple[Piece, ...]:
        """Return the pieces of "w13" or "w2"."""
        return self.w13 if which == "w13" else self.w2

    @property
    def static(self) -> bool:
        """Return whether the scheme needs the checkpoint's activation scales."""
        return self.problem.quant.static

    def roles(self, piece: Piece, expert: int) -> list[str]:
        """Return the roles of the stored tensors that the piece's matrix needs."""
        parts = self.formats.of(piece.template, expert).parts
        roles = [role for role in parts if role != "input_scale" or self.static]
        return [*roles, "bias"] if self.problem.has_bias else roles

    def locate(self, piece: Piece, role: str, expert: int) -> Stored:
        """Return which tensor holds a part of the piece's matrix."""
        parts = self.formats.of(piece.template, expert).parts
        part = BIAS if role == "bias" else parts[role]
        name = self.name(piece.template, expert, part.suffix)
        shape = part.shape(piece.n, piece.k)
        if "{expert}" in piece.template:
            return Stored(part, name, [], shape)
        stack = (self.problem.num_experts, *shape)
        return Stored(part, name, [slice(expert, expert + 1)], stack)

    def name(self, template: str, expert: int, suffix: str = "weight") -> str:
        """Return the name of an expert's part."""
        return filled(stored(template, suffix), self.layer, expert)

    def place(self, expert: int) -> tuple[Path, int, int]:
        """Return a key that sorts experts by their place on disk: file, offset, expert."""
        down = self.locate(self.w2[0], "weight", expert).name
        entry = self.checkpoint.entries[down]
        return entry.file, entry.place, expert

    # -- faults ------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Return everything that prevents this layer from being loaded, by name."""
        held = any(one.name in self.checkpoint for one in self.wanted(self.experts))
        if not held and self.layer not in layers_in(self.checkpoint, self.names):
            return [no_experts(self.checkpoint, self.names, self.layer)]
        if wrong := self.setting_fault():
            return [f"layer {self.layer}: {wrong}"]
        return [*self._tensor_faults(), *self._name_faults()]

    def setting_fault(self) -> str:
        """Return why the problem does not fit the stored format; "" if it does."""
        p, format, scheme = self.problem, self.format, self.problem.quant
        tp, inner = p.parallel.tp_size, p.intermediate_size
        if self.names.up and bool(self.names.gate) != p.activation.gated:
            has = "a gate" if self.names.gate else "no gate"
            return f"activation {p.activation.name} does not fit experts with {has}"
        if self.dequantize:
            if scheme.weight is None:
                return ""
            return f"dequantize=True needs a problem with quant='none' (got {scheme.name!r})"
        instead = "use quant='none' and dequantize=True"
        if len(self.formats.distinct) > 1:
            return f"{several(self.formats.text)}; {instead}"
        if why := misfit(format, scheme, inner, tp):
            return why
        if self.static and "input_scale" not in format.parts:
            return f"the checkpoint has no scales of activations, which {scheme.name} needs"
        weight = scheme.weight
        block = 1 if weight is None or format.group[0] < 0 else max(weight.group[0], 1)
        if any(piece.neurons and piece.rows.start % block for piece in self.w13):
            return f"gate and up have rows in one block of {block}; {instead}"
        return ""

    def _tensor_faults(self) -> list[str]:
        """List tensors of this rank's experts that are missing, or of another shape or dtype."""
        checkpoint, found = self.checkpoint, []
        dtypes: dict[str, str] = {}
        weights = [format.weight for format in self.formats.distinct]
        for part, name, _, shape in self.wanted(sorted(set(self.experts))):
            if name not in checkpoint:
                found.append(f"{name} is missing")
                continue
            dtype = checkpoint.dtype(name)
            if not fits(checkpoint.shape(name), shape, part):
                found.append(f"{name} is {checkpoint.shape(name)}, expected {shape}")
            elif dtype not in part.dtypes:
                allowed = " or ".join(map(str, part.dtypes))
                found.append(f"{name} is {dtype}, expected {allowed}")
            elif part in weights:
                dtypes.setdefault(str(dtype), name)
        if len(dtypes) > 1 and not self.dequantize:
            mixed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            found.append(f"weights have different dtypes: {mixed}")
        return found

    def wanted(self, experts: Sequence[int]) -> Iterator[Stored]:
        """Yield every tensor to read: all of ``experts``, and the input scales of the others."""
        every = range(self.problem.num_experts)
        for piece in {piece.template: piece for piece in (*self.w13, *self.w2)}.values():
            inputs = every if self.static else range(0)
            mine = set(experts)
            for expert in dict.fromkeys((*experts, *inputs)):
                for role in self.roles(piece, expert) if expert in mine else ("input_scale",):
                    yield self.locate(piece, role, expert)
                if "{expert}" not in piece.template:
                    break  # its tensors hold all experts

    def _name_faults(self) -> list[str]:
        """List unknown names under the experts' prefixes, and names that several files have."""
        E, checkpoint = range(self.problem.num_experts), self.checkpoint
        known = {stored.name for stored in self.wanted(E)}
        prefixes = set()
        for template in {piece.template for piece in (*self.w13, *self.w2)}:
            known |= {
                self.name(template, e, suffix)
                for e in E
                for suffix in self.formats.of(template, e).ignored
            }
            stem, each, _ = template.replace("{layer}", str(self.layer)).partition("{expert}")
            prefixes.add((stem.removesuffix("weight"), bool(each)))
        # Beside the experts, whose names go on with a number, there may be tensors of the router.
        present = {
            name
            for prefix, each in prefixes
            for name in checkpoint.names(prefix)
            if not each or name.removeprefix(prefix)[:1].isdecimal()
        }
        found = [f"{name} is unexpected" for name in sorted(present - known)]
        for name in sorted(present & checkpoint.duplicates.keys()):
            files = ", ".join(sorted(file.name for file in checkpoint.duplicates[name]))
            found.append(f"{name} is duplicate, in {files}")
        return found


def several(formats: str) -> str:
    """Say that no scheme has several formats."""
    return f"the experts are stored as {formats}: moekit has no scheme for several formats"


def fits(shape: Sequence[int], wanted: Sequence[int], part: Part) -> bool:
    """Return whether a stored shape is the wanted one.

    Scales and the like may have more or fewer dimensions of 1, and one scale may serve all experts.
    """
    if part.grid == (1, 1):
        return tuple(shape) == tuple(wanted)
    if part.grid == (-1, -1) and prod(shape) == 1:
        return True
    return [n for n in shape if n != 1] == [n for n in wanted if n != 1]
