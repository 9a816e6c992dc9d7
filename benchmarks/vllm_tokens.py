"""Compare what a vLLM engine completes with and without moekit, through updates and sleep.

    python benchmarks/vllm_tokens.py --quant none,fp8_block

For each scheme two checkpoints of a Qwen3-MoE with one layer are made, and two engines, with
MOEKIT_VLLM=off and require. Each completes prompts of 3 to 200 tokens greedily with the first
checkpoint. On a GPU it then takes the second one in place, and the first one back; the engine with
moekit also sleeps at levels 1 and 2 and wakes up. With --ranks, engines of several ranks complete
with the first checkpoint alone, see `vllm_engine.py`. Exit code 1 if moekit's completions are not
close to vLLM's (`compare`), or not the same after its first checkpoint came back.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_engine import (
    FP8_BLOCKS,
    QWEN3,
    Ranks,
    add_ranks,
    engine_options,
    environments,
    processes,
)

SIZES = dict(num_hidden_layers=1, hidden_size=1024, intermediate_size=512, num_experts=32) | dict(
    num_experts_per_tok=4, moe_intermediate_size=512, num_attention_heads=8
)
SIZES |= dict(num_key_value_heads=4, head_dim=128, vocab_size=512, max_position_embeddings=512)
MOST_APART = 0.3  # log probabilities
_draw = random.Random(0)
PROMPTS = [[_draw.randrange(3, 512) for _ in range(n)] for n in (3, 11, 40, 64, 65, 128, 200, 17)]
Completions = list[dict[str, list[Any]]]


def checkpoint(folder: Path, quant: str, seed: int) -> str:
    """Save a model whose logits are far enough apart for greedy tokens to be compared."""
    folder.mkdir()
    draw, hidden, layer = torch.Generator().manual_seed(seed), 1024, "model.layers.0."
    saved: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, std: float, quantized: bool = True) -> None:
        w = torch.randn(rows, columns, generator=draw) * std
        if quant == "none" or not quantized:
            saved[f"{name}.weight"] = w.bfloat16()
            return
        blocks = w.view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        e4m3 = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        saved[f"{name}.weight"], saved[f"{name}.weight_scale_inv"] = e4m3, scale

    matrix("model.embed_tokens", SIZES["vocab_size"], hidden, 1.0, quantized=False)
    matrix("lm_head", SIZES["vocab_size"], hidden, 0.1, quantized=False)
    for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                       ("self_attn.q_norm", 128), ("self_attn.k_norm", 128)):  # fmt: skip
        saved[f"{layer}{norm}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    saved["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for name, rows, columns in (("q", 1024, hidden), ("k", 512, hidden), ("v", 512, hidden),
                                ("o", hidden, 1024)):  # fmt: skip
        matrix(f"{layer}self_attn.{name}_proj", rows, columns, 0.03)
    matrix(f"{layer}mlp.gate", SIZES["num_experts"], hidden, 0.05, quantized=False)
    for expert in range(SIZES["num_experts"]):
        for name, rows, columns, std in (("gate", 512, hidden, 0.05), ("up", 512, hidden, 0.05),
                                         ("down", hidden, 512, 0.08)):  # fmt: skip
            matrix(f"{layer}mlp.experts.{expert}.{name}_proj", rows, columns, std)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = QWEN3 | SIZES | {"eos_token_id": 1, "bos_token_id": 0}
    if quant != "none":
        kept = {"modules_to_not_convert": ["lm_head", f"{layer}mlp.gate"]}
        config["quantization_config"] = FP8_BLOCKS | kept
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine(first: str, other: str, args: argparse.Namespace) -> None:
    """Print what an engine completes after each step, as JSON."""
    from vllm import LLM, SamplingParams

    gpu, ranks = torch.cuda.is_available(), Ranks()
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}} if gpu else {}
    alone = args.ranks == 1
    sleeps = gpu and alone and os.environ["MOEKIT_VLLM"] == "require"
    llm = LLM(
        first, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512, seed=0,
        gpu_memory_utilization=args.memory, enforce_eager=not gpu, enable_sleep_mode=sleeps,
        max_num_batched_tokens=1024, **graphs, **engine_options(args),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False,
                              logprobs=2)  # fmt: skip

    def load(path: str) -> Callable[[], object]:
        return lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def complete() -> Completions:
        asked: Any = [{"prompt_token_ids": each} for each in PROMPTS[ranks.rank :: ranks.size]]
        outputs = [done.outputs[0] for done in llm.generate(asked, sampling, use_tqdm=False)]
        mine = [
            {
                "tokens": list(each.token_ids),
                "logprobs": [
                    step[token].logprob
                    for token, step in zip(each.token_ids, each.logprobs, strict=True)
                ],
                "best": [
                    {str(token): p.logprob for token, p in step.items()} for step in each.logprobs
                ],
            }
            for each in outputs
        ]
        return [each for of_ranks in zip(*ranks.gather(mine), strict=True) for each in of_ranks]

    steps: dict[str, list[Callable[[], object]]] = {"first": []}
    if gpu and alone:  # on a CPU, vLLM's dense layers hold packed weights that do not follow
        steps |= {"other weights": [load(other)], "first again": [load(first)]}
    if sleeps:
        steps["slept at level 1"] = [lambda: llm.sleep(level=1), llm.wake_up]
        steps["slept at level 2"] = [lambda: llm.sleep(level=2), llm.wake_up, load(first)]
    found = {}
    for name, actions in steps.items():
        for action in actions:
            action()
        found[name] = complete()
    print("\nCOMPLETED " + json.dumps(found), flush=True)


def run(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Completions]:
    """Return what an engine in a new process completed, by step."""
    command = [sys.executable, __file__, *sys.argv[1:], "--engine",
               str(folder / "first"), str(folder / "other")]  # fmt: skip
    cache = {"VLLM_CACHE_ROOT": str(folder / f"cache-{mode}")}
    with (
        (folder / f"others-{mode}").open("w+") as others,
        processes(command, [env | cache for env in environments(args, mode)], others) as first,
    ):
        timer = threading.Timer(args.seconds, first.kill)
        timer.start()
        assert first.stdout is not None
        lines = first.stdout.read().splitlines()
        timer.cancel()
        others.seek(0)
        lines += others.read().splitlines()
    said = [line for line in lines if line.startswith("COMPLETED ")]
    if not said:
        text = "\n".join(lines)[-4000:]
        raise SystemExit(f"the engine with MOEKIT_VLLM={mode} failed:\n{text}")
    for line in lines:
        if line.partition("moekit: ")[2] and mode == "require":
            print("  moekit: " + line.partition("moekit: ")[2])
    return json.loads(said[0].removeprefix("COMPLETED "))


def compare(stock: Completions, ours: Completions) -> tuple[str, bool]:
    """Compare tokens and log probabilities up to each prompt's first different token.

    Close are log probabilities less than MOST_APART apart, if the first different token is one of
    the best two of ``stock``, and less than that behind the token which ``stock`` took.
    """
    apart, margins = list[float](), list[float]()
    for a, b in zip(stock, ours, strict=True):
        said = (of[key] for key in ("tokens", "logprobs") for of in (a, b))
        for t, u, p, q, best in zip(*said, a["best"], strict=True):
            apart.append(abs(p - q))
            if t != u:
                margins.append(p - best.get(str(u), -math.inf))
                break
    right = all(each < MOST_APART for each in (*apart, *margins))  # NaN is not
    text = f"{len(apart) - len(margins)} of {len(apart)} tokens equal, log probabilities at most "
    text += f"{max(apart):.4f} apart"
    if margins:
        text += f", the two of a token that differs at most {max(margins):.4f}"
    return text, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant", default="none,fp8_block", help="default: %(default)s")
    parser.add_argument("--memory", type=float, default=0.1, help="share of the device's memory")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of an engine")
    add_ranks(parser)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(*args.engine, args)
        return
    right = True
    for quant in args.quant.split(","):
        print(quant)
        with tempfile.TemporaryDirectory() as name:
            for seed, model in enumerate(("first", "other")):
                checkpoint(Path(name) / model, quant, seed)
            stock, ours = (run(mode, Path(name), args) for mode in ("off", "require"))
        for step in list(ours)[:2]:
            text, close = compare(stock[step], ours[step])
            right &= close
            print(f"  {step}: {text}")
        right &= ours["first"] != ours.get("other weights")
        for step in list(ours)[2:]:
            equal = ours[step] == ours["first"]
            right &= equal
            print(f"  {step}: moekit completes {'the same' if equal else 'SOMETHING ELSE'}")
    print("right" if right else "WRONG")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
