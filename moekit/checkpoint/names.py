"""The names of experts' tensors in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from moekit.checkpoint.tensors import Tensors
from moekit.errors import WeightsError

_MODEL = "model.layers.{layer}."
_SHOWN = 10  # sets of names in an error
# Parts of the names of draft layers, which predict further tokens.
_DRAFTS = frozenset({"mtp", "nextn", "draft", "eagle", "draft_model", "mtp_layers"})


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the expert tensors of one MoE layer in a checkpoint.

    The names are templates with ``{layer}`` and, where every expert has its own tensor,
    ``{expert}``. Tensors without ``{expert}`` have the experts in dim 0. All names are for
    unquantized weights; the names of biases and of quantized weights follow from them. ``x.weight``
    becomes ``x.bias``, ``x.weight_scale``, ``x.qweight`` and so on; a name with another ending,
    ``x``, becomes ``x_bias``, ``x_scale_inv``, ``x_blocks`` and so on.

    Args:
        down: The down projection.
        gate: The gate projection; "" for experts without a gate.
        up: The up projection.
        gate_up: Both of them in one tensor, in place of ``gate`` and ``up``.
        transposed: False for (out, in), as in a Linear; True for (in, out); None if the shapes
            decide.
        interleaved: Rows of ``gate_up`` alternate between gate and up instead of being halves.

    Raises:
        WeightsError: Not exactly one of ``gate_up`` and ``up`` is given.
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    transposed: bool | None = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        if bool(self.gate_up) == bool(self.up):
            raise WeightsError(
                "ExpertNames needs either gate_up, or up (with gate if the experts have one); got "
                + ("both" if self.up else "neither")
            )

    def templates(self) -> dict[str, str]:
        """Return the templates that are given, by role."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {role: text for role, text in named.items() if isinstance(text, str) and text}

    def under(self, prefix: str) -> ExpertNames:
        """Return the same names with ``prefix`` instead of ``model.`` at the start.

        ``prefix`` is "" or ends in a dot: ``NAMES["qwen3_moe"].under("language_model.model.")``.
        """
        moved = {
            role: prefix + text.removeprefix("model.") for role, text in self.templates().items()
        }
        return replace(self, **moved)  # type: ignore[arg-type]


def per_expert(stem: str, gate: str, up: str, down: str) -> ExpertNames:
    """Return names of one Linear per expert, ``<stem>.{expert}.<gate>.weight`` and so on."""
    return ExpertNames(
        gate=f"{stem}.{{expert}}.{gate}.weight" if gate else "",
        up=f"{stem}.{{expert}}.{up}.weight",
        down=f"{stem}.{{expert}}.{down}.weight",
    )


def _fused(stem: str, transposed: bool | None = None, interleaved: bool = False) -> ExpertNames:
    return ExpertNames(
        gate_up=f"{stem}.gate_up_proj",
        down=f"{stem}.down_proj",
        transposed=transposed,
        interleaved=interleaved,
    )


def _projections(module: str) -> ExpertNames:
    return per_expert(f"{_MODEL}{module}.experts", "gate_proj", "up_proj", "down_proj")


_MIXTRAL = per_expert(f"{_MODEL}block_sparse_moe.experts", "w1", "w3", "w2")
_GATE_UP_DOWN = _projections("mlp")
_BLOCK = f"{_MODEL}block_sparse_moe"
_GRANITE = ExpertNames(
    gate_up=f"{_BLOCK}.input_linear.weight", down=f"{_BLOCK}.output_linear.weight"
)

_PROJECTED = (
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_omni_moe_text",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4v_moe_text", "olmoe",
    "flex_olmo", "ernie4_5_moe", "dots1", "hunyuan_v1_moe", "exaone_moe", "afmoe", "cohere2_moe",
    "glm4_moe_lite", "glm_moe_dsa", "solar_open", "mellum", "axk1", "axk2", "hy_v3",
    "mimo_v2_flash", "sarvam_moe", "sarvam_mla",
)  # fmt: skip
# The names in the models' own checkpoints, by the model_type of the (text) config.
NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        **dict.fromkeys(("mixtral", "minimax", "minimax_m2", "phimoe"), _MIXTRAL),
        **dict.fromkeys(_PROJECTED, _GATE_UP_DOWN),
        "jamba": _projections("feed_forward"),
        "lfm2_moe": per_expert(f"{_MODEL}feed_forward.experts", "w1", "w3", "w2"),
        **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
        "nemotron_h": per_expert(
            "backbone.layers.{layer}.mixer.experts", "", "up_proj", "down_proj"
        ),
        "qwen3_vl_moe_text": _fused(f"{_MODEL}mlp.experts"),
        "gpt_oss": _fused(f"{_MODEL}mlp.experts", transposed=True, interleaved=True),
        "llama4_text": _fused(f"{_MODEL}feed_forward.experts", transposed=True),
    }
)


