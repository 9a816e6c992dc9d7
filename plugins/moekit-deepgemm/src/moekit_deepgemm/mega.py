"""`deepgemm_mega`: dispatch, experts and combine in one kernel of DeepGEMM, fp8 blocks on Hopper.

A call quantizes its tokens into memory that all ranks map. The kernel then pulls the tokens of its
rank's experts, computes GEMM 1, activation and GEMM 2, stores the results in the memory of the
tokens' ranks, and sums each token's results over K. It applies router weights before GEMM 2.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from moekit_kernels.rows import quantize_rows
from torch import Tensor

from moekit.errors import BackendBroken
from moekit.plugin import (
    CallBuffers,
    ExpertWeights,
    FusedKernel,
    FusedSpec,
    Lease,
    MoEProblem,
    PackedWeights,
    Routing,
    SharedBuffers,
    resolve,
)

from . import library

_CALLS = {"get_symm_buffer_for_sm90_mega_moe": "6", "fp8_mega_moe": "4 activation_clamp"}
_ROWS = 8  # gate rows alternate with up rows in this number, as the kernel's tiles read them


class Memory:
    """The memory that layers of one group with equal problems share. Construction is collective.

    One call uses it at a time. Calls run in the order of their launches, also on several streams.
    """

    def __init__(self, group: dist.ProcessGroup, p: MoEProblem) -> None:
        self.module = library.load()
        library.check(self.module, _CALLS)
        try:
            self.buffer = self.module.get_symm_buffer_for_sm90_mega_moe(
                group, p.num_physical_experts, p.max_num_tokens, p.top_k, p.hidden_size,
                p.local_intermediate_size,
            )  # fmt: skip
        except RuntimeError as error:
            raise BackendBroken(
                f"DeepGEMM's memory failed: {error}; all ranks must be on one host, with NVLink "
                "between their GPUs"
            ) from error
        self.lock = threading.Lock()
        self.calls = CallBuffers(object, group, most=1)

    @property
    def nbytes(self) -> int:
        return int(self.buffer.buffer.nbytes)

    def free(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.buffer.destroy()


_memories: SharedBuffers[Memory] = SharedBuffers(Memory.free)


class MegaKernel(FusedKernel):
    """Run the library's kernel, which nvcc compiles for each size and for some numbers of tokens.

    If a rank never calls, the kernels of the other ranks trap after the library's own timeout.
    """

    group: dist.ProcessGroup  # `check` refuses problems in which no token moves
    lease: Lease[Memory]

    def __init__(
        self, spec: FusedSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        protocol = f"{spec.name} of {library.used()}"
        super().__init__(spec, problem, resolve(problem, group, protocol))
        assert self.group is not None
        self.lease = _memories.lease((self.group, problem), lambda: Memory(self.group, problem))

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Alternate 8 gate rows and 8 up rows of w13; the scales keep their order."""
        experts, _ = weights.by_expert()
        w13 = experts["w13"]
        L, rows, columns = w13.shape
        turns = w13.view(torch.uint8).view(L, 2, rows // (2 * _ROWS), _ROWS, columns)
        experts["w13"] = turns.transpose(1, 2).reshape(L, rows, columns).view(w13.dtype)
        return PackedWeights(self.spec.name, experts)

    def run(
        self, out_TH: Tensor, x_TH: Tensor, weights: PackedWeights, routing: Routing,
        workspace: Sequence[Tensor],
    ) -> None:  # fmt: skip
        memory, T = self.lease.value, len(x_TH)
        held = memory.buffer
        with memory.lock:
            mine = memory.calls.take()
            try:
                if T:
                    quantize_rows(x_TH, held.x[:T], held.x_sf[:T])
                    held.topk_idx[:T].copy_(routing.topk_ids)
                    held.topk_weights[:T].copy_(routing.topk_weights)
                memory.module.fp8_mega_moe(
                    out_TH,
                    (weights["w13"], weights["w13_scale"]), (weights["w2"], weights["w2_scale"]),
                    held, activation_clamp=self.problem.activation.limit,
                )  # fmt: skip
            except RuntimeError as error:
                raise library.failed(error) from error
            finally:
                memory.calls.give_back(mine)
