"""FlashInfer's push layers in plain torch. Ranks send whole batches.

The stand-in keeps the library's state between calls and its checks: weights are bound, a call must
not follow one whose event is left, and results go through an inbox that each call zeroes.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moekit.problem import quant
from moekit.problem.quantize import dequantize, quantize

Sm90PushPayload = enum.Enum("Sm90PushPayload", "FP8 BF16")
Sm90PushCombine = enum.Enum("Sm90PushCombine", "FP8 BF16")
_FP8 = quant.SCHEMES["fp8_block"]


@dataclass(frozen=True)
class Sm90PushConfig:
    payload_dtype: Any
    combine_dtype: Any
    dedup_dispatch: bool = False


@dataclass(frozen=True)
class Sm90PushWeights:
    w13_fp8: Tensor
    w13_sf: Tensor
    w2_fp8: Tensor
    w2_sf: Tensor

    def values(self) -> tuple[Tensor, Tensor]:
        each = (self.w13_fp8, self.w13_sf), (self.w2_fp8, self.w2_sf)
        for w, scale in each:
            assert w.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
            assert scale.shape == (len(w), w.shape[1] // 128, w.shape[2] // 128)
            assert w.is_contiguous() and scale.is_contiguous()
        first, second = (dequantize(w, scale, _FP8.weight) for w, scale in each)
        return first, second


@dataclass(frozen=True)
class Sm90CakeBf16Weights:
    w13: Tensor
    w2: Tensor
    num_local_experts: int
    hidden_size: int
    intermediate_size: int

    def values(self) -> tuple[Tensor, Tensor]:
        E, H, I = self.num_local_experts, self.hidden_size, self.intermediate_size
        assert self.w13.shape == (E, 2 * I, H) and self.w2.shape == (E, H, I)
        assert self.w13.dtype == self.w2.dtype == torch.bfloat16 and self.w13.is_contiguous()
        turns = self.w13.view(E, I // 32, 2, 32, H).transpose(1, 2)
        return turns.reshape(E, 2 * I, H).float(), self.w2.float()


class Sm90PushPipe:
    device = torch.device("cpu")

    def __init__(
        self, *, ep_size: int, rank: int, num_local_experts: int, hidden_size: int, top_k: int,
        token_capacity: int, device_index: int, config: Sm90PushConfig, comm_backend: Any,
        out_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.ep, self.rank, self.E, self.H, self.K = (
            ep_size, rank, num_local_experts, hidden_size, top_k
        )  # fmt: skip
        self.cap, self.config, self._comm = token_capacity, config, comm_backend
        assert out_dtype == torch.bfloat16 and config.combine_dtype is Sm90PushCombine.BF16
        if comm_backend is not None:
            sizes = (ep_size, num_local_experts, hidden_size, top_k, token_capacity, config)
            assert len(set(map(repr, comm_backend.allgather(sizes)))) == 1
        self.combine_t = torch.full(
            (token_capacity, top_k, hidden_size), float("nan"), dtype=torch.float32, device="cpu"
        )
        self.total_bytes = self.combine_t.nbytes
        self.destroyed = False

    def allgather(self, value: Any) -> list[Any]:
        return [value] if self._comm is None else self._comm.allgather(value)


class _Runner:
    bundle: type

    def __init__(self, pipe: Sm90PushPipe, weights: Any) -> None:
        assert type(weights) is self.bundle, "weights of the other layer"
        weights.values()
        self.pipe, self.weights, self._round_event = pipe, None, None
        self._bound_weights, self._validated_weights = None, dict[int, Any]()
        self._inbox = pipe.combine_t
        self.bind_weights(weights)

    def bind_weights(self, weights: Any) -> None:
        assert type(weights) is self.bundle
        self._validated_weights[id(weights)] = weakref.ref(weights)
        self.weights = self._bound_weights = weights

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, *, output: Tensor) -> Tensor:
        pipe, T = self.pipe, len(x)
        assert not pipe.destroyed
        if self._round_event is not None:
            raise RuntimeError("the previous round may still be executing on another stream")
        assert T <= pipe.cap and x.shape == output.shape == (T, pipe.H)
        assert x.dtype == output.dtype == torch.bfloat16 and weights.dtype == torch.float32
        assert ids.dtype == torch.int32 and ids.shape == weights.shape == (T, pipe.K)
        for each in (x, ids, weights, output):
            assert each.is_contiguous() and each.data_ptr() % 16 == 0
        assert not len(ids) or int(ids.max()) < pipe.E * pipe.ep
        with _disable_current_modes():  # the library allocates nothing in a call
            self._round(output, x, ids, weights)
        self._round_event = object()
        return output

    def _round(self, output: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        pipe, T = self.pipe, len(x)
        pipe.combine_t.zero_()
        sent = pipe.allgather((x, ids, weights))
        back = pipe.allgather([self._experts(*each) for each in sent])
        for rows in back:
            t, k, y = rows[pipe.rank]
            self._inbox[t, k] = y.float()  # each (token, k) has one rank
        output.copy_(self._inbox[:T].sum(dim=1))

    @torch.autocast("cpu", enabled=False)
    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w13, w2 = self.weights.values()
        t, k = ((ids // self.pipe.E == self.pipe.rank) & (ids >= 0)).nonzero(as_tuple=True)
        y = x.new_zeros((len(t), self.pipe.H), dtype=torch.float32)
        for row, e in enumerate((ids[t, k] % self.pipe.E).tolist()):
            gate, up = (self._rounded(x[t[row]].float()) @ w13[e].T).chunk(2)
            a = self._rounded(torch.nn.functional.silu(gate) * up)
            y[row] = (a @ w2[e].T) * weights[t[row], k[row]]
        return t, k, y.bfloat16()

    def _rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    def destroy(self) -> None:
        self.pipe.destroyed = True


class Sm90PushMoERunner(_Runner):
    bundle = Sm90PushWeights

    def _rounded(self, x: Tensor) -> Tensor:
        q, scale = quantize(x[None], _FP8.activation, None, None)
        return dequantize(q, scale, _FP8.activation)[0]


class Sm90CakeBf16MoERunner(_Runner):
    bundle = Sm90CakeBf16Weights
