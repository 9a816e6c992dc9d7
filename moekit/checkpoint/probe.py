"""Find the format of one layer's experts.

The tensors decide; the quantization config decides what they leave open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch

from moekit.checkpoint import formats
from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.formats import Format, Grid
from moekit.checkpoint.gguf_blocks import block_format
from moekit.checkpoint.names import ExpertNames
from moekit.checkpoint.targets import Matcher
from moekit.errors import WeightsError
from moekit.problem.quant import SCHEMES, OperandQuant
from moekit.untrusted.arguments import shown

_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")
_BLOCKS = (128, 64, 32, 16, 256)
# Dtypes of activations by compressed-tensors' bits and type, and of their scales by group size.
_DTYPES = {
    (8, "float"): "float8_e4m3fn", (8, "int"): "int8", (4, "float"): "float4_e2m1"
}  # fmt: skip
_SCALE_DTYPES = {
    ("float8_e4m3fn", 32): "float8_e8m0fnu",
    ("float4_e2m1", 32): "float8_e8m0fnu",
    ("float4_e2m1", 16): "float8_e4m3fn",
}


def format_of(
    checkpoint: Checkpoint,
    names: ExpertNames,
    layer: int,
    expert: int,
    hidden_size: int,
    intermediate_size: int,
) -> Format:
    """Return the format in which ``expert`` of ``layer`` is stored.

    Raises:
        WeightsError: moekit does not support the format.
    """
    if blocks := _of_blocks(checkpoint, names, layer, expert):
        return blocks
    down, stacked = formats.filled(names.down, layer, expert), "{expert}" not in names.down
    tensors = {
        name: (checkpoint.shape(name)[stacked:], checkpoint.dtype(name))
        for name in checkpoint.names(down.removesuffix("weight"))
    }
    transposed = _transposed(checkpoint, names, layer, expert)
    config, sizes = checkpoint.quantization, (hidden_size, intermediate_size)
    found = Probe(tensors, down, config, *sizes, transposed).format()
    return found.flipped() if transposed else found


def _of_blocks(
    checkpoint: Checkpoint, names: ExpertNames, layer: int, expert: int
) -> Format | None:
    """Return the format of GGUF blocks; None if no matrix consists of blocks."""
    templates = (names.gate_up, names.gate, names.up, names.down)
    held = [formats.filled(template, layer, expert) for template in templates if template]
    types = tuple(checkpoint.block(name) for name in held if name in checkpoint)
    return block_format(types) if any(types) else None


class Probe:
    """Examines one down projection: H outputs, I inputs.

    Args:
        tensors: The (shape, dtype) of each of its tensors, by name.
        down: The name of its weight.
        config: The quantization config.
        transposed: It is stored (in, out).
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype | str]],
        down: str,
        config: Mapping[str, Any],
        H: int,
        I: int,
        transposed: bool = False,
    ) -> None:
        self.tensors, self.template, self.config = tensors, down, config
        self.n, self.k, self.transposed = H, I, transposed
        self.method = (self.config.get("quant_method") or "").lower()

    def format(self) -> Format:
        """Return the format of a matrix that is stored (out, in)."""
        if self.has("qweight"):
            return self._gptq_or_awq()
        if self.has("blocks"):
            return formats.mxfp4_blocks()
        if self.has("weight_packed"):
            return self._weight_packed()
        if not self.has("weight"):
            return formats.plain()  # a later check names every missing tensor
        dtype = self.dtype("weight")
        if dtype in formats.FLOATS:
            return formats.plain()
        if dtype == torch.uint8 and self.has("weight_scale_2"):
            activation = self._of_modelopt_fp4()
            return formats.fp4_bytes("ModelOpt nvfp4", "weight", 16, "weight_scale_2", activation)
        if dtype in (torch.float8_e4m3fn, torch.int8) and isinstance(dtype, torch.dtype):
            return self._eight_bits(dtype)
        raise WeightsError(
            f"{self.name('weight')} is {dtype}, and moekit does not support the quantization "
            f"method {self.method or '(none named)'}"
        )

    def name(self, suffix: str) -> str:
        """Return the name of a part."""
        return formats.stored(self.template, suffix)

    def has(self, suffix: str) -> bool:
        """Return whether there is a part."""
        return self.name(suffix) in self.tensors

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Return the shape of a part."""
        return self.tensors[self.name(suffix)][0]

    def dtype(self, suffix: str) -> torch.dtype | str:
        """Return the dtype of a part."""
        return self.tensors[self.name(suffix)][1]

    def matrix(self, suffix: str) -> tuple[int, int]:
        """Return `shape`; raise WeightsError unless it has two dimensions."""
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise WeightsError(
                f"{self.name(suffix)} must have two dimensions for each expert (got {shape})"
            )
        return shape[0], shape[1]

    def _columns(self, groups: int) -> int:
        """Return the group size of this number of groups along K."""
        if groups <= 1:
            return -1
        guess = max(1, self.k // groups)
        return next((g for g in _BLOCKS if ceil(self.k / g) == groups), guess)

    # -- packed integers

    def _gptq_or_awq(self) -> Format:
        rows, columns = self.matrix("qweight")
        groups = self.matrix("scales")[0] if self.has("scales") else 1
        config, said = self.config, self.config.get("group_size")
        group = self._columns(groups) if said is None else said
        if self.method == "awq" or (
            self.method != "gptq" and (rows, columns * 8) == (self.k, self.n)
        ):
            version = (config.get("version") or "gemm").lower()
            if version != "gemm":
                raise WeightsError(
                    f"AWQ version {version!r} is not supported; convert the checkpoint to 'gemm'"
                )
            return formats.awq(group)
        checkpoint_format = config.get("checkpoint_format") or "gptq"
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise WeightsError(
                f"GPTQ checkpoint_format {checkpoint_format!r} is not supported; convert the "
                "checkpoint to gptq or gptq_v2"
            )
        bits = round(32 * rows / self.k)
        symmetric = config.get("sym")
        if symmetric is None:
            symmetric = not self.has("qzeros")
        if bits not in (4, 8) or (bits == 8 and not symmetric):
            kind = "symmetric" if symmetric else "asymmetric"
            raise WeightsError(
                f"{self.name('qweight')}: {kind} {bits}-bit GPTQ is not supported; use 4 bits, or "
                "8 bits with sym=True"
            )
        # Only act-order needs g_idx. If the config does not mention it, `Reader` looks at it.
        ordered = bool(config.get("desc_act")) and not config.get("static_groups")
        g_idx = config.get("desc_act") is not False and (ordered or self.has("g_idx")) and group > 0
        return formats.gptq(
            bits,
            group,
            zero_points=not symmetric,
            zero_offset=1 if checkpoint_format == "gptq" else 0,
            act_order=g_idx and ordered,
            g_idx=g_idx,
        )

    def _weight_packed(self) -> Format:
        groups = self.matrix("weight_scale")[1] if self.has("weight_scale") else 1
        weights, activation = self._compressed_tensors
        if self.dtype("weight_packed") == torch.uint8:
            name, columns, scale = "mxfp4", 32, ""
            if self.has("weight_global_scale"):
                name, columns, scale = "nvfp4", 16, "weight_global_scale"
            label = f"compressed-tensors {name}"
            return formats.fp4_bytes(label, "weight_packed", columns, scale, activation)
        bits = round(32 * self.matrix("weight_packed")[1] / self.k)
        zero_points = self.has("weight_zero_point")
        if bits not in (4, 8) or (bits == 8 and zero_points):
            raise WeightsError(
                f"{self.name('weight_packed')}: {bits} bits"
                f"{' with zero points' if zero_points else ''} are not supported; use 4 bits, or "
                "8 bits without zero points"
            )
        group = weights.get("group_size") if weights.get("strategy") != "channel" else -1
        return formats.pack_quantized(
            bits,
            group or self._columns(groups),
            activation,
            zero_points=zero_points,
            act_order=self.has("weight_g_idx"),
        )

    # -- bytes

    def _eight_bits(self, dtype: torch.dtype) -> Format:
        scale = next((name for name in _SCALE_NAMES if self.has(name)), "weight_scale")
        group = self._scale_grid(scale) if self.has(scale) else (-1, -1)
        label = "fp8" if dtype == torch.float8_e4m3fn else "int8"
        name = f"{self.method or label} {label}".replace("fp8 fp8", "fp8")
        exponents = (torch.uint8, torch.float8_e8m0fnu)
        powers = group == (1, 32) and self.has(scale) and self.dtype(scale) in exponents
        scale_dtype = "float8_e8m0fnu" if powers else "float32"
        activation = self._activation(dtype, group, scale_dtype)
        inputs = "activation_scale" if self.has("activation_scale") else "input_scale"
        static = activation is not None and activation.static
        return formats.eight_bits(
            name,
            dtype,
            group,
            scale,
            activation,
            scale_dtype=scale_dtype,
            input_scale=inputs if static else "",
        )

    def _scale_grid(self, scale: str) -> Grid:
        shape = self.shape(scale)
        blocks = self.config.get("weight_block_size") or self._compressed_tensors[0].get(
            "block_structure"
        )
        if isinstance(blocks, str):  # "128x128"
            said = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", blocks)
            if not said:
                raise WeightsError(
                    f"block_structure must be of the form '128x128' (got {shown(blocks)})"
                )
            blocks = [int(size) for size in said.groups()]
        if blocks is not None and len(shape) > 1:
            return blocks[0], blocks[1]
        if prod(shape) == 1:
            blocks_by_name = scale.endswith("_inv") and len(shape) > 1 and not self.method
            return (128, 128) if blocks_by_name else (-1, -1)
        if len(shape) > 2:  # (rows, 1, columns, 1)
            shape = tuple(n for n in shape if n != 1)
        if len(shape) > 1 and self.transposed:
            shape = shape[::-1]
        rows, columns = (*shape, 1)[:2]
        row_group = next((g for g in (1, *_BLOCKS) if ceil(self.n / g) == rows), -1)
        return row_group, self._columns(columns)

    def _of_modelopt_fp4(self) -> OperandQuant | None:
        algorithm = (self.config.get("quant_algo") or "NVFP4").upper()
        if algorithm in ("W4A16_NVFP4", "NVFP4_W4A16"):
            return None
        if algorithm in ("NVFP4", "NVFP4_AWQ"):
            return SCHEMES["nvfp4"].activation
        return OperandQuant(dtype=algorithm, group=(-1, -1))  # no scheme has it

    def _activation(self, dtype: torch.dtype, group: Grid, scale_dtype: str) -> OperandQuant | None:
        """Return the intended quantization of activations; by convention if nothing states it."""
        kind, config = str(dtype).removeprefix("torch."), self.config
        has_input = self.has("input_scale") or self.has("activation_scale")
        if self.method == "compressed-tensors":
            return self._compressed_tensors[1]
        if self.method == "modelopt":
            algorithm = (config.get("quant_algo") or "FP8").upper()
            if algorithm.endswith("_WO"):
                return None
            if algorithm == "FP8":
                return OperandQuant(dtype=kind, group=(-1, -1), static=has_input)
        scheme = config.get("activation_scheme") or ("static" if has_input else "dynamic")
        if group == (-1, -1):
            return OperandQuant(dtype=kind, group=(-1, -1), static=scheme == "static")
        return OperandQuant(dtype=kind, group=(1, group[1]), scale_dtype=scale_dtype)

    @cached_property
    def _compressed_tensors(self) -> tuple[Mapping[str, Any], OperandQuant | None]:
        """The (weights, activation) of the config group whose target is this module."""
        _, group = nearest_group(self.config, self.template.removesuffix(".weight"))
        return group.get("weights") or {}, _operand(group.get("input_activations"))


def nearest_group(config: Mapping[str, Any], module: str) -> tuple[int, Mapping[str, Any]]:
    """Return how closely a target names a Linear, and its config group of compressed-tensors.

    Raises:
        WeightsError: A target is no regular expression that moekit supports.
    """
    matcher, found = Matcher(), (-1, dict[str, Any]())
    for group in (config.get("config_groups") or {}).values():
        near = [_nearness(target, module, matcher) for target in group.get("targets") or ()]
        found = max(found, (max(near, default=0), group), key=lambda each: each[0])
    return found


def _nearness(target: str, module: str, matcher: Matcher) -> int:
    """Return how closely a config group's target names the module; 0 if it does not."""
    if not target.startswith("re:"):
        return 2 if module.endswith(target) else int(target == "Linear")
    try:
        return 2 if matcher.matches(target[3:], module) else 0
    except ValueError as error:
        raise WeightsError(f"config_groups targets {shown(target)}: {error}") from error


