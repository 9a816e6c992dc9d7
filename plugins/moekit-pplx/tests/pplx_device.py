"""On GPUs of one host, over the true library: right numbers, its limit, and what the adapter costs.

    python plugins/moekit-pplx/tests/pplx_device.py --ranks 2 4

Prints markdown. Needs pplx_kernels and as many GPUs as ranks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
import torch.distributed as dist

import moekit
from moekit import MoEProblem, ParallelConfig, Routing
from moekit.testing import cases
from moekit.testing.distributed import RankPool
from moekit.testing.ranks import Call, Job, calls, in_flight

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
IN_GRAPH = 20
SIZES = (1, 16, 64, 128)


def problem_for(world, tokens, **changes):
    values = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "max_num_tokens": tokens,
        "device": "cuda",
        "parallel": ParallelConfig(ep_size=world),
    }
    return MoEProblem(**{**values, **changes})


# -- right numbers --------------------------------------------------------------------------------

CHECKS = {
    "bf16, uneven": ({}, [Call((128, 0, 3, 77)), Call((0, 0, 0, 1)), Call((128,), "slots")]),
    "bf16, padding and a hot expert": ({}, [Call((100, 128, 9, 64), "rows"), Call((128,), "hot")]),
    "fp16": ({"dtype": torch.float16}, [Call((128, 1, 30, 77), "slots")]),
    "fp8 blocks": ({"quant": "fp8_block"}, [Call((128, 0, 3, 77), "rows")]),
    "fp8 per token": ({"quant": "fp8_channel_token"}, [Call((128, 0, 3, 77), "slots")]),
    "int8 per token": ({"quant": "int8_channel_token"}, [Call((128, 0, 3, 77))]),
    "fp8 per tensor": ({"quant": "fp8_tensor"}, [Call((128, 0, 3, 77), "rows")]),
    "three rounds": ({"max_num_tokens": 300}, [Call((300, 131, 0, 200), "slots")]),
    "100 calls": ({}, [Call((i % 129, i * i % 77, 3, (7 * i) % 120)) for i in range(100)]),
    "uneven experts": ({"num_experts": 255}, [Call((128, 0, 3, 77), "slots")]),
}


def right(rank, world, name, seed):
    changes, sequence = CHECKS[name]
    # The kit compares with all experts on one rank: few and narrow ones keep that quick.
    small = {"num_experts": 32, "hidden_size": 2048, **changes}
    if name == "uneven experts":
        small["num_experts"] = 31
    problem = problem_for(world, changes.get("max_num_tokens", 128), **small)
    calls(rank, world, Job(moekit.registry().dispatcher("pplx"), problem, seed), sequence)


def two_at_once(rank, world, seed):
    job = Job(moekit.registry().dispatcher("pplx"), problem_for(world, 128, num_experts=32), seed)
    in_flight(rank, world, job, Call((128, 0, 3, 77)), Call((5, 128, 2, 1), "slots"))


# -- the bare library -----------------------------------------------------------------------------


def bare(
    rank, world, tokens, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, row_bytes=None, scales=0
):
    from pplx_kernels import AllToAll

    return AllToAll.intranode(
        max_num_tokens=tokens,
        num_experts=experts,
        experts_per_token=top_k,
        rank=rank,
        world_size=world,
        dp_size=1,
        hidden_dim=hidden,
        hidden_dim_bytes=row_bytes or 2 * hidden,
        hidden_dim_scale_bytes=4 * scales,
        group_name=dist.group.WORLD.group_name,
    )


def close(*objects):
    torch.cuda.synchronize()
    dist.barrier()
    for each in objects:
        each.destroy()
    dist.barrier()


def lost_rows(rank, world, tokens, rounds=10):
    """(rows that are not what was sent, all rows), when each rank sends ``tokens`` at once."""
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


# -- times ----------------------------------------------------------------------------------------


def graphed(pair, repeats=15):
    """Median µs on the GPU of one ``pair``, of IN_GRAPH in a CUDA graph."""
    for _ in range(3):
        pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            pair()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / IN_GRAPH)
    return statistics.median(times)


def eager(pair, repeats=50):
    """Median µs of a ``pair`` launched one by one, and of the host alone."""
    for _ in range(5):
        pair()
    torch.cuda.synchronize()
    dist.barrier()
    host = []
    start = time.perf_counter()
    for _ in range(repeats):
        before = time.perf_counter()
        pair()
        host.append(1e6 * (time.perf_counter() - before))
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / repeats, statistics.median(host)


def random_call(rank, tokens):
    """x (T, H) bf16, ids (T, K) int64, weights (T, K), and an output."""
    torch.manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(-1)[:, :TOP_K].contiguous()
    return x, ids, torch.rand(tokens, TOP_K, device="cuda"), torch.empty_like(x)


def wire(x, quantized):
    """x and its scales as they travel."""
    if not quantized:
        return x, None
    return x.to(torch.float8_e4m3fn), torch.rand(x.shape[0], HIDDEN // 128, device="cuda")


def bare_times(rank, world, tokens, quantized):
    """µs of the library alone, by name."""
    x, ids, weights, out = random_call(rank, tokens)
    sent, scale = wire(x, quantized)
    groups = 0 if scale is None else scale.shape[1]
    each = bare(rank, world, tokens, row_bytes=HIDDEN * sent.itemsize, scales=groups)
    local, rows = EXPERTS // world, world * tokens
    slab = torch.empty(local, rows, HIDDEN, dtype=sent.dtype, device="cuda")
    slab_scale = None if scale is None else torch.empty(local, rows, groups, device="cuda")
    counts = torch.empty(local, dtype=torch.int32, device="cuda")
    y = torch.zeros(local, rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    narrow = ids.int().view(torch.uint32)
    inputs = (counts, slab, slab_scale, sent, scale, narrow, None)

    def fused():
        each.dispatch(*inputs)
        each.combine(out, narrow, weights, y, None)

    def split():
        each.dispatch(*inputs, do_send=True, do_recv=False)
        each.dispatch(*inputs, do_send=False, do_recv=True)
        each.combine(out, narrow, weights, y, None)

    found = {"bare": graphed(fused), "bare, split dispatch": graphed(split)}
    found["bare, eager"], found["bare, host"] = eager(fused)
    close(each)
    return found


def adapter_times(rank, world, tokens, quantized):
    """µs of the dispatcher, and GB of its buffers, by name."""
    x, ids, weights, out = random_call(rank, tokens)
    sent, scale = wire(x, quantized)
    routing = Routing(weights, ids)
    gc.collect()  # what earlier calls left must not be freed in between
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    dispatcher = dispatcher_for(rank, world, tokens, quant="fp8_block" if quantized else "none")

    def call():
        arriving = dispatcher.prepare(x, routing, (lambda *_: (sent, scale)) if quantized else None)
        arrived = arriving.result()
        dispatcher.finalize(dispatcher.output(arrived), arrived, out).result()

    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    found = {"adapter": graphed(call)}
    found["adapter, eager"], found["adapter, host"] = eager(call)
    found["stated GB"], found["taken GB"] = dispatcher.buffer_bytes() / 1e9, taken / 1e9
    dispatcher.destroy()
    return found


def dispatcher_for(rank, world, tokens, **changes):
    spec = moekit.registry().dispatcher("pplx")
    problem = problem_for(
        world, tokens, parallel=ParallelConfig(ep_size=world, ep_rank=rank), **changes
    )
    return spec.load()(spec, problem)


def replays(rank, world):
    """A graph replayed with other tokens and routing, compared with an eager call."""
    dispatcher = dispatcher_for(rank, world, 128)
    x, ids, weights, out = random_call(rank, 128)

    def call():
        tokens = dispatcher.prepare(x, Routing(weights, ids), None).result()
        dispatcher.finalize(tokens.x, tokens, out).result()

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    worst = 0.0
    for step in range(50):
        x.normal_()
        ids.copy_(torch.rand(128, EXPERTS, device="cuda").argsort(-1)[:, :TOP_K])
        ids[torch.rand(128, TOP_K, device="cuda") < 0.1 * (step % 3)] = -1
        if step % 2:
            ids[100:] = -1
            x[100:] = float("nan")
        graph.replay()
        total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        want = torch.where(total > 0, x.float() * total, 0.0)
        worst = max(worst, float((out.float() - want).norm() / want.norm()))
    torch.cuda.synchronize()
    dispatcher.destroy()
    return worst


def streams(rank, world):
    """Calls on two streams, in one order of launch, while each rank's GPU is busy differently."""
    dispatcher = dispatcher_for(rank, world, 64)
    x, ids, weights, _ = random_call(rank, 64)
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


