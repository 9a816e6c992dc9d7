"""Check and time the products of a training step on one GPU: specialized warps beside the others.

    python benchmarks/device/training_products.py                 # check, then time
    python benchmarks/device/training_products.py time --shapes mixtral --tokens 16384
    python benchmarks/device/training_products.py order --shapes mixtral --tokens 16384

check: the relative RMS of each result against fp32, expert by expert: first with experts of 0, 1,
63, 64, 65, 129 and 700 rows, then of some experts of each shape. Memory behind the last row is NaN.
Specialized warps also copy rows, as in a step: up and pull what they read, outer_2 rows of x.
time: µs and TFLOP/s of each product in a CUDA graph, in turns, rows in order, uniform routing.
order: the same for several group_m (gN), the least of them marked.

Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from common import DEVICE, NAN, in_turns, normal, part, problem_of, routings_of, run_parts, say
from common import verdict as judge
from moekit_kernels.align import SortedAssignments
from moekit_kernels.numerics import Activation
from moekit_kernels.sorted_rows import copy_rows
from moekit_triton.kernels.specialized_training import specialized_outer, specialized_rows
from moekit_triton.kernels.tiles import GemmTile, SpecializedTile
from moekit_triton.kernels.training_gemm import Epilogue, outer_gemm, rows_gemm
from torch import Tensor

import moekit

_COUNTS = (0, 1, 63, 64, 65, 129, 700, 0)  # rows of each expert
_LIMIT = 4e-3
_SILU = Activation("silu")
_SMS = 132
_GROUPS = (1, 4, 8, 16, 32)


class Step:
    """The tensors of a step; ``run`` computes one product."""

    def __init__(self, problem: moekit.MoEProblem, ids_RK: Tensor) -> None:
        self.L, H, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
        experts = moekit.compose(problem, "local", "triton").experts
        self.rows, self.places = experts._sorted(ids_RK, 128)
        self.ends = self.rows.ends_L.tolist()
        self.S, sizes = ids_RK.numel(), (len(ids_RK), H)
        self.x_RH, self.g_RH = normal(*sizes), normal(*sizes)
        self.order = self.rows.order_S[: self.ends[-1]].long() // ids_RK.shape[1]
        self.x, self.g = (self.x_RH.new_full((self.S, H), NAN) for _ in range(2))
        self.w13 = normal(self.L, 2 * inner, H, std=H**-0.5)
        self.w2 = normal(self.L, H, inner, std=inner**-0.5)
        self.p = torch.rand(ids_RK.shape, device=DEVICE)
        self.h, self.dh, self.a, self.pa, self.y, self.dx = (
            self.x.new_full((self.S, n), NAN) for n in (2 * inner, 2 * inner, inner, inner, H, H)
        )
        self.parts = {n: self.p.new_full((self.S, -(-inner // n)), NAN) for n in (128, 256)}
        self.dw13, self.dw2 = torch.empty_like(self.w13), torch.empty_like(self.w2)
        self.into = torch.ones_like(self.w2, dtype=torch.float32)
        self.x[: self.ends[-1]] = self.x_RH[self.order]
        self.g[: self.ends[-1]] = self.g_RH[self.order]
        each = 2 * self.ends[-1] * H * inner
        self.flop = {"up": 2 * each, "down": each, "pull": each, "back": 2 * each,
                     "outer_13": 2 * each, "outer_2": each, "outer_2 add": each}  # fmt: skip

    def forget(self, product: str) -> None:
        """Fill rows that a product copies with NaN."""
        if product in ("up", "outer_2"):
            self.x.fill_(NAN)
        elif product == "pull":
            self.g.fill_(NAN)

    def run(self, product: str, special: bool, group_m: int = 8) -> None:
        plain, tile = GemmTile(128, 256, 64, num_warps=8, tma=True), SpecializedTile(group_m)
        if product == "copy":
            lists = SortedAssignments(self.rows.order_S, None, None, 1, self.places)
            copy_rows(self.x_RH, lists, self.y)
        elif product.startswith("outer"):
            a, b, out = {"outer_13": (self.dh, self.x, self.dw13),
                         "outer_2": (self.g, self.pa, self.dw2),
                         "outer_2 add": (self.g, self.pa, self.into)}[product]  # fmt: skip
            add = product.endswith("add")
            if special:
                copy = (self.x_RH, self.x) if product == "outer_2" else None
                specialized_outer(a, b, out, self.rows, tile, _SMS, add, copy)
            else:
                outer_gemm(a, b, out, self.rows, plain, gather="none", add=add)
        else:
            n = 256 if special else 128
            pull = Epilogue("pull", _SILU, self.h, None, self.p, self.dh, self.parts[n])
            up = Epilogue("activation", _SILU, self.h)
            a, w, out, end = {"up": (self.x, self.w13.mT, self.a, up),
                              "down": (self.a, self.w2.mT, self.y, Epilogue()),
                              "pull": (self.g, self.w2, self.pa, pull),
                              "back": (self.dh, self.w13, self.dx, Epilogue()),
                              }[product]  # fmt: skip
            if special:
                source = {"up": self.x_RH, "pull": self.g_RH}.get(product)
                specialized_rows(a, w, out, self.rows, tile, _SMS, end, source)
            else:
                n = 128 if product in ("up", "pull") else 256
                plain = GemmTile(128, n, 64, num_warps=8, num_stages=4, tma=True)
                rows_gemm(a, w, out, self.rows, plain, epilogue=end)

    def expected(self, product: str, expert: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield a product's results for an expert, and what they must be."""
        s, t = self.ends[expert - 1] if expert else 0, self.ends[expert]
        x, g, h, a, dh, pa = (
            v[s:t].float() for v in (self.x, self.g, self.h, self.a, self.dh, self.pa)
        )
        w13, w2 = self.w13[expert].float(), self.w2[expert].float()
        copied = {"up": "x", "pull": "g", "outer_2": "x"}.get(product)
        if copied is not None:
            source = getattr(self, f"{copied}_RH")[self.order[s:t]].float()
            yield f"copy of {copied}", getattr(self, copied)[s:t], source
        if product == "up":
            gate, up = (x @ w13.T).chunk(2, dim=1)
            yield "h", h, torch.cat([gate, up], dim=1)
            yield "a", a, F.silu(gate) * up
        elif product == "down":
            yield "y", self.y[s:t], a @ w2.T
        elif product == "pull":
            p = self.p.view(-1)[self.rows.order_S[s:t].long(), None]
            h.requires_grad_()
            act = F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :]
            yield "dh", dh, torch.autograd.grad(act, h, p * (g @ w2))[0]
            yield "pa", pa, p * act.detach()
            yield "<q, a>", self.parts[256][s:t].sum(dim=1), (g @ w2 * act.detach()).sum(dim=1)
        elif product == "back":
            yield "dx", self.dx[s:t], dh @ w13
        elif product == "outer_13":
            yield "dw13", self.dw13[expert], dh.T @ x
        else:
            added = product.endswith("add")
            yield product, (self.into if added else self.dw2)[expert], g.T @ pa + float(added)


