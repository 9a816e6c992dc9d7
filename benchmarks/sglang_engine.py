"""Time an SGLang engine with and without moekit, in turns, on random weights.

    python benchmarks/sglang_engine.py --model qwen3-30b --layers 8 --batches 1,32,256
    python benchmarks/sglang_engine.py --model qwen3-30b --quant fp8_block --stock triton,deep_gemm

Each turn is an engine in a new process: one with MOEKIT_SGLANG=off for each runner of --stock, and
one with MOEKIT_SGLANG=require. Decode is the time of a step of the whole batch: a long completion
minus a completion of one token. Prefill is the time of one prompt and its first token. Each time is
printed when it is measured, and the report has the fastest turn of each. On a GPU the engine
captures CUDA graphs of the batches' sizes for decoding.

    python benchmarks/sglang_engine.py --tokens --quant none

With --tokens the engines complete prompts greedily with a small checkpoint of random weights, then
with a second one that they take from disk in place, and with the first one again. Exit code 1 if
log probabilities of moekit's tokens differ by 0.3 or more from SGLang's, up to the first token that
differs, or if moekit's completions change when the first checkpoint comes back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_engine import FP8_BLOCKS, MODELS
from vllm_tokens import MOST_APART, checkpoint


def main() -> None:
    args = _arguments()
    if args.turn is not None:
        (_complete if args.tokens else _time)(args)
        print("\nDONE", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.tokens:
            for name, seed in (("first", 1), ("other", 2)):
                checkpoint(Path(folder, name), args.quant, seed)
            _compare(args, folder)
        else:
            Path(folder, "config.json").write_text(json.dumps(_config(args)))
            _report(args, folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--quant", choices=["none", "fp8_block"], default="none")
    parser.add_argument("--batches", default="1,8", help="numbers of sequences")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--turns", type=int, default=1, help="engines of each kind")
    parser.add_argument("--stock", default="triton", help="SGLang's runners to compare with")
    parser.add_argument("--tokens", action="store_true", help="compare tokens, not times")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the memory to use")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON for the engine")
    parser.add_argument("--log", default=os.devnull, help="a file for the output of the engines")
    parser.add_argument("--only", help="engines of this kind alone: a runner, or moekit")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model's configuration, as its checkpoint would have it."""
    config = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    return config | ({} if args.quant == "none" else {"quantization_config": FP8_BLOCKS})


