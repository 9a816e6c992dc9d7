"""One stored matrix as formats see it, and the protocol that a format implements."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

import torch

from moekit.contract.specs import Backend
from moekit.errors import WeightsError
from moekit.formats.format import FLOATS, WORDS, Format, Grid, Part, stored
from moekit.untrusted.arguments import shown

BLOCKS = (128, 64, 32, 16, 256)  # sizes of groups and blocks, the likeliest first
Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype | str]]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The down, gate or up projection of one expert: ``n`` outputs, ``k`` inputs.

    Args:
        name: The name of its weight.
        tensors: The (shape, dtype) of each of its tensors, by suffix; "weight" is the weight's.
        method: The config's quant_method; "" if there is none.
        config: The fields of the quantization config that hold for this module.
        transposed: It is stored (in, out).
        block: ggml's type, if it consists of GGUF blocks.
        inputs: Some matrix of the layer has a scale of its input.
    """

    name: str
    tensors: Tensors
    n: int
    k: int
    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    block: str = ""
    inputs: bool = False

    def called(self, suffix: str) -> str:
        """Return the full name of a tensor."""
        return stored(self.name, suffix)

    def has(self, *suffixes: str) -> bool:
        """Return whether there is a tensor with one of the suffixes."""
        return any(suffix in self.tensors for suffix in suffixes)

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors[suffix][0]

    def dtype(self, suffix: str) -> torch.dtype | str:
        return self.tensors[suffix][1]

    def sides(self, suffix: str) -> tuple[int, int]:
        """Return a tensor's shape; raise WeightsError unless it has two dimensions."""
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise WeightsError(
                f"{self.called(suffix)} must have two dimensions for each expert (got {shape})"
            )
        return shape[0], shape[1]

    def group(self, groups: int, said: int | None = None) -> int:
        """Return the size of one of ``groups`` groups along K; -1 for a single one.

        The tensor decides; the config's size counts where it fits the number of groups.
        """
        if said is not None and (1 if said < 0 else ceil(self.k / said)) == groups:
            return said
        if groups <= 1:
            return -1
        guess = max(1, self.k // groups)
        return next((g for g in BLOCKS if ceil(self.k / g) == groups), guess)


# Fields that may change numbers. Others, such as a calibration's data set, are of no interest.
_NUMBERS = re.compile(
    "bit|group|sym|zero|pack|format|fmt|type|scal|block|act|dynamic|layer|module|rotat|transform|"
    "spars|algo|clip|hadamard|smooth|extra|order|static|scheme|convert|ignore|exclude|quant"
)
_COMMON = frozenset({"quant_method", "kv_cache_scheme", "kv_cache_quant_algo"})
# Lists of modules that are not quantized, by their names in configs and in vLLM's objects.
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")


class Method(Backend):
    """One format: does the config declare it, do the tensors show it, which parts has it.

    Attributes:
        names: The values of quant_method that declare it; of a plugin's format, its spec's name.
        fields: The fields of its configs that are understood or known not to matter.
    """

    interface = "Method"
    names: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()

    @abstractmethod
    def read(self, matrix: Matrix) -> Format | None:
        """Return the format in which ``matrix`` is stored; None if it is not this one's.

        Raises:
            WeightsError: It is, in a variant that moekit does not support.
        """

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        """Return the form in which a quantizer with this config writes a matrix: its parts."""
        raise WeightsError(f"quantization_config of {self.names[0]} does not name its tensors")

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        """Return the fields that hold for a Linear; None if it is not quantized."""
        return None if any(names_module(e, module) for e in skipped(config)) else config

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise WeightsError for a field that may change numbers and is not understood."""
        known = self.fields | _COMMON | frozenset(SKIPPED)
        for name, value in config.items():
            if (
                name not in known
                and _NUMBERS.search(name)
                and value not in (None, False, "", [], {})
            ):
                raise WeightsError(
                    f"quantization_config.{name} is {shown(value)}, which moekit does not "
                    f"understand for {self.names[0]}: if it does not change the experts' numbers, "
                    "remove it from the config; else convert the checkpoint"
                )


class Plain(Method):
    """A weight in bf16, fp16 or fp32. A matrix without tensors counts as one: it is reported."""

    def read(self, matrix: Matrix) -> Format | None:
        plain = not matrix.tensors or (matrix.has("weight") and matrix.dtype("weight") in FLOATS)
        return PLAIN if plain else None


PLAIN = Format(name="unquantized", parts={"weight": Part("weight", FLOATS)})


def words(
    name: str, bits: int, group: int, suffixes: Sequence[str], unit: Grid | None = None, **more: Any
) -> Format:
    """Return a format of integers in words of 32 bits.

    Args:
        suffixes: Of the weight, scales (N, G), zero points (N / 8, G) and g_idx (K,); "" for none.
        unit: Rows and columns in a word of a matrix that is stored (in, out). Default: the matrix
            is stored (out, in), and words hold columns.
        more: Further fields of the format.
    """
    weight, scale, zeros, g_idx = suffixes
    axes, fixed = ("NK", False) if unit is None else ("KN", True)
    parts = {
        "weight": Part(weight, WORDS, unit or (1, 32 // bits), axes, fixed=fixed),
        "scale": Part(scale, FLOATS, (1, group), axes, fixed=fixed),
    }
    if zeros:
        parts["zeros"] = Part(zeros, WORDS, (8, group), axes, fixed=fixed)
    if g_idx:
        parts["g_idx"] = Part(g_idx, WORDS, axes="K")
    return Format(name=name, dtype=f"int{bits}", parts=parts, **more)


def skipped(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries of lists of modules that are not quantized."""
    for key in SKIPPED:
        entries = config.get(key)
        yield from (e for e in entries if isinstance(e, str)) if isinstance(entries, list) else ()


def names_module(entry: str, module: str) -> bool:
    """Return whether an entry names the module, or one that it is in.

    An entry is a name, its last parts, an expression after "re:", or a pattern with wildcards.
    """
    if entry.startswith("re:"):
        return matches(entry[3:], module)
    if "*" in entry:
        return fnmatchcase(module, entry)
    return f".{entry.strip('.')}." in f".{module}."


def matches(pattern: str, module: str) -> bool:
    """Return ``bool(re.match(pattern, module))``. Raises WeightsError for no expression."""
    try:
        return re.match(pattern, module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise WeightsError(
            f"quantization_config holds {shown(pattern)}, which is no regular expression ({error})"
        ) from error