def check(args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(_COUNTS)] + [torch.full((300,), -1)])
    ids = ids[torch.randperm(len(ids))].view(-1, 2).to(DEVICE)
    steps = [("uneven", lambda: Step(problem_of("8:2:512:384", training=True), ids))]
    for name in args.shapes:
        p = problem_of(name, training=True)
        steps.append((name, lambda p=p: Step(p, routings_of(p, 2048)[0].topk_ids)))
    for name, make in steps:
        step = make()
        experts = range(step.L) if name == "uneven" else (0, 1, step.L - 1)
        for product in step.flop:
            with part(f"{name} {product}"):
                step.forget(product)
                step.run(product, True)
                worst = dict[str, float]()
                for expert in experts:
                    for result, got, want in step.expected(product, expert):
                        size = want.norm().clamp(min=1e-6)
                        error = float((got.float() - want).norm() / size)
                        error = NAN if error != error else max(error, worst.get(result, 0.0))
                        worst[result] = error
                for result in (step.x, step.g, step.h, step.a, step.dh, step.pa, step.y, step.dx):
                    written = int((~result[step.ends[-1] :].isnan()).sum())
                    judge(f"{name} {product}: values behind the last row", written, 0)
                for result, error in worst.items():
                    found = judge(f"{name} {product} {result}", error, _LIMIT)
                    say(f"{name:10} {product:11} {result:11} {error:.1e} {found}")
        del step


def time(args: argparse.Namespace) -> None:
    say("| shape | tokens | product | µs | TFLOP/s | before: µs | TFLOP/s |")
    say("|---|---|---|---|---|---|---|")
    for name in args.shapes:
        p = problem_of(name, training=True)
        for tokens in args.tokens:
            step = Step(p, routings_of(p, tokens)[0].topk_ids)
            for product in ("copy", *step.flop):
                with part(f"{name} {tokens} {product}"):
                    calls = {"new": [partial(step.run, product, True)]}
                    if product != "copy":
                        calls["before"] = [partial(step.run, product, False)]
                    us = [found.us or NAN for found in in_turns(calls).values()]
                    flop = step.flop.get(product, 0)
                    cells = [f"{each:.0f} | {flop / each / 1e6:.0f}" for each in us]
                    say(f"| {name} | {tokens} | {product} |", " | ".join(cells), "|")
            del step, calls
            torch.cuda.empty_cache()


def order(args: argparse.Namespace) -> None:
    for name in args.shapes:
        p = problem_of(name, training=True)
        for tokens in args.tokens:
            step = Step(p, routings_of(p, tokens)[0].topk_ids)
            say(f"{name} {tokens}: µs of", *(f"g{group}," for group in _GROUPS))
            for product in step.flop:
                with part(f"{name} {tokens} {product}"):
                    calls = {
                        f"g{group}": [partial(step.run, product, True, group)] for group in _GROUPS
                    }
                    us = {each: found.us or NAN for each, found in in_turns(calls, 4).items()}
                    least = min(us, key=lambda each: us[each])
                    rate = step.flop[product] / us[least] / 1e6
                    say(f"{product:11}", *(f"{each:6.0f}" for each in us.values()),
                        f" least: {least}, {rate:.0f} TFLOP/s")  # fmt: skip
            del step, calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parts = {"check": check, "time": time, "order": order}
    shapes = ("qwen3-30b", "mixtral")
    run_parts(__doc__, parts, (4096, 16384), shapes, usual=("check", "time"))