def _operand(args: Mapping[str, Any] | None) -> OperandQuant | None:
    """Convert compressed-tensors' QuantizationArgs of activations."""
    if not args:
        return None
    bits, kind = args.get("num_bits") or 8, args.get("type") or "int"
    dtype = _DTYPES.get((bits, kind), f"{kind}{bits}")
    dynamic, columns = bool(args.get("dynamic")), args.get("group_size") or -1
    group = {
        "token": (1, -1),
        "channel": (1, -1),
        "group": (1, columns),
        "tensor_group": (1, columns),
    }.get(args.get("strategy") or ("token" if dynamic else "tensor"), (-1, -1))
    scale_dtype = _SCALE_DTYPES.get((dtype, group[1]), "float32")
    return OperandQuant(dtype=dtype, group=group, static=not dynamic, scale_dtype=scale_dtype)


def _transposed(checkpoint: Checkpoint, names: ExpertNames, layer: int, expert: int) -> bool:
    """Return whether matrices are stored (in, out): shapes decide if ``names`` leave it open."""
    if names.transposed is not None:
        return names.transposed
    templates = (names.gate_up or names.up, names.down)
    full = [formats.filled(template, layer, expert) for template in templates]
    if not all(name in checkpoint for name in full):
        return False
    first, second = (checkpoint.shape(name)[-2:] for name in full)
    # H is the inputs of the first matrix and the outputs of the second; not both are square.
    return first[-1] != second[0] and first[0] == second[-1]
