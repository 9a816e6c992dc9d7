"""The dispatchers over the true library, on 2, 4 or 8 GPUs: right first, then beside it, bare.

    python plugins/moekit-deepep/tests/deepep_device.py --ranks 2

One process per GPU. Prints what was checked, then Markdown tables of microseconds per pair (one
dispatch and one combine), the slowest rank's, median of rounds in which the bare library and the
adapter take turns. Every part has processes of its own, which are ended if it fails or hangs, and
the rest goes on. Options: --only with names of parts (`numbers_ht lifecycle ht ...`), --hidden,
--experts, --top-k, --tokens, --seconds for each part. --standin: a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepep_times import Rank, captured, elastic, ht, ll, quantizer

from moekit import MoEProblem, ParallelConfig, Routing, registry


class Process(Rank):
    """One process's place in the run, and what all parts need."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.args = rank, args.ranks, args
        self.gpu = not args.standin
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(rank)
            self.specs = registry().dispatchers
        else:
            import deepep_standin

            self.specs = {
                name.removesuffix("_standin"): spec
                for name, spec in deepep_standin.registry().dispatchers.items()
                if name.endswith("_standin")
            }
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=rank,
            world_size=args.ranks,
            timeout=timedelta(seconds=120),
            device_id=self.device if self.gpu else None,
        )

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            print(text, flush=True)

    def worst(self, value: float) -> float:
        seen: list[float] = [0.0] * self.ranks
        dist.all_gather_object(seen, value)
        return max(seen)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def problem(self, most: int | None, **changes: Any) -> MoEProblem:
        sizes = {
            "num_experts": self.args.experts,
            "top_k": self.args.top_k,
            "hidden_size": self.args.hidden,
            "intermediate_size": 256,
            "max_num_tokens": most,
            "parallel": ParallelConfig(ep_size=self.ranks, ep_rank=self.rank),
            "device": None if self.gpu else "cpu",
        }
        return MoEProblem(**{**sizes, **changes})

    def dispatcher(self, name: str, most: int | None, **changes: Any) -> Any:
        spec, problem = self.specs[name], self.problem(most, **changes)
        assert not spec.unsupported(problem), spec.unsupported(problem)
        return spec.load()(spec, problem, None)

    def tokens(self, count: int, seed: int, top_k: int = 0, holes: bool = False):
        """x (T, H) bf16 and a routing; holes: -1 in slots and whole tokens, which are NaN."""
        args = self.args
        made = torch.Generator().manual_seed(1000 * seed + self.rank)
        x = torch.randn(count, args.hidden, generator=made).bfloat16()
        ids = torch.rand(count, args.experts, generator=made).argsort(1)[:, : top_k or args.top_k]
        weights = torch.rand(ids.shape, generator=made) + 0.5
        if holes:
            ids[torch.rand(ids.shape, generator=made) < 0.2] = -1
            ids[::5] = -1
            weights[ids < 0] = float("nan")
            x[(ids < 0).all(dim=1)] = float("nan")
        weights, ids = weights.to(self.device), ids.contiguous().to(self.device)
        return x.to(self.device), Routing(weights, ids)


# -- numbers --------------------------------------------------------------------------------------


def identity(tokens: Any) -> torch.Tensor:
    """Experts that return their input, as the contract has it for each format; padding is NaN."""
    x = tokens.x.float()
    if tokens.x_scale is not None:
        scale = tokens.x_scale
        x = (x.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    if tokens.expert_num_tokens is not None:
        real = torch.arange(x.shape[1], device=x.device) < tokens.expert_num_tokens[:, None]
        return torch.where(real[..., None], x, float("nan")).bfloat16()
    weight = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0).sum(1, keepdim=True)
    return torch.where(weight > 0, x * weight, 0.0).bfloat16()


def through(dispatcher: Any, x: torch.Tensor, routing: Routing) -> Any:
    wire = dispatcher.problem.quant.name in dispatcher.spec.wire_schemes
    return dispatcher.prepare(x, routing, quantizer(dispatcher.problem) if wire else None)


def error_of(out: torch.Tensor, x: torch.Tensor, routing: Routing) -> float:
    """Relative RMS; infinite if anything is not finite."""
    weight = torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0).sum(1, keepdim=True)
    want = torch.where(weight > 0, x.float() * weight, 0.0)
    if not out.numel():
        return 0.0
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    difference = (out.float() - want).square().mean().sqrt()
    return float(difference / want.square().mean().sqrt().clamp(min=1e-6))


def run(dispatcher: Any, x: torch.Tensor, routing: Routing) -> float:
    tokens = through(dispatcher, x, routing).result()
    out = torch.full_like(x, float("nan"))
    dispatcher.finalize(identity(tokens), tokens, out).result()
    return error_of(out, x, routing)


_LIMITS = {"none": 6e-3, "int8_channel_token": 2e-2}
_WIRE = ("fp8_block", "fp8_channel_token", "fp8_tensor", "fp8_tensor_static", "int8_channel_token")


