"""Dispatch and combine over several GPUs: moekit's adapter beside the bare library, in turns.

    python benchmarks/device/adapters.py deepep_ll --ranks 2

Prints a Markdown table per wire format: microseconds of one dispatch and one combine in a CUDA
graph, eagerly, and on the host; the slowest rank's medians. `python -m moekit check NAME` says
whether the numbers are right.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import NAN, in_turns, say
from moekit_bench import Timer
from torch import Tensor

import moekit
from moekit import MoEProblem, ParallelConfig, Routing
from moekit.testing.distributed import RankPool

CALLS = 10  # in one graph
HEAD = ("T", "bare", "adapter", "ratio", "bare eager", "adapter eager", "bare host", "adapter host")


@dataclass
class Case:
    """One rank's tensors. sent: x and its scale as they travel. y: what experts return."""

    dispatcher: Any
    problem: MoEProblem
    x: Tensor
    routing: Routing
    sent: tuple[Tensor, Tensor | None]
    y: Tensor

    def adapter(self) -> None:
        quantize = None if self.sent[1] is None else lambda *_: self.sent
        tokens = self.dispatcher.prepare(self.x, self.routing, quantize).result()
        place = self.dispatcher.output(tokens)  # where experts can write without a later copy
        y = place if place is not None else self.y
        y = y if y.dim() == 3 else y[: tokens.x.shape[0]]
        out = None if self.dispatcher.makes_output else torch.empty_like(self.x)
        self.dispatcher.finalize(y, tokens, out).result()

    @property
    def payload(self) -> Any:
        return self.sent[0] if self.sent[1] is None else self.sent


def deepep_ht(c: Case) -> Callable[[], None]:
    from moekit_deepep import buffers

    ranks = dist.get_world_size()
    dispatch_config, combine_config = buffers.normal_configs(ranks)
    buffer, rows = c.dispatcher._buffer, c.dispatcher.max_rows(len(c.x))

    def call() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            c.routing.topk_ids, c.problem.num_experts, async_finish=True
        )
        _, _, _, _, handle, event = buffer.dispatch(
            c.payload,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=c.routing.topk_ids,
            topk_weights=c.routing.topk_weights,
            num_worst_tokens=rows,
            config=dispatch_config,
            async_finish=True,
        )
        event.current_stream_wait()
        _, _, event = buffer.combine(c.y[:rows], handle, config=combine_config, async_finish=True)
        event.current_stream_wait()

    return call


def deepep_ll(c: Case) -> Callable[[], None]:
    buffer, ids, out = c.dispatcher._buffer, c.routing.topk_ids, torch.empty_like(c.x)
    capacity = c.dispatcher._tokens(0)

    def call() -> None:
        _, _, handle, event, _ = buffer.low_latency_dispatch(
            c.x,
            ids,
            capacity,
            c.problem.num_experts,
            use_fp8=c.sent[1] is not None,
            async_finish=True,
        )
        event.current_stream_wait()
        _, event, _ = buffer.low_latency_combine(
            c.y, ids, c.routing.topk_weights, handle, async_finish=True, out=out
        )
        event.current_stream_wait()

    return call


