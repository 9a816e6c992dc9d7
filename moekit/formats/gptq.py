"""GPTQ, AWQ (words hold eight rows in another order), and AutoRound, which packs as either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit.errors import WeightsError
from moekit.formats.format import Format
from moekit.formats.method import Matrix, Method, matches, skipped, words
from moekit.problem.int4 import AWQ_ORDER
from moekit.untrusted.arguments import shown


class Awq(Method):
    """``qweight``, ``qzeros`` and ``scales``; without qzeros, 8 is subtracted."""

    names = ("awq",)
    fields = frozenset({
        "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend",
        "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "sym", "desc_act",
        "block_name_to_quantize",
    })  # fmt: skip

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        """AutoAWQ leaves out every module whose name contains an entry."""
        return None if any(entry in f"{module}." for entry in skipped(config)) else config

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.has("qweight") or matrix.method not in ("", "awq"):
            return None
        version = (matrix.config.get("version") or "gemm").lower()
        if version != "gemm":
            raise WeightsError(
                f"AWQ version {version!r} is not supported; convert the checkpoint to 'gemm'"
            )
        return _awq_of(matrix)

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise WeightsError(f"quantization_config.bits is {shown(bits)}, expected 4")
        group = config.get("group_size") or config.get("q_group_size") or -1
        return _awq(group, config.get("zero_point") is not False)


def _awq_of(matrix: Matrix) -> Format:
    groups = matrix.sides("scales")[0] if matrix.has("scales") else 1
    said = matrix.config.get("group_size") or matrix.config.get("q_group_size")
    zero_points = matrix.has("qzeros") or matrix.config.get("zero_point") is not False
    return _awq(matrix.group(groups, said), zero_points)


def _awq(group: int, zero_points: bool = True) -> Format:
    """Return AWQ's: qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)."""
    names = ("qweight", "scales", "qzeros" * zero_points, "")
    return words("AWQ", 4, group, names, (8, 1), zero_points=zero_points, order=AWQ_ORDER)


# What is added to stored zero points, by the name of the packing.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_AUTOROUND = {
    "auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0,
    "auto_gptq": 1, "gptqmodel": 0,
}  # fmt: skip
_IGNORED = {
    "static_groups", "true_sequential", "damp_percent", "act_group_aware", "meta", "lm_head",
    "model_file_base_name", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "cache_block_outputs", "is_marlin_format", "backend",
}  # fmt: skip


class Gptq(Method):
    """``qweight``, ``qzeros``, ``scales`` and maybe ``g_idx``.

    ``dynamic`` has fields by module: an expression after "+:" or nothing changes some, and one
    after "-:" leaves the module unquantized. The first that matches counts.
    """

    names = ("gptq",)
    fields = frozenset(_IGNORED) | {
        "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "dynamic",
        "pack_dtype", "packing_format", "checkpoint_version",
    }  # fmt: skip

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        if (words := config.get("pack_dtype") or "int32") != "int32":
            raise WeightsError(
                f"quantization_config.pack_dtype is {shown(words)}, expected 'int32'"
            )

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        for pattern, changes in (config.get("dynamic") or {}).items():
            sign = pattern[:2] if pattern[:2] in ("+:", "-:") else ""
            if matches(pattern.removeprefix(sign), module):
                return None if sign == "-:" else {**config, **changes}
        return super().of_module(config, module)

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.has("qweight"):
            return None
        rows, columns = matrix.sides("qweight")
        looks_awq = matrix.method == "" and (rows, columns * 8) == (matrix.k, matrix.n)
        if matrix.method in ("", "gptq") and not looks_awq:
            said = matrix.config.get("checkpoint_format") or matrix.config.get("format") or "gptq"
            if said not in _ZERO_OFFSETS:
                raise WeightsError(
                    f"GPTQ checkpoint_format {said!r} is not supported; convert the checkpoint to "
                    "gptq or gptq_v2"
                )
            return _gptq_of(matrix, _ZERO_OFFSETS[said])
        return None

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        return _declared(config)


