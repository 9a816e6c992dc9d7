"""Read GGUF files with the gguf library: their tensors, and their metadata as config.json's fields.

The fields are those that llama.cpp's converter writes (gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from moekit.checkpoint.tensors import Entry
from moekit.untrusted.arguments import shown

_MAX_READS = 1_000_000  # by the library, which takes microseconds for each
_MAX_STRINGS = 4_000_000  # the largest vocabularies have under a million
_ARRAY, _STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

# The activation of the routed experts of each architecture, as llama.cpp's graphs compute it.
_SILU = (
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2", "dots1",
    "ernie4_5-moe", "glm4moe", "granitehybrid", "granitemoe", "hunyuan-moe", "jamba", "lfm2moe",
    "llada-moe", "llama", "llama4", "minimax-m2", "olmoe", "phimoe", "qwen2moe", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vlmoe",
)  # fmt: skip
# ggml's gelu is the approximation by tanh; its gelu_erf is the exact one.
_OTHERS = {"gpt-oss": "swigluoai", "grok": "gelu_pytorch_tanh", "nemotron_h_moe": "relu2"}
_ACTIVATIONS = dict.fromkeys(_SILU, "silu") | _OTHERS
# Architectures that moekit treats differently, by the name that transformers has for them.
_MODEL_TYPES = {"gpt-oss": "gpt_oss", "llama4": "llama4_text"}


class Reader(gguf.GGUFReader):
    """The library's reader, in bounded time and memory.

    The library believes every count, makes several objects for each element of an array (a
    vocabulary takes seconds), and returns fewer bytes than asked for at the end of a file.
    """

    _reads = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self._reads += 1
        if self._reads > _MAX_READS:
            raise ValueError(f"its header has more than {_MAX_READS} values")
        if (nbytes := np.dtype(dtype).itemsize * int(count)) > len(self.data) - offset:
            raise ValueError(
                f"{shown(nbytes)} bytes should be at byte {shown(offset)} of {len(self.data)}"
            )
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Return an array of numbers as one part, and an array of texts as none."""
        if raw_type != _ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            values = self._get(end, self.gguf_scalar_to_np[kind], count)
            return 12 + values.nbytes, [values], [0], [_ARRAY, kind]
        if kind != _STRING or count > _MAX_STRINGS:
            raise ValueError(f"it has an array of {count} values of type {kind.name}")
        data = self.data.data
        for _ in range(count):
            end += 8 + int(struct.unpack_from("<Q", data, end)[0])
        return end - orig_offs, [], [], [_ARRAY, kind]


def open_file(file: Path) -> tuple[dict[str, Entry], Mapping[str, Any]]:
    """Return the tensors of a file and its metadata, for `config_of`.

    A shape has the experts first and the columns last, which is ggml's order reversed. A tensor of
    a quantized type is bytes, and its last two dimensions are the blocks of a row and the bytes of
    a block.

    Raises:
        ValueError, LookupError, ArithmeticError, struct.error: The file is not of this format.
    """
    reader = Reader(file)
    entries: dict[str, Entry] = {}
    end, before = 0, ""
    for place, found in enumerate(sorted(reader.tensors, key=lambda t: t.data_offset)):
        if found.n_bytes and found.data_offset < end:  # many large tensors in a small file
            raise ValueError(f"{shown(found.name)} overlaps {shown(before)}")
        end, before = found.data_offset + found.n_bytes, found.name
        kind, data, block = found.tensor_type, _read_only(found.data), ""
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name == "BF16":
            data = data.view(torch.bfloat16)
        elif elements > 1:
            block, data = kind.name, torch.unflatten(data, -1, (-1, nbytes))
        shape = tuple(data.shape)
        entries[found.name] = Entry(
            file, place, shape, data.dtype, partial(data.view, data.dtype), block
        )
    return entries, reader.fields


def _read_only(data: Any) -> torch.Tensor:
    """View an array, without torch's warning that nobody may write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(data)


def config_of(metadata: Mapping[str, Any], stored: torch.dtype | str | None) -> dict[str, Any]:
    """Return the metadata as the fields of config.json that moekit reads, unchecked.

    Args:
        metadata: The fields of the library's reader.
        stored: The dtype of the first experts, because GGUF does not say the model's: it is theirs
            if they are not quantized, else bfloat16.

    Returns:
        The fields. The activation of an unknown architecture is none that moekit has.
    """

    def value(name: str) -> Any:
        return metadata[name].contents() if name in metadata else None

    arch = value("general.architecture")

    def said(*names: str) -> Any:
        fields = (value(f"{arch}.{name}") for name in names)
        return next((each for each in fields if each not in (None, 0)), None)

    plain = stored in (torch.float16, torch.float32)
    return {
        "model_type": _MODEL_TYPES.get(str(arch), arch),
        "hidden_size": said("embedding_length"),
        "moe_intermediate_size": said("expert_feed_forward_length", "feed_forward_length"),
        "num_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "num_hidden_layers": said("block_count"),
        "hidden_act": _ACTIVATIONS.get(str(arch), f"of the GGUF architecture {str(arch)[:100]!r}"),
        "dtype": str(stored).removeprefix("torch.") if plain else "bfloat16",
    }