def deepep_elastic(c: Case) -> Callable[[], None]:
    from moekit_deepep.buffers import NUM_SMS

    buffer = c.dispatcher._buffer

    def call() -> None:
        _, _, _, handle, event = buffer.dispatch(
            c.payload,
            topk_idx=c.routing.topk_ids,
            topk_weights=c.routing.topk_weights,
            num_experts=c.problem.num_experts,
            num_max_tokens_per_rank=c.problem.max_num_tokens,
            num_sms=NUM_SMS,
            do_cpu_sync=False,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        _, _, event = buffer.combine(c.y, handle, async_with_compute_stream=True)
        event.current_stream_wait()

    return call


def flashinfer_alltoall(c: Case) -> Callable[[], None]:
    """Return the library's own calls, with sanitized ids; the output lies where it is read."""
    buffers, p = c.dispatcher.lease.value, c.problem
    lib, ranks, buffer = buffers.library, buffers.ranks, buffers.calls.all[0]
    ids = c.routing.topk_ids
    parts = [part for part in (*c.sent, c.routing.topk_weights, ids) if part is not None]
    memory = buffer.memory.tensor
    where = (memory, buffer.metainfo, buffers.capacity, ranks.rank, ranks.size, p.top_k)
    nbytes = ranks.size * buffers.capacity * p.hidden_size * p.dtype.itemsize

    def call() -> None:
        received, offset, *_ = lib.moe_a2a_dispatch(ids, parts, *where, p.num_physical_experts)
        lib.moe_a2a_sanitize_expert_ids(received[-1], memory, buffer.metainfo, ranks.rank, -1)
        y = memory[ranks.rank, offset : offset + nbytes].view(p.dtype)
        lib.moe_a2a_combine(
            y.view(ranks.size, buffers.capacity, -1), len(ids), *where, offset, True
        )

    return call


def nccl(c: Case) -> Callable[[], None]:
    """Return the library's own calls, with the adapter's memory and descriptors made once."""
    import nccl.ep as ep
    from moekit_nccl.dispatcher import _FORWARDED

    held, routing = c.dispatcher.lease.value, c.routing
    memory, out, few = held.calls.all[0], torch.empty_like(c.x), held.sizes.low_latency
    ids, inputs = ep.Tensor(routing.topk_ids), c.dispatcher.inputs(routing.topk_weights, *c.sent)
    _, _, outputs = memory.got[c.sent[1] is not None]
    config = None if c.sent[1] is None else _FORWARDED
    rows = ep.CombineInputs(tokens=ep.Tensor(c.y)) if few else memory.combined
    weights = ep.Tensor(routing.topk_weights) if few else None
    combined = ep.CombineOutputs(tokens=ep.Tensor(out), topk_weights=weights)

    def call() -> None:
        stream, info = held.stream(), memory.info
        memory.handle.update(ids, stream=stream)
        memory.handle.dispatch(inputs, outputs, layout_info=info, config=config, stream=stream)
        memory.handle.combine(rows, combined, stream=stream)

    return call


def pplx(c: Case) -> Callable[[], None]:
    from pplx_kernels import AllToAll

    p, ranks, (sent, scale) = c.problem, dist.get_world_size(), c.sent
    groups = 0 if scale is None else scale.shape[1]
    local, rows = p.num_local_experts, ranks * (p.max_num_tokens or 0)
    library = AllToAll.intranode(
        max_num_tokens=p.max_num_tokens,
        num_experts=p.num_experts,
        experts_per_token=p.top_k,
        rank=dist.get_rank(),
        world_size=ranks,
        dp_size=1,
        hidden_dim=p.hidden_size,
        hidden_dim_bytes=p.hidden_size * sent.itemsize,
        hidden_dim_scale_bytes=4 * groups,
        group_name=dist.group.WORLD.group_name,
    )
    x_LCH = torch.empty(local, rows, p.hidden_size, dtype=sent.dtype, device="cuda")
    scale_LCG = None if scale is None else torch.empty(local, rows, groups, device="cuda")
    y_LCH = torch.zeros(local, rows, p.hidden_size, dtype=p.dtype, device="cuda")
    counts_L = torch.empty(local, dtype=torch.int32, device="cuda")
    ids, out = c.routing.topk_ids.int().view(torch.uint32), torch.empty_like(c.x)

    def call() -> None:
        library.dispatch(counts_L, x_LCH, scale_LCG, sent, scale, ids, None)
        library.combine(out, ids, c.routing.topk_weights, y_LCH, None)

    return call


# The bare library's calls, the ids' dtype, and the tokens of a rank that are measured.
MANY = (1, 16, 128, 1024, 4096)
LIBRARIES: dict[str, tuple[Callable[[Case], Callable[[], None]], torch.dtype, tuple[int, ...]]] = {
    "deepep_ht": (deepep_ht, torch.int64, (1, 16, 128, 1024)),  # graphs need a fixed number of rows
    "deepep_ll": (deepep_ll, torch.int64, (1, 16, 64, 128)),
    "deepep_elastic": (deepep_elastic, torch.int64, MANY),
    "flashinfer_alltoall": (flashinfer_alltoall, torch.int32, MANY),
    "nccl_ht": (nccl, torch.int64, (*MANY, 8192)),
    "nccl_ll": (nccl, torch.int64, (1, 16, 128, 512)),
    "pplx": (pplx, torch.int64, (1, 16, 64, 128)),
}


def measure(rank: int, ranks: int, name: str, wire: str, tokens: int) -> dict[str, float]:
    """Return the times of both on this rank, and the adapter's buffers in GB."""
    bare, ids_dtype, _ = LIBRARIES[name]
    problem = MoEProblem(
        num_experts=256, top_k=8, hidden_size=7168, intermediate_size=256, quant=wire,
        max_num_tokens=tokens, device="cuda",
        parallel=ParallelConfig(ep_size=ranks, ep_rank=rank),
    )  # fmt: skip
    spec = moekit.registry().dispatcher(name)
    if reasons := spec.unsupported(problem):
        raise RuntimeError("; ".join(reasons))
    dispatcher: Any = spec.load()(spec, problem, None)
    torch.manual_seed(rank)
    x = torch.randn(tokens, problem.hidden_size, device="cuda").bfloat16()
    scores = torch.rand(tokens, problem.num_experts, device="cuda")
    ids = scores.topk(problem.top_k, dim=1).indices.to(ids_dtype)
    routing = Routing(torch.rand(tokens, problem.top_k, device="cuda"), ids)
    sent: tuple[Tensor, Tensor | None] = (x, None)
    if problem.quant.activation is not None:
        sent = (x.to(torch.float8_e4m3fn), torch.rand(tokens, x.shape[1] // 128, device="cuda"))
    rows: tuple[int, ...] = (dispatcher.max_rows(tokens),)
    if spec.format is moekit.ActivationFormat.BATCHED:
        rows = (problem.num_local_experts, *rows)
    y = torch.zeros(*rows, problem.hidden_size, dtype=x.dtype, device="cuda")
    case = Case(dispatcher, problem, x, routing, sent, y)
    calls = {"bare": [bare(case)] * CALLS, "adapter": [case.adapter] * CALLS}
    times = in_turns(calls, timer=Timer(torch.device("cuda", rank), ranks=True))
    found = {"GB": dispatcher.buffer_bytes() / 1e9}
    for side, timing in times.items():
        found |= {side: timing.us, f"{side} eager": timing.eager_us}
        found[f"{side} host"] = NAN if timing.host_us is None else timing.host_us
    dispatcher.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=LIBRARIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--wires", nargs="+", default=["none", "fp8_block"])
    args = parser.parse_args()
    # NVLink multicast stays off, whatever starts this.
    os.environ.update(NVSHMEM_DISABLE_NVLS="1", NCCL_NVLS_ENABLE="0")
    say(f"{args.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.names:
        with RankPool(args.ranks, "cuda", timeout=540) as pool:
            for wire in args.wires:
                say(f"\n### {name}, {wire} on the wire, {args.ranks} ranks\n")
                say(f"| {' | '.join(HEAD)} | buffers |\n|{'---|' * (len(HEAD) + 1)}")
                for tokens in args.tokens or LIBRARIES[name][2]:
                    ranks = pool.run(measure, name, wire, tokens)
                    worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
                    worst["ratio"] = worst["adapter"] / worst["bare"]
                    cells = [f"{worst[n]:.{3 if n == 'ratio' else 1}f}" for n in HEAD[1:]]
                    say(f"| {tokens} | {' | '.join(cells)} | {worst['GB']:.2f} GB |")


if __name__ == "__main__":
    main()
