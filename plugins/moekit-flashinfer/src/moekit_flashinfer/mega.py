"""`flashinfer_mega`: FlashInfer's layers for Hopper in which ranks push tokens (0.7.2, `moe_ep`).

    push each token to the ranks of its experts, bf16 or quantized to fp8 (1 x 128)
    sort what arrived by expert, GEMM 1, activation, GEMM 2
    push the results back in bf16, and sum each token's results over K in fp32

bf16 runs the library's "push_cake" kernels, and fp8_block runs its "push_cuda" kernels. Results
travel in bf16: with the library's other choice, fp8, the error would exceed the scheme's own. The
third layer for Hopper ("pull_cutedsl") is not used: its block scales span gate and up rows, so
weights of fp8_block checkpoints would have to be quantized again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError
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
    local_ids,
    resolve,
    round_up,
)

from . import buffers, library


class Window:
    """The memory that all ranks map, and the library's runner over it. Construction is collective.

    The library runs one call at a time, and keeps its state on the host and in this memory.
    """

    def __init__(self, group: dist.ProcessGroup | None, p: MoEProblem, device: int) -> None:
        push, cake = library.push_layers()
        fp8, ranks = _in_fp8(p), None if group is None else buffers.Ranks(group)
        payload = push.Sm90PushPayload.FP8 if fp8 else push.Sm90PushPayload.BF16
        config = push.Sm90PushConfig(
            payload_dtype=payload, combine_dtype=push.Sm90PushCombine.BF16, dedup_dispatch=True
        )
        held = torch.cuda.memory_allocated()
        try:
            self.pipe = push.Sm90PushPipe(
                ep_size=1 if ranks is None else ranks.size, rank=0 if ranks is None else ranks.rank,
                num_local_experts=p.num_local_experts, hidden_size=p.hidden_size, top_k=p.top_k,
                token_capacity=p.max_num_tokens, device_index=device,
                config=config, comm_backend=ranks, out_dtype=torch.bfloat16,
            )  # fmt: skip
            made = push.Sm90PushMoERunner if fp8 else cake.Sm90CakeBf16MoERunner
            self.runner = made(self.pipe, bundle(p, _any_weights(p, self.pipe.device)))
        except RuntimeError as error:  # the library collects the errors of all ranks
            raise BackendError(
                f"FlashInfer's layer failed: {error}; it compiles its modules with nvcc, and needs "
                "NVLink, whole GPUs, and a temporary directory that all ranks share"
            ) from error
        self._unbind()
        held = torch.cuda.memory_allocated() - held
        self.nbytes = round_up(self.pipe.total_bytes, 2 << 20) + max(0, held)
        self._inbox = self.pipe.combine_t
        self._lock = threading.Lock()
        # Kernels that wait for other ranks run in one order, also on several streams.
        self._calls = CallBuffers(object, group or self, most=1)  # type: ignore[arg-type]

    def run(
        self, out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: Any
    ) -> None:
        """Run one call. After an error of the library, every later call fails."""
        with self._lock:
            mine = self._calls.take()
            try:
                self.runner.bind_weights(weights)
                # The library zeroes its whole inbox before a call, and reads T tokens' rows alone.
                self.pipe.combine_t = self._inbox[: len(x_TH)]
                # It refuses a call after one on another stream; `take` has waited for that one.
                self.runner._round_event = None
                self.runner.forward(x_TH, ids_TK, weights_TK, output=out_TH)
            except RuntimeError as error:
                raise BackendError(f"FlashInfer's layer failed: {error}") from error
            finally:
                self._unbind()
                self._calls.give_back(mine)

    def _unbind(self) -> None:
        """Drop the weights of the latest call, which the runner would keep alive."""
        for name in _BOUND & vars(self.runner).keys():
            setattr(self.runner, name, {} if name == "_validated_weights" else None)

    def free(self) -> None:
        self.runner.destroy()


# The attributes in which the runners keep the weights of their calls.
_BOUND = {
    "w13_fp8", "w13_sf", "w2_fp8", "w2_sf", "weights", "_bound_weights", "_validated_weights",
}  # fmt: skip


def _in_fp8(p: MoEProblem) -> bool:
    return p.quant.name == "fp8_block"


def _any_weights(p: MoEProblem, device: torch.device) -> dict[str, Tensor]:
    """Return uninitialized weights for the construction of a runner; each call binds its own."""
    made, dtype = {}, torch.float8_e4m3fn if _in_fp8(p) else torch.bfloat16
    inner, L = p.local_intermediate_size, p.num_local_experts
    for name, n, k in (("w13", 2 * inner, p.hidden_size), ("w2", p.hidden_size, inner)):
        made[name] = torch.empty((L, n, k), dtype=dtype, device=device)
        blocks = L, n // 128, k // 128
        made[f"{name}_scale"] = torch.empty(blocks, dtype=torch.float32, device=device)
    return made


def bundle(p: MoEProblem, weights: Mapping[str, Tensor]) -> Any:
    """Return the library's view of one layer's packed weights."""
    (push, cake), w13, w2 = library.push_layers(), weights["w13"], weights["w2"]
    if _in_fp8(p):
        return push.Sm90PushWeights(w13, weights["w13_scale"], w2, weights["w2_scale"])
    sizes = p.num_local_experts, p.hidden_size, p.local_intermediate_size
    return cake.Sm90CakeBf16Weights(w13, w2, *sizes)


_windows: SharedBuffers[Window] = SharedBuffers(Window.free)


class PushKernel(FusedKernel):
    """Run FlashInfer's push layers. Layers of a group with equal problems share a window.

    Calls run in the order of their launches. If a rank never calls, the library's kernels trap
    after their own timeout.
    """

    lease: Lease[Window]

    def __init__(
        self, spec: FusedSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, buffers.protocol(spec.name)))
        index = torch.cuda.current_device() if problem.device.type == "cuda" else 0
        key = self.group, problem, index
        self.lease = _windows.lease(key, lambda: Window(*key))

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Alternate 32 gate rows and 32 up rows in bf16; fp8 stays as it is."""
        experts, _ = weights.by_expert()
        if not _in_fp8(self.problem):
            w13 = experts["w13"]
            L, rows, columns = w13.shape
            turns = w13.view(L, 2, rows // 64, 32, columns).transpose(1, 2)
            experts["w13"] = turns.reshape(L, rows, columns)
        return PackedWeights(self.spec.name, experts)

    def run(
        self, out_TH: Tensor, x_TH: Tensor, weights: PackedWeights, routing: Routing,
        workspace: Sequence[Tensor],
    ) -> None:  # fmt: skip
        ids_TK, view = routing.topk_ids, bundle(self.problem, weights.experts)
        if self.group is None:
            ids_TK = local_ids(ids_TK, self.problem)
        ids, topk_weights = _aligned(ids_TK), _aligned(routing.topk_weights)
        self.lease.value.run(out_TH, x_TH, ids, topk_weights, view)

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of local ids, of a mask, and of aligned copies of ids and weights."""
        return num_tokens * 13 * self.problem.top_k


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows, copied if their address is not a multiple of 16, as the library needs."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