def _run(kind: str, args: argparse.Namespace, folder: str) -> list[tuple[str, Any]]:
    """Run one engine, and return (name, value) of each line TIME or TOKENS that it prints."""
    print(f"{kind}:", flush=True)
    environment = {
        **os.environ,
        "MOEKIT_SGLANG": "require" if kind == "moekit" else "off",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--turn", kind, "--folder", folder]
    said: list[str] = []
    found = []
    with (
        Path(args.log).open("a") as file,
        subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as engine,
    ):
        assert engine.stdout is not None
        for line in engine.stdout:
            said.append(line)
            print(line, end="", file=file, flush=True)
            mark, _, rest = line.partition(" ")
            if mark in ("TIME", "TOKENS"):
                value, _, name = rest.strip().partition("\t")
                found.append((name, json.loads(value)))
                if mark == "TIME":
                    print(f"  {name}: {1e3 * found[-1][1]:.2f} ms", flush=True)
            elif "moekit: " in line:
                print("  " + line[line.index("moekit: ") :].rstrip(), flush=True)
    if "DONE\n" not in said:
        sys.exit(f"the engine {kind!r} failed:\n{''.join(said)[-6000:]}")
    return found


def _report(args: argparse.Namespace, folder: str) -> None:
    kinds = [*args.stock.split(","), "moekit"]
    fastest: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for turn in range(args.turns):
        for kind in kinds[:: 1 if turn % 2 == 0 else -1]:
            if args.only in (None, kind):
                for name, seconds in _run(kind, args, folder):
                    fastest[kind][name] = min(seconds, fastest[kind].get(name, seconds))
    print(f"\n{args.model}, {args.quant}, {args.layers or 'all'} layers\n")
    if args.only:
        return
    *stock, ours = kinds
    print(f"| | {' | '.join(f'{kind}, ms' for kind in stock)} | with moekit | speed |")
    print("|---" * (len(kinds) + 2) + "|")
    for name, seconds in fastest[ours].items():
        theirs = [fastest[kind][name] for kind in stock]
        cells = [f"{1e3 * t:.2f}" for t in (*theirs, seconds)]
        print(f"| {name} | {' | '.join(cells)} | {min(theirs) / seconds:.2f} |")


def _engine(args: argparse.Namespace, model: str, **more: Any) -> Any:
    import sglang
    import torch

    options = {"device": "cuda" if torch.cuda.is_available() else "cpu"} | more
    if options["device"] == "cuda":
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    else:
        options |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
    options |= {name: json.loads(text) for name, text in (o.split("=", 1) for o in args.option)}
    return sglang.Engine(
        model_path=model, skip_tokenizer_init=True, dtype="bfloat16", random_seed=0,
        moe_runner_backend="triton" if args.turn == "moekit" else args.turn,
        mem_fraction_static=args.memory, disable_radix_cache=True, grammar_backend="none",
        disable_prefill_cuda_graph=True, log_level="info",
        **options,
    )  # fmt: skip


def _time(args: argparse.Namespace) -> None:
    """Make an engine, and print its times in seconds."""
    batches = [int(size) for size in args.batches.split(",")]
    longest = args.prefill + args.steps + 16
    engine = _engine(
        args, args.folder, load_format="dummy", context_length=longest,
        max_running_requests=max(batches), chunked_prefill_size=max(args.prefill, 4096),
        max_prefill_tokens=max(args.prefill, 4096), cuda_graph_bs_decode=sorted(batches),
    )  # fmt: skip

    def seconds(prompts: int, length: int, steps: int) -> float:
        asked = [[(7 * n + 3 * i) % 30000 for i in range(length)] for n in range(prompts)]
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        begin = time.perf_counter()
        engine.generate(input_ids=asked, sampling_params=sampling)
        return time.perf_counter() - begin

    for size in batches:
        seconds(size, 16, 4)
        short = min(seconds(size, 16, 1) for _ in range(3))
        long = min(seconds(size, 16, args.steps + 1) for _ in range(3))
        print(f"\nTIME {(long - short) / args.steps}\tdecode, batch {size}", flush=True)
    seconds(1, args.prefill, 1)
    fastest = min(seconds(1, args.prefill, 1) for _ in range(3))
    print(f"\nTIME {fastest}\tprefill of {args.prefill}", flush=True)
    engine.shutdown()


def _complete(args: argparse.Namespace) -> None:
    """Print an engine's completions with each checkpoint, as [tokens, log probabilities]."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 512) for _ in range(n)] for n in (3, 11, 40, 64, 65, 128, 200, 17)
    ]
    engine = _engine(
        args, str(Path(args.folder, "first")), context_length=512, max_running_requests=8,
        max_total_tokens=4096, cuda_graph_bs_decode=[1, 2, 4, 8],
    )  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    for step, name in enumerate(("first", "other", "first")):
        if step:
            while not engine.flush_cache().success:  # the last batch is ending
                time.sleep(0.05)
            done = engine.update_weights_from_disk(str(Path(args.folder, name)))
            assert done[0], done
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        said = [
            [out["output_ids"], [p[0] for p in out["meta_info"]["output_token_logprobs"]]]
            for out in outputs
        ]
        print(f"\nTOKENS {json.dumps(said)}\tstep {step}, {name}", flush=True)
    engine.shutdown()


def _compare(args: argparse.Namespace, folder: str) -> None:
    stock = _run(args.stock.split(",")[0], args, folder)
    ours = _run("moekit", args, folder)
    worst, equal, total = 0.0, 0, 0
    for (name, theirs), (_, mine) in zip(stock, ours, strict=True):
        for (tokens, probabilities), (got, chances) in zip(theirs, mine, strict=True):
            same = next(
                (i for i, (a, b) in enumerate(zip(tokens, got, strict=True)) if a != b), len(tokens)
            )
            equal, total = equal + (same == len(tokens)), total + 1
            for a, b in zip(probabilities[: same + 1], chances[: same + 1], strict=True):
                worst = max(worst, abs(a - b))
        print(f"{name}: {equal} of {total} completions are equal so far", flush=True)
    again = ours[0][1] == ours[2][1] and ours[0][1] != ours[1][1]
    print(f"largest distance of log probabilities {worst:.4f}; the first checkpoint "
          f"{'came back' if again else 'DID NOT come back'}")  # fmt: skip
    if worst >= MOST_APART or not again:
        sys.exit(1)


if __name__ == "__main__":
    main()