def names_in(checkpoint: Tensors, names: ExpertNames | str, layer: int | None) -> ExpertNames:
    """Return the names that ``checkpoint`` uses.

    Checkpoints save the same models under other prefixes than ``model.``, and with one tensor for
    each expert instead of one for all, or the reverse. All spellings that the files have are
    candidates. Draft layers (multi-token prediction) do not count beside the decoder's. Raises
    WeightsError if the model type is unknown, or there are several candidates.

    Args:
        names: The names, or a model type of `NAMES`.
        layer: The layer to look at. None: the first layer with experts under any of the names.

    Returns:
        The only candidate, or the given names if there is none.
    """
    if checkpoint.is_gguf and not isinstance(names, ExpertNames):
        return _of_gguf(checkpoint, layer)
    spelled = _spellings(names) if isinstance(names, ExpertNames) else _of_type(names)
    sites = [
        (spelling, *site) for spelling in spelled for site in _sites(checkpoint, spelling.down)
    ]
    sites = [site for site in sites if not _DRAFTS & set(site[1].split("."))] or sites
    if layer is None:
        layer = min((n for _, _, n in sites), default=0)
    found = {
        s if prefix == _prefix(s.down) else s.under(prefix) for s, prefix, n in sites if n == layer
    }
    if isinstance(names, ExpertNames) and names in found:
        return names  # they were chosen
    usual = {each for each in found if _prefix(each.down) == _prefix(spelled[0].down)}
    found = usual or found
    if len(found) > 1:
        downs = sorted(each.down for each in found)
        raise WeightsError(
            f"{checkpoint.path}: layer {layer} has several sets of experts: "
            f"{', '.join(downs[:_SHOWN])}; pass the names of one, as names="
            f"{_constructor(min(found, key=lambda each: each.down))}"
        )
    return found.pop() if found else spelled[0]


def _constructor(names: ExpertNames) -> str:
    given = [f"{role}={text!r}" for role, text in names.templates().items()]
    given += [f"transposed={names.transposed}"] + ["interleaved=True"] * names.interleaved
    return f"moekit.checkpoint.ExpertNames({', '.join(given)})"


def layers_in(checkpoint: Tensors, names: ExpertNames) -> tuple[int, ...]:
    """Return the layers with experts under exactly these names."""
    own = _prefix(names.down)
    return tuple(sorted(n for prefix, n in _sites(checkpoint, names.down) if prefix == own))


def no_experts(checkpoint: Tensors, names: ExpertNames, layer: int = 0) -> str:
    """Say that a layer has no experts under these names, and what to do."""
    if layers := layers_in(checkpoint, names):
        return (
            f"layer {layer} has no experts called {names.down}: choose one of the {len(layers)} "
            f"layers from {layers[0]} to {layers[-1]} that have them"
        )
    return (
        f"no layer has experts called {names.down}; if they have other names, pass these as "
        "moekit.checkpoint.ExpertNames(gate=..., up=..., down=...)"
    )


def _prefix(down: str) -> str:
    """Return the start of a template, in place of which checkpoints may have another one."""
    return "model." if down.startswith(_MODEL) else ""


def _sites(checkpoint: Tensors, down: str) -> set[tuple[str, int]]:
    """Return (prefix, layer) of all experts whose down projection has this template."""
    found = checkpoint.known
    if down not in found:
        number, prefix = "[0-9]{1,9}", _prefix(down)
        stem = re.escape(down.removeprefix(prefix).removesuffix("weight"))
        stem = stem.replace(r"\{layer\}", f"({number})", 1).replace(r"\{layer\}", number)
        pattern = ("((?:.+[.])?)" if prefix else "()") + stem.replace(r"\{expert\}", number)
        start = "" if prefix else down.partition("{")[0].removesuffix("weight")
        matches = filter(None, map(re.compile(pattern, re.DOTALL).match, checkpoint.names(start)))
        # A name without a number stands for layer 0.
        found[down] = {(m[1], int((*m.groups(), "0")[1])) for m in matches}
    sites: set[tuple[str, int]] = found[down]
    return sites


def _of_type(model_type: str) -> list[ExpertNames]:
    if model_type not in NAMES:
        raise WeightsError(
            f"the tensor names of model type {model_type!r} are not known (known: "
            f"{', '.join(NAMES)}); pass them as moekit.checkpoint.ExpertNames(gate=..., up=..., "
            "down=...)"
        )
    return _spellings(NAMES[model_type])


def _spellings(names: ExpertNames) -> list[ExpertNames]:
    """Return the names, and further ones of the same experts in one tensor each or one for all."""
    start, experts, _ = names.down.partition(".experts.")
    if not experts and names.down.startswith(_MODEL):  # granite: block_sparse_moe.output_linear
        start, experts = f"{_MODEL}{names.down.removeprefix(_MODEL).partition('.')[0]}", ".experts."
    if not experts or not names.gate_up + names.gate:
        return [names]
    head, _, module = start.rpartition(".")
    stems = dict.fromkeys(f"{head}.{each}.experts" for each in (module, "mlp"))
    found = [names]
    for stem in stems:
        found.append(per_expert(stem, "gate_proj", "up_proj", "down_proj"))
    for stem in stems:
        found.append(_fused(stem, None, names.interleaved))
    if names.gate_up:  # given names of a stack have their own layout
        found = [each for each in found if each.down != names.down or each is names]
    return list(dict.fromkeys(found))


def _of_gguf(checkpoint: Tensors, layer: int | None) -> ExpertNames:
    """Return what a GGUF model calls the experts' tensors in ``layer``; None: in the first one.

    Gate and up are in halves of one tensor or apart (llama.cpp's gguf-py/gguf/constants.py,
    TENSOR_NAMES).
    """
    stem = "blk.{layer}.ffn_"
    at = layer
    if at is None:
        at = min((n for _, n in _sites(checkpoint, f"{stem}down_exps.weight")), default=0)
    fused = f"{stem}gate_up_exps.weight".format(layer=at) in checkpoint
    roles = {role: f"{stem}{role}_exps.weight" for role in ("gate_up", "gate", "up", "down")}
    if fused or roles["gate"].format(layer=at) not in checkpoint:
        del roles["gate"]
    del roles["up" if fused else "gate_up"]
    return ExpertNames(**roles)  # type: ignore[arg-type]
