"""Time an SGLang engine with and without moekit, in turns, on random weights.

    python benchmarks/sglang_engine.py --model qwen3-30b --batches 1,32,256 --prefill 8192
    python benchmarks/sglang_engine.py --model qwen3-30b --quant fp8_block --stock triton,deep_gemm

Each turn is an engine in a new process: one with MOEKIT_SGLANG=off for each runner of --stock, and
one with MOEKIT_SGLANG=require. Decode is the time of a step of the whole batch: a long completion
minus a completion of one token. Prefill is the time of one prompt and its first token. Each time is
printed when it is measured, and the report has the fastest turn of each. On a GPU the engine
captures CUDA graphs of the batches' sizes for decoding.

    python benchmarks/sglang_engine.py --tokens --quant none

With --tokens the engines complete prompts greedily with a small checkpoint of random weights, then
with a second one that they take from disk in place, with the first one again, and then one prompt
at a time, which shows how much an engine differs from itself. They also return the experts of each
token. Exit code 1 if moekit's completions are not close to SGLang's (`vllm_tokens.compare`), or if
they change when the first checkpoint comes back. The report says how many tokens have the same
experts.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from vllm_engine import add_model, model_config, print_times, run
from vllm_tokens import PROMPTS, SIZES, checkpoint, compare

# Each step's name, the checkpoint that it takes from disk, and whether prompts run together.
STEPS = (
    ("first", None, True), ("other", "other", True), ("first again", "first", True),
    ("one prompt at a time", None, False),
)  # fmt: skip


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
            Path(folder, "config.json").write_text(json.dumps(model_config(args)))
            _report(args, folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument("--turns", type=int, default=1, help="engines of each kind")
    parser.add_argument("--stock", default="triton", help="SGLang's runners to compare with")
    parser.add_argument("--tokens", action="store_true", help="compare tokens, not times")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the memory to use")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON for the engine")
    parser.add_argument("--only", help="engines of this kind alone: a runner, or moekit")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(kind: str, args: argparse.Namespace, folder: str) -> list[tuple[str, Any]]:
    """Return what one turn's engine says: (name, value) of each line TIME or TOKENS."""
    mode = "require" if kind == "moekit" else "off"
    environment = {**os.environ, "MOEKIT_SGLANG": mode, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--turn", kind, "--folder", folder]
    return run(kind, command, [environment], args.log)


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

    print_times(args, seconds)
    engine.shutdown()


def _complete(args: argparse.Namespace) -> None:
    """Print what an engine completes with each checkpoint, as `compare` takes it."""
    engine = _engine(
        args, str(Path(args.folder, "first")), context_length=512, max_running_requests=8,
        max_total_tokens=4096, cuda_graph_bs_decode=[1, 2, 4, 8], enable_return_routed_experts=True,
    )  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    for name, taken, together in STEPS:
        if taken is not None:
            while not engine.flush_cache().success:  # the last batch is ending
                time.sleep(0.05)
            done = engine.update_weights_from_disk(str(Path(args.folder, taken)))
            assert done[0], done
        outputs = [
            out
            for batch in ([PROMPTS] if together else [[prompt] for prompt in PROMPTS])
            for out in engine.generate(
                input_ids=batch, sampling_params=sampling, return_logprob=True,
                top_logprobs_num=2, return_routed_experts=True,
            )
        ]  # fmt: skip
        said = [
            {
                "tokens": out["output_ids"],
                "logprobs": [p[0] for p in out["meta_info"]["output_token_logprobs"]],
                "best": [
                    {token: p for p, token, _ in step}
                    for step in out["meta_info"]["output_top_logprobs"]
                ],
                "experts": _experts(out["meta_info"]["routed_experts"]),
            }
            for out in outputs
        ]
        print(f"\nTOKENS {json.dumps(said)}\t{name}", flush=True)
    engine.shutdown()


def _experts(encoded: str) -> list[list[int]]:
    """Return the sorted experts of each token, from base64 of int32 (T, layers, K)."""
    ids = array("i", base64.b64decode(encoded))
    step = SIZES["num_hidden_layers"] * SIZES["num_experts_per_tok"]
    return [sorted(ids[i : i + step]) for i in range(0, len(ids), step)]


def _compare(args: argparse.Namespace, folder: str) -> None:
    stock, ours = (dict(_run(kind, args, folder)) for kind in (args.stock.split(",")[0], "moekit"))
    right = ours["first"] == ours["first again"] and ours["first"] != ours["other"]
    print(f"the first checkpoint {'came back' if right else 'DID NOT come back'}")
    for kind, said in (("SGLang", stock), ("moekit", ours)):
        print(f"{kind} beside itself: {compare(said['first'], said['one prompt at a time'])[0]}")
    for name, theirs in stock.items():
        mine = ours[name]
        text, close = compare(theirs, mine)
        right &= close
        experts = [
            one == other
            for a, b in zip(theirs, mine, strict=True)
            for one, other in zip(a["experts"], b["experts"], strict=True)
        ]
        print(f"{name}: {text}; {sum(experts)} of {len(experts)} tokens have the same experts")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
