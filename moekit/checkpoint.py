"""Expert weights straight from safetensors files: only this rank's experts and slices are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from moekit.errors import MoekitError, WeightsError
from moekit.problem import MoEProblem
from moekit.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls one MoE layer's expert tensors.

    Templates over ``{layer}`` and, for one tensor per expert, ``{expert}``. Either ``gate`` (left
    out by experts without a gate) and ``up``, or ``gate_up`` with both in one tensor; and
    ``down``. Stored as a Linear's weight, (out, in); ``transposed``: (in, out). ``interleaved``:
    gate_up alternates gate and up instead of holding them in halves. Tensors without
    ``{expert}`` have the experts in dim 0.
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    gate_up_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        if bool(self.gate_up) == bool(self.up):
            raise WeightsError("ExpertNames needs either gate_up, or up (with gate where gated)")


def _per_expert(prefix: str, gate: str, up: str, down: str) -> ExpertNames:
    stem = f"model.layers.{{layer}}.{prefix}.experts.{{expert}}."
    return ExpertNames(
        gate=f"{stem}{gate}.weight", up=f"{stem}{up}.weight", down=f"{stem}{down}.weight"
    )


_GATE_UP_DOWN = _per_expert("mlp", "gate_proj", "up_proj", "down_proj")
_GPT_OSS = "model.layers.{layer}.mlp.experts."
_LLAMA4 = "model.layers.{layer}.feed_forward.experts."

# As transformers writes them, by the config's model_type.
NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        "mixtral": _per_expert("block_sparse_moe", "w1", "w3", "w2"),
        "qwen2_moe": _GATE_UP_DOWN,
        "qwen3_moe": _GATE_UP_DOWN,
        "deepseek_v2": _GATE_UP_DOWN,
        "deepseek_v3": _GATE_UP_DOWN,
        "gpt_oss": ExpertNames(
            gate_up=f"{_GPT_OSS}gate_up_proj",
            down=f"{_GPT_OSS}down_proj",
            gate_up_bias=f"{_GPT_OSS}gate_up_proj_bias",
            down_bias=f"{_GPT_OSS}down_proj_bias",
            transposed=True,
            interleaved=True,
        ),
        "llama4_text": ExpertNames(
            gate_up=f"{_LLAMA4}gate_up_proj", down=f"{_LLAMA4}down_proj", transposed=True
        ),
    }
)


class Checkpoint:
    """Tensors by name in one safetensors file, or in the shards of a directory.

    A directory is read through its ``*.safetensors.index.json`` if there is one. Raises
    WeightsError for a file that is missing, truncated or not safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in self._shards():
            for key in self._open(file).keys():  # noqa: SIM118 (not a dict)
                self._file_of[key] = file

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *parts: slice) -> Tensor:
        """The tensor, or the part of it that ``parts`` (one slice per leading dim) cut out."""
        view = self._slice(name)
        part: Tensor = view[parts if parts else slice(None)]
        return part

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _shards(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        indexes = sorted(self.path.glob("*.safetensors.index.json"))
        if not indexes:
            found = sorted(self.path.glob("*.safetensors"))
            if not found:
                raise WeightsError(f"{self.path}: no *.safetensors file in this directory")
            return found
        try:
            names = set(json.loads(indexes[0].read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{indexes[0]}: not a safetensors index ({error!r})") from error
        return [self.path / name for name in sorted(names)]

    def _open(self, file: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise MoekitError(
                "reading checkpoints needs the safetensors package: pip install safetensors"
            ) from error
        try:
            self._files[file] = safe_open(file, framework="pt")
        except FileNotFoundError as error:
            raise WeightsError(f"{file}: no such file; the checkpoint is incomplete") from error
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file}: truncated or not a safetensors file ({error}); fetch it again"
            ) from error
        return self._files[file]


def load_experts(
    path: str | Path, names: ExpertNames | str, layer: int, problem: MoEProblem
) -> ExpertWeights:
    """One MoE layer's experts for this rank of ``problem``, on the CPU, in the file's dtype.

    ``names``: an ExpertNames, or a model type of `NAMES`. Raises WeightsError listing every
    tensor that is missing or has another shape than the problem says; nothing is half loaded.
    """
    if isinstance(names, str):
        if names not in NAMES:
            raise WeightsError(
                f"model type {names!r} has no name map (known: {', '.join(NAMES)}); "
                "describe it: moekit.checkpoint.ExpertNames(gate=..., up=..., down=...)"
            )
        names = NAMES[names]
    with Checkpoint(path) as checkpoint:
        return _Reader(checkpoint, names, layer, problem).load()


class _Reader:
    """Reads one layer. Sizes: E logical experts, I of the whole model, i of this rank."""

    def __init__(
        self, checkpoint: Checkpoint, names: ExpertNames, layer: int, problem: MoEProblem
    ) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.layer = layer
        self.problem = problem
        i, rank = problem.local_intermediate_size, problem.parallel.tp_rank
        self.inner = slice(rank * i, (rank + 1) * i)
        self.logical = [problem.logical_expert(p) for p in problem.local_experts]

    def load(self) -> ExpertWeights:
        names = self.names
        self._check()
        if names.gate_up:
            w13 = self._fused(names.gate_up, is_bias=False)
        else:
            halves = [n for n in (names.gate, names.up) if n]
            w13 = torch.cat([self._matrices(n, self.inner, slice(None)) for n in halves], dim=1)
        w2 = self._matrices(names.down, slice(None), self.inner)
        bias = names.gate_up_bias and self._fused(names.gate_up_bias, is_bias=True)
        down_bias = names.down_bias and self._stack(names.down_bias, slice(None))
        return ExpertWeights(
            w13.contiguous(),
            w2.contiguous(),
            w13_bias=bias.contiguous() if isinstance(bias, Tensor) else None,
            w2_bias=down_bias.contiguous() if isinstance(down_bias, Tensor) else None,
            interleaved=names.interleaved,
        )

    def _fused(self, template: str, *, is_bias: bool) -> Tensor:
        """Gate and up from one tensor: (L, 2i, H), or (L, 2i) for a bias."""
        I, inner = self.problem.intermediate_size, self.inner
        if self.names.interleaved:
            cuts = [slice(2 * inner.start, 2 * inner.stop)]
        else:
            cuts = [inner, slice(I + inner.start, I + inner.stop)]
        if is_bias:
            return torch.cat([self._stack(template, cut) for cut in cuts], dim=1)
        return torch.cat([self._matrices(template, cut, slice(None)) for cut in cuts], dim=1)

    def _matrices(self, template: str, rows: slice, columns: slice) -> Tensor:
        """(L, rows, columns), whichever way the file stores them."""
        if self.names.transposed:
            return self._stack(template, columns, rows).mT
        return self._stack(template, rows, columns)

    def _stack(self, template: str, *parts: slice) -> Tensor:
        if "{expert}" in template:
            return torch.stack(
                [self.checkpoint.read(self._name(template, e), *parts) for e in self.logical]
            )
        name = self._name(template)
        return torch.cat(
            [self.checkpoint.read(name, slice(e, e + 1), *parts) for e in self.logical]
        )

    def _name(self, template: str, expert: int = 0) -> str:
        return template.format(layer=self.layer, expert=expert)

    def _check(self) -> None:
        p, names = self.problem, self.names
        H, I = p.hidden_size, p.intermediate_size
        wanted = {
            names.gate: (I, H),
            names.up: (I, H),
            names.gate_up: (2 * I, H),
            names.down: (H, I),
        }
        if names.transposed:
            wanted = {name: shape[::-1] for name, shape in wanted.items()}
        shapes: dict[str, tuple[int, ...]] = {
            **wanted,
            names.gate_up_bias: (2 * I,),
            names.down_bias: (H,),
        }
        faults = []
        for template, shape in shapes.items():
            if not template:
                continue
            per_expert = "{expert}" in template
            full = shape if per_expert else (p.num_experts, *shape)
            for expert in sorted(set(self.logical)) if per_expert else [0]:
                name = self._name(template, expert)
                if name not in self.checkpoint:
                    faults.append(f"{name} is missing")
                elif self.checkpoint.shape(name) != full:
                    faults.append(f"{name} is {self.checkpoint.shape(name)}, want {full}")
        if faults:
            shown = "; ".join(faults[:20]) + ("; ..." if len(faults) > 20 else "")
            raise WeightsError(
                f"{self.checkpoint.path}: {len(faults)} tensor(s) of layer {self.layer} do not "
                f"fit: {shown}"
            )
