"""Functions that the ranks of the GPU tests run, over the true library."""

from __future__ import annotations

import torch
import torch.distributed as dist

import moekit
from moekit import MoEProblem, ParallelConfig, Routing

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8


def bare(rank, world, tokens):
    from pplx_kernels import AllToAll

    return AllToAll.intranode(
        max_num_tokens=tokens,
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        rank=rank,
        world_size=world,
        dp_size=1,
        hidden_dim=HIDDEN,
        hidden_dim_bytes=2 * HIDDEN,
        hidden_dim_scale_bytes=0,
        group_name=dist.group.WORLD.group_name,
    )


def close(*objects):
    torch.cuda.synchronize()
    dist.barrier()
    for each in objects:
        each.destroy()
    dist.barrier()


def lost_rows(rank, world, tokens, rounds=10):
    """Return (wrong rows, all rows) where each rank sends ``tokens`` tokens at once."""
    each = bare(rank, world, tokens)
    local = EXPERTS // world
    x = (torch.arange(tokens, device="cuda") + 4096 * rank).to(torch.int16)
    x = x[:, None].expand(tokens, HIDDEN).contiguous()
    slab = torch.zeros(local, world * tokens, HIDDEN, dtype=torch.int16, device="cuda")
    counts = torch.empty(local, dtype=torch.int32, device="cuda")
    y = torch.zeros(local, world * tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator().manual_seed(0)
    wrong = total = 0
    for _ in range(rounds):
        ids = torch.rand(world, tokens, EXPERTS, generator=generator).argsort(-1)[:, :, :TOP_K]
        mine = ids[rank].int().cuda().contiguous().view(torch.uint32)
        each.dispatch(counts, slab, None, x, None, mine, None)
        each.combine(out, mine, torch.ones(tokens, TOP_K, device="cuda"), y, None)
        torch.cuda.synchronize()
        for expert in range(local):
            source, token, _ = (ids == rank * local + expert).nonzero(as_tuple=True)
            want = (4096 * source + token).to(torch.int16).sort().values
            rows = slab[expert, : int(counts[expert])].cpu()
            assert len(rows) == len(want), "a count is wrong"
            whole = rows[(rows == rows[:, :1]).all(dim=1), 0]
            found = torch.isin(want, whole)
            wrong += int((~found).sum())
            total += len(want)
    close(each)
    return wrong, total


def streams(rank, world):
    """Run calls on two streams, launched in one order, while GPUs are busy at other times."""
    spec = moekit.registry().dispatcher("pplx")
    problem = MoEProblem(
        num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=128,
        max_num_tokens=64, device="cuda", parallel=ParallelConfig(ep_size=world, ep_rank=rank),
    )  # fmt: skip
    dispatcher = spec.load()(spec, problem)
    torch.manual_seed(rank)
    x = torch.randn(64, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(64, EXPERTS, device="cuda").argsort(-1)[:, :TOP_K].contiguous()
    weights = torch.rand(64, TOP_K, device="cuda")
    pair = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for step in range(20):
        for stream in pair:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(2e6) * ((rank + step) % 2))
                tokens = dispatcher.prepare(x, Routing(weights, ids), None).result()
                dispatcher.finalize(dispatcher.output(tokens), tokens, torch.empty_like(x))
    torch.cuda.synchronize()
    dispatcher.destroy()
