"""The documented meaning of kt-kernel's pointer API in plain torch, for machines without it.

Strict: what the library would read beyond its buffers, or crash on, fails here. It reads weights
through the addresses that it is given, at the time it is told to load them.
"""

import ctypes
from types import SimpleNamespace

import torch
from moekit_ktransformers import kinds, library
from torch import Tensor

from moekit.problem.quant import E2M1

REAL = library.KT_KERNEL.folder() is not None and not library.unsupported()
"""True if the real library runs here, so that this module is not needed."""


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class WorkerPoolConfig:
    subpool_count: int
    subpool_numa_map: list[int]
    subpool_thread_count: list[int]


class CPUInfer:
    def __init__(self, config: WorkerPoolConfig) -> None:
        assert len(config.subpool_numa_map) == len(config.subpool_thread_count)
        assert config.subpool_count == len(config.subpool_numa_map)
        assert all(n >= 1 for n in config.subpool_thread_count)
        self.backend_ = SimpleNamespace(config=config)

    def submit(self, task) -> None:
        task()

    def sync(self) -> None: ...


class MOEConfig:
    def __init__(self, experts: int, top_k: int, hidden: int, inner: int) -> None:
        self.expert_num, self.num_experts_per_tok = experts, top_k
        self.hidden_size, self.intermediate_size = hidden, inner
        self.swiglu_limit = self.swiglu_alpha = 0.0
        self.quant_config = SimpleNamespace(bits=0, group_size=0, per_channel=False)


class _MOE:
    step = 32

    def __init__(self, config: MOEConfig) -> None:
        self.c = config
        assert config.pool.config.subpool_count == 1 and config.max_len > 0
        assert config.hidden_size % self.step == config.intermediate_size % self.step == 0
        assert not config.quant_config.zero_point
        self.loaded = None

    def load_weights_task(self):
        def load() -> None:
            c, inner, hidden = self.c, self.c.intermediate_size, self.c.hidden_size
            shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            self.loaded = {
                name: [
                    self.matrix(weight, scale, *shape)
                    for weight, scale in zip(
                        getattr(c, f"{name}_projs")[0], getattr(c, f"{name}_scales")[0], strict=True
                    )
                ]
                for name, shape in shapes.items()
            }
            assert all(len(m) == c.expert_num for m in self.loaded.values())

        return load

    def forward(self, count, slots, ids, weights, x, out, incremental) -> None:
        c, (rows,) = self.c, at(count, (1,), torch.int32).tolist()
        assert self.loaded is not None and not incremental
        assert 0 < rows <= c.max_len and slots <= c.num_experts_per_tok
        x_RH = at(x, (rows, c.hidden_size), torch.bfloat16).float()
        ids_RK = at(ids, (rows, slots), torch.int64)
        weights_RK = at(weights, (rows, slots), torch.float32)
        total = torch.zeros(rows, c.hidden_size, dtype=torch.float32, device="cpu")
        for expert in torch.unique(ids_RK[ids_RK >= 0]).tolist():
            assert expert < c.expert_num
            row, slot = (ids_RK == expert).nonzero(as_tuple=True)
            gate, up = (x_RH[row] @ self.loaded[name][expert].T for name in ("gate", "up"))
            gate, up = gate.bfloat16().float(), up.bfloat16().float()
            if c.swiglu_limit > 0:
                gate, up = gate.clamp(max=c.swiglu_limit), up.clamp(-c.swiglu_limit, c.swiglu_limit)
            act = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            down = (act @ self.loaded["down"][expert].T).bfloat16().float()
            total.index_add_(0, row, weights_RK[row, slot, None] * down)
        at(out, (rows, c.hidden_size), torch.bfloat16).copy_(total)


class AVX2BF16_MOE(_MOE):
    def matrix(self, weight: int, scale: int, n: int, k: int) -> Tensor:
        assert scale == 0
        return at(weight, (n, k), torch.bfloat16).float()


class AVX2FP8_MOE(_MOE):
    step = 128

    def matrix(self, weight: int, scale: int, n: int, k: int) -> Tensor:
        assert self.c.quant_config.bits == 8 and self.c.quant_config.group_size == 128
        scales = at(scale, (n // 128, k // 128), torch.float32)
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return at(weight, (n, k), torch.float8_e4m3fn).float() * wide


class AMXFP8PerChannel_MOE(_MOE):
    def matrix(self, weight: int, scale: int, n: int, k: int) -> Tensor:
        assert self.c.quant_config.per_channel
        scales = at(scale, (n, 1), torch.float32)
        return at(weight, (n, k), torch.float8_e4m3fn).float() * scales


class AVX2MXFP8_MOE(_MOE):
    def matrix(self, weight: int, scale: int, n: int, k: int) -> Tensor:
        assert self.c.quant_config.bits == 8 and self.c.quant_config.group_size == 32
        scales = torch.exp2(at(scale, (n, k // 32), torch.uint8).float() - 127)
        return at(weight, (n, k), torch.float8_e4m3fn).float() * scales.repeat_interleave(32, 1)


class AVX2MXFP4_MOE(_MOE):
    codes = torch.tensor([*E2M1, *(-v for v in E2M1)], device="cpu")

    def matrix(self, weight: int, scale: int, n: int, k: int) -> Tensor:
        q = self.c.quant_config
        assert q.bits == 4 and k % q.group_size == 0
        nibbles = at(weight, (n, k // 2), torch.uint8)
        values = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2).long()
        scales = at(scale, (n, k // q.group_size), torch.bfloat16).float()
        return self.codes[values] * scales.repeat_interleave(q.group_size, 1)


class AVX2RawInt4_MOE(AVX2MXFP4_MOE):
    codes = torch.arange(16.0, device="cpu") - 8


moe = SimpleNamespace(
    MOEConfig=MOEConfig,
    AVX2BF16_MOE=AVX2BF16_MOE,
    AMXBF16_MOE=AVX2BF16_MOE,
    AVX2FP8_MOE=AVX2FP8_MOE,
    AMXFP8_MOE=AVX2FP8_MOE,
    AMXFP8PerChannel_MOE=AMXFP8PerChannel_MOE,
    AVX2MXFP4_MOE=AVX2MXFP4_MOE,
    AMXFP4_KGroup_MOE=AVX2MXFP4_MOE,
    AVX2MXFP8_MOE=AVX2MXFP8_MOE,
    AVX2RawInt4_MOE=AVX2RawInt4_MOE,
)
assert {k.name for listed in kinds.KINDS.values() for k in listed} <= set(vars(moe))
