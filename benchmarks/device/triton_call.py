"""Run one call of moekit-triton's chosen plan for qwen3-30b, T = 4096, as a profiler's subject.

ncu --clock-control none --profile-from-start off python benchmarks/device/triton_call.py none
"""

from __future__ import annotations

import argparse

import torch
from moekit_bench import random_weights, shape
from moekit_triton.heuristics import Planner
from moekit_triton.packing import pack_weights
from moekit_triton.search import Case

TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("quant", choices=["none", "fp8_block"])
    quant = parser.parse_args().quant
    problem = shape("qwen3-30b").problem(device="cuda", quant=quant)
    packed = pack_weights("triton", random_weights(problem, torch.device("cuda")), problem)
    call = Case.make(problem, packed, TOKENS, 1).calls[0]
    x = torch.randn(TOKENS, problem.hidden_size, device="cuda").to(problem.dtype)
    share = torch.rand(call.ids_RK.shape, device="cuda").softmax(dim=1)
    call = call._replace(x=x, x_scale=None, weights_RK=share)
    plan = Planner(problem).plan(TOKENS, problem.top_k)
    print(plan.describe(), flush=True)
    for _ in range(3):
        plan.launch(call)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    plan.launch(call)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