# -- the report -----------------------------------------------------------------------------------


def report(world):
    print(f"\n### {world} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}\n")
    with RankPool(world, "cuda", timeout=240) as pool:
        seed = cases.seed()
        for name in CHECKS:
            pool.run(right, name, seed)
            print(f"- right: {name}", flush=True)
        pool.run(two_at_once, seed)
        print("- right: two calls in flight", flush=True)
        print(f"- graph, 50 replays: relative error {max(pool.run(replays)):.1e}", flush=True)
        pool.run(streams)
        print("- 40 calls on two streams: done", flush=True)
        for tokens in (128, 132, 133, 160, 256):
            wrong, total = (sum(v) for v in zip(*pool.run(lost_rows, tokens), strict=True))
            print(f"- bare library, {tokens} tokens at once: {wrong} of {total} rows wrong")
        head = (
            "wire", "T", "bare", "bare, split dispatch", "adapter", "cost",
            "bare, eager", "adapter, eager", "bare, host", "adapter, host", "stated GB", "taken GB",
        )  # fmt: skip
        print("\nDispatch and combine, µs (median of ranks; first three in a CUDA graph):\n")
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for quantized in (False, True):
            for tokens in SIZES:
                row = {}
                for function in (bare_times, adapter_times):
                    ranks = pool.run(function, tokens, quantized)
                    row |= {name: statistics.median(r[name] for r in ranks) for name in ranks[0]}
                row["cost"] = 100 * (row["adapter"] / row["bare"] - 1)
                cells = [f"{row[n]:.{2 if 'GB' in n else 1}f}" for n in head[2:]]
                cells[3] += " %"
                print(f"| {'fp8' if quantized else 'bf16'} | {tokens} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    for world in parser.parse_args().ranks:
        report(world)