def numbers(r: Rank, name: str) -> None:
    """100 calls for each kind of tokens on the wire: T up and down and zero, holes; K = 1."""
    for scheme in ("none", *(s for s in _WIRE if s in r.specs[name].wire_schemes)):
        for most in (None, 128) if name == "deepep_ht" else (128,):
            dispatcher, errors = r.dispatcher(name, most, quant=scheme), []
            for call in range(100):
                count = 0 if call % 10 == 9 else (7 * call + 31 * r.rank) % 129
                count = count if call % 7 or r.rank else 0
                errors.append(run(dispatcher, *r.tokens(count, call, holes=call % 2 == 1)))
            report(r, f"{name} {scheme} max_num_tokens={most}", max(errors), scheme)
            dispatcher.destroy()
    dispatcher = r.dispatcher(name, 64, top_k=1)
    report(r, f"{name} K=1", run(dispatcher, *r.tokens(33, 5, top_k=1)), "none")
    dispatcher.destroy()


def report(r: Rank, what: str, error: float, scheme: str) -> None:
    worst = r.worst(error)
    r.say(f"{what}: {'ok' if worst < _LIMITS.get(scheme, 6e-2) else 'WRONG'}, error {worst:.2g}")


def numbers_ht(r: Rank) -> None:
    numbers(r, "deepep_ht")


def numbers_ll(r: Rank) -> None:
    numbers(r, "deepep_ll")


def numbers_elastic(r: Rank) -> None:
    numbers(r, "deepep_elastic")


def lifecycle(r: Rank) -> None:
    """Shapes and kinds side by side, made again, two in flight, and in CUDA graphs."""
    names = ("deepep_ht", "deepep_ll", "deepep_elastic")
    for round_ in range(2):
        layers = [r.dispatcher(name, most) for most in (64, 128) for name in (*names, names[1])]
        flying = []
        for call in range(24):
            x, routing = r.tokens((5 * call + r.rank) % 65, call)
            layer = layers[call % len(layers)]
            flying.append((layer, x, routing, through(layer, x, routing)))
            if len(flying) > 1:
                finish_one(r, flying, f"round {round_} call {call}")
        while flying:
            finish_one(r, flying, f"round {round_}, the last calls")
        said = ", ".join(f"{d.spec.name} {d.buffer_bytes() / 2**20:.0f} MiB" for d in layers)
        for layer in layers:
            layer.destroy()
        r.say(f"side by side, two in flight, round {round_}: ok ({said})")
    if not r.gpu:
        return
    for name in names:
        for scheme in ("none", "fp8_block"):
            dispatcher = r.dispatcher(name, 64, quant=scheme)
            report(r, f"graph {name} {scheme}", replayed(r, dispatcher), scheme)
            dispatcher.destroy()


def finish_one(r: Rank, flying: list[Any], what: str) -> None:
    layer, x, routing, pending = flying.pop(0)
    tokens = pending.result()
    out = torch.full_like(x, float("nan"))
    layer.finalize(identity(tokens), tokens, out).result()
    error = error_of(out, x, routing)
    assert error < 6e-3, f"{layer.spec.name}, {what}: error {error:.2g}"


def replayed(r: Rank, dispatcher: Any) -> float:
    x, routing = r.tokens(48, 0)
    out, errors = torch.empty_like(x), []

    def call() -> None:
        tokens = through(dispatcher, x, routing).result()
        dispatcher.finalize(identity(tokens), tokens, out).result()

    graph = captured(r, call)
    for seed in range(5):
        new_x, new = r.tokens(48, seed, holes=seed > 2)
        x.copy_(new_x)
        routing.topk_weights.copy_(new.topk_weights)
        routing.topk_ids.copy_(new.topk_ids)
        out.fill_(float("nan"))
        graph.replay()
        errors.append(error_of(out, x, routing))
    return max(errors)


# -- the run --------------------------------------------------------------------------------------

PARTS = {
    f.__name__: f for f in (numbers_ht, numbers_ll, numbers_elastic, lifecycle, ht, ll, elastic)
}


def work(rank: int, args: argparse.Namespace, part: str) -> None:
    r = Process(rank, args)
    PARTS[part](r)
    r.synchronize()
    dist.destroy_process_group()


def versions(args: argparse.Namespace) -> str:
    if args.standin:
        return f"torch {torch.__version__}, the stand-in, {args.ranks} processes"
    import deep_ep

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"torch {torch.__version__}, NCCL {nccl}, deep_ep {deep_ep.__version__}, "
        f"{args.ranks} x {torch.cuda.get_device_name()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 128, 512, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--standin", action="store_true")
    args = parser.parse_args()
    # NVLink multicast stays off, whatever starts this.
    os.environ.update(NVSHMEM_DISABLE_NVLS="1", NCCL_NVLS_ENABLE="0")
    print(versions(args))
    print(f"{args.experts} experts, top-{args.top_k}, hidden {args.hidden}", flush=True)
    for part in args.only or PARTS:
        print(f"\n## {part}\n", flush=True)
        begin, fault = time.time(), ""
        context = mp.spawn(work, args=(args, part), nprocs=args.ranks, join=False)
        try:
            while not context.join(timeout=1.0):
                if time.time() - begin > args.seconds:
                    fault = f"not done within {args.seconds:g} s"
                    break
        except Exception as error:  # a process raised or died
            fault = str(error)
        for process in context.processes:
            process.kill()
        print(f"\n{part}: {fault or 'done'} in {time.time() - begin:.0f} s", flush=True)
        args.port += 1


if __name__ == "__main__":
    main()