class AutoRound(Method):
    """AutoRound: ``packing_format`` says how words and zero points are packed.

    ``extra_config`` has fields by a module's name, or by an expression.
    """

    names = ("auto-round", "intel/auto-round")
    fields = frozenset(_IGNORED) | {
        "bits", "group_size", "sym", "packing_format", "extra_config", "data_type", "act_bits",
        "autoround_version", "to_quant_block_names", "quant_block_list", "scale_dtype", "format",
        "supported_types", "block_list", "act_dynamic", "act_sym", "act_group_size",
        "act_data_type", "batch_size", "enable_quanted_input", "static_kv_dtype", "layer_config",
    }  # fmt: skip

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        for name, usual in (("data_type", ("int",)), ("act_bits", (16, 32))):
            if (said := config.get(name) or usual[0]) not in usual:
                expected = " or ".join(map(repr, usual))
                raise WeightsError(
                    f"quantization_config.{name} is {shown(said)}, expected {expected}: export the "
                    "checkpoint in the format of compressed-tensors"
                )

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        extra: Mapping[str, Any] = config.get("extra_config") or {}
        changes: Mapping[str, Any] | None = extra.get(module)
        if changes is None:
            special = ((p, c) for p, c in extra.items() if any(sign in p for sign in "*[("))
            changes = next((c for pattern, c in special if matches(pattern, module)), {})
        if (changes.get("bits") or 4) >= 16:
            return None
        return super().of_module({**config, **changes}, module)

    def read(self, matrix: Matrix) -> Format | None:
        if matrix.method not in self.names or not matrix.has("qweight"):
            return None
        packing = matrix.config.get("packing_format") or ""
        if "awq" in packing:
            return _awq_of(matrix)
        if packing not in _AUTOROUND:
            raise WeightsError(
                f"quantization_config.packing_format is {shown(packing)}, expected one of "
                f"{', '.join(_AUTOROUND)} or auto_round:auto_awq, because zero points depend on it"
            )
        return _gptq_of(matrix, _AUTOROUND[packing])

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        if "awq" in (config.get("packing_format") or ""):
            return _awq(config.get("group_size") or -1)
        return _declared(config)


def _gptq_of(matrix: Matrix, zero_offset: int) -> Format:
    """Return the format of words (K / 8, N) of int4, or (K / 4, N) of int8."""
    rows, _ = matrix.sides("qweight")
    groups = matrix.sides("scales")[0] if matrix.has("scales") else 1
    config = matrix.config
    group, bits = matrix.group(groups, config.get("group_size")), round(32 * rows / matrix.k)
    symmetric = config.get("sym")
    if symmetric is None:
        symmetric = not matrix.has("qzeros")
    if bits not in (4, 8) or (bits == 8 and not symmetric):
        kind = "symmetric" if symmetric else "asymmetric"
        raise WeightsError(
            f"{matrix.called('qweight')}: {kind} {bits}-bit GPTQ is not supported; use 4 bits, or "
            "8 bits with sym=True"
        )
    # Only act-order needs g_idx. If the config does not mention it, `Reader` looks at it.
    ordered = bool(config.get("desc_act")) and not config.get("static_groups")
    has = matrix.has("g_idx")
    g_idx = config.get("desc_act") is not False and (ordered or has) and group > 0
    return _gptq(
        bits,
        group,
        g_idx,
        zero_points=not symmetric,
        zero_offset=zero_offset,
        act_order=g_idx and ordered,
    )


def _declared(config: Mapping[str, Any]) -> Format:
    """Return GPTQ's as its config declares it: quantizers write qzeros also for 8 bits."""
    bits = config.get("bits")
    if bits not in (4, 8):
        raise WeightsError(f"quantization_config.bits is {shown(bits)}, expected 4 or 8")
    names = ("qweight", "scales", "qzeros", "g_idx")
    return words("GPTQ", bits, config.get("group_size") or -1, names, (1, 32 // bits))


def _gptq(bits: int, group: int, g_idx: bool, **more: Any) -> Format:
    """Return GPTQ's: qweight (K / 8, N), qzeros (G, N / 8), scales (G, N), maybe g_idx (K,)."""
    names = ("qweight", "scales", "qzeros" * (bits == 4), "g_idx" * g_idx)
    return words("GPTQ", bits, group, names, (1, 32 // bits), ignored=("qzeros", "g_idx"), **more)
