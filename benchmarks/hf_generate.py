r"""Hugging Face models with moekit's experts beside every experts implementation of transformers.

    python benchmarks/hf_generate.py [--models qwen3-30b,mixtral] [--out FILE.md]
    python benchmarks/hf_generate.py --device cpu --threads 2 --models qwen3-small --prefill 512 \
        --batches 1 --repeats 5
    python benchmarks/hf_generate.py --tiny          # any machine, to see that it works

Real shapes, few layers, random bf16 weights. Times are of whole model forwards, host included:
prefill of one prompt, and a decoding step of B sequences, each started on an idle device. "experts"
is one layer's experts alone in a CUDA graph (four routings), so without the host. Medians.
Error: each token's logits against the same model in fp32 (eager), relative RMS, median of tokens.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moekit.integrations.transformers
from moekit.backends.cpu_costs import capability

# model_type, layers, what differs from its config's defaults
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3-30b": (
        "qwen3_moe", 4,
        dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
             num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True),
    ),
    "qwen3-small": (  # 1.7 GB in bf16: for CPUs
        "qwen3_moe", 8,
        dict(hidden_size=1024, moe_intermediate_size=512, num_experts=64, num_experts_per_tok=8,
             num_attention_heads=16, num_key_value_heads=4, head_dim=64, norm_topk_prob=True),
    ),
    "mixtral": (
        "mixtral", 2,
        dict(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
             num_attention_heads=32, num_key_value_heads=8),
    ),
    "gpt-oss-20b": (
        "gpt_oss", 4,
        dict(hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
             num_attention_heads=64, num_key_value_heads=8, head_dim=64),
    ),
}  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_experts=8,
    num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16,
)  # fmt: skip
CONTEXT = 256  # tokens in the cache before a decoding step
PEERS = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
ROUTINGS = 4

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-30b,mixtral,gpt-oss-20b")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--batches", default="1,16,64", help="sequences of a decoding step")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--experts", help="moekit's experts backend; default: its own choice")
    parser.add_argument("--quant", default="none", help="moekit quantizes its experts to this")
    parser.add_argument("--peers", help="of transformers' implementations; default: all there are")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", help="default: this machine's accelerator, else the CPU")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's own")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    device = torch.device(args.device) if args.device else here
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    moekit.integrations.transformers.install(experts=args.experts, quant=args.quant)
    table = Table(device, PEERS if args.peers is None else args.peers.split(","))
    for name in args.models.split(","):
        start = time.perf_counter()
        measure(Contest(name, build(name, args.tiny, device), table, args.repeats), args, batches)
        free()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(["", *table.notes]))
    if args.out:
        args.out.write_text("\n".join([*table.lines, "", *table.notes]) + "\n")


class Table:
    """Markdown, printed as it grows; notes come last."""

    def __init__(self, device: torch.device, peers: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.peers = [p for p in peers if p == "eager" or p in ALL_EXPERTS_FUNCTIONS]
        cpu = f"{capability()}, {torch.get_num_threads()} thread(s)"
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        self._add(
            f"`{' '.join(['python', *sys.argv])}`: {machine}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, moekit {moekit.__version__}; ms (error)"
        )
        self._add("")
        self._add("| model | what | " + " | ".join(self.peers) + " | moekit | best / moekit |")
        self._add("|---|---|" + "---|" * (len(self.peers) + 2))

    def row(self, model: str, what: str, times: dict[str, float], errors: dict[str, float]) -> None:
        def cell(name: str) -> str:
            error = f" ({errors[name]:.1e})" if name in errors else ""
            return f"{times[name]:.3f}{error}" if name in times else "–"

        best = min((times[p] for p in self.peers if p in times), default=float("nan"))
        ratio = f"{best / times['moekit']:.2f}" if "moekit" in times else "–"
        cells = [model, what, *map(cell, [*self.peers, "moekit"]), ratio]
        self._add("| " + " | ".join(cells) + " |")

    def _add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


class Contest:
    """One model, run with one experts implementation after the other."""

    def __init__(self, name: str, model: Any, table: Table, repeats: int) -> None:
        self.name, self.model, self.table, self.repeats = name, model, table, repeats
        self.device = model.device
        self.contestants = [*table.peers, "moekit"]

    def run(
        self,
        what: str,
        prepare: Callable[[], Step],
        error: Callable[[], float] | None = None,
        calls: int = 1,
        without: Sequence[str] = (),
    ) -> None:
        """A row of the table. ``prepare`` gives the step, of so many ``calls``, to be timed under
        the implementation that is set; those that fail are noted and left out."""
        steps: dict[str, Step] = {}
        errors: dict[str, float] = {}
        for how in [c for c in self.contestants if c not in without]:
            print(f"  {self.name}, {what}: {how} ...", file=sys.stderr, flush=True)
            self.model.set_experts_implementation(how)
            try:
                step = prepare()
                for _ in range(3):
                    step()
                if error is not None:
                    errors[how] = error()
                steps[how] = step
            except ImportError as missing:
                self._note(f"{how} is not available: {missing}", about="")
                self.contestants.remove(how)
            except Exception as failure:  # whatever a vendor's kernel raises
                self._note(f"{what}, {how}: {type(failure).__name__}: {failure}")
                free()
        times: dict[str, list[float]] = {how: [] for how in steps}
        for _ in range(self.repeats):
            for how, step in steps.items():
                self.model.set_experts_implementation(how)
                times[how].append(milliseconds(step, self.device) / calls)
        medians = {how: statistics.median(taken) for how, taken in times.items()}
        self.table.row(self.name, what, medians, errors)

    def _note(self, text: str, about: str | None = None) -> None:
        about = f"{self.name}, " if about is None else about
        note = f"- {about}{text.splitlines()[0][:200]}"
        if note not in self.table.notes:
            self.table.notes.append(note)


@torch.inference_mode()
def measure(contest: Contest, args: argparse.Namespace, batches: list[int]) -> None:
    model, device = contest.model, contest.device
    vocabulary = model.config.vocab_size

    prompt = torch.randint(vocabulary, (1, args.prefill), device=device)
    want = exact_logits(model, prompt)
    contest.run(
        f"prefill {args.prefill}",
        lambda: lambda: model(prompt, use_cache=False),
        error=lambda: relative(model(prompt, use_cache=False).logits, want),
        # It gathers an expert's weights for every token: tens of GB of copies.
        without=["batched_mm"] if device.type == "cpu" else [],
    )
    for batch in batches:
        prompts = torch.randint(vocabulary, (batch, CONTEXT), device=device)
        contest.run(f"decode B={batch}", partial(decoding, model, prompts))
    if device.type == "cuda":
        for tokens in (*batches, args.prefill):
            prepare = partial(captured_experts, model, tokens)
            contest.run(f"experts T={tokens}", prepare, calls=ROUTINGS, without=["eager"])

    kernels = moekit.integrations.transformers.kernels(model)
    chosen = {str(kernel.explanation.chosen) for kernel in kernels.values() if kernel.explanation}
    memory = moekit.integrations.transformers.memory(model)
    contest.table.notes.append(
        f"- {contest.name}: moekit ran {', '.join(sorted(chosen))} in {len(kernels)} layers; "
        f"{memory.packed / 2**30:.2f} GiB packed besides {memory.parameters / 2**30:.2f} GiB"
    )


def build(name: str, tiny: bool, device: torch.device) -> Any:
    model_type, layers, sizes = MODELS[name]
    print(f"{name}: {layers} layers with random weights ...", file=sys.stderr, flush=True)
    if tiny:
        sizes = {key: TINY[key] for key in sizes if key in TINY}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=layers, vocab_size=512 if tiny else 32000, **sizes
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).eval()


def exact_logits(model: Any, prompt: Tensor) -> Tensor:
    exact = copy.deepcopy(model).float()
    exact.set_experts_implementation("eager")
    logits = exact(prompt, use_cache=False).logits
    del exact
    free()
    return logits


def decoding(model: Any, prompts: Tensor) -> Step:
    """Return a step after ``prompts``. The cache grows by a token a step.

    The prompts run with `eager` experts: batched_mm gathers weights for each of their tokens.
    """
    now = model.config._experts_implementation
    model.set_experts_implementation("eager")
    cache = model(prompts, use_cache=True).past_key_values
    model.set_experts_implementation(now)
    return lambda: model(prompts[:, -1:], past_key_values=cache, use_cache=True)


def captured_experts(model: Any, tokens: int) -> Step:
    """The replay of a CUDA graph of one layer's experts on several routings."""
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    count, top_k, device = (
        experts.down_proj.shape[0],
        model.config.num_experts_per_tok,
        model.device,
    )
    x = torch.randn(tokens, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    routings = [torch.rand(tokens, count, device=device).topk(top_k) for _ in range(ROUTINGS)]
    calls = [(x, ids, weights.bfloat16()) for weights, ids in routings]
    for call in calls:
        experts(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            experts(*call)
    keep = calls  # the graph reads them

    def replay() -> None:
        assert keep
        graph.replay()

    return replay


def milliseconds(step: Step, device: torch.device) -> float:
    """Of a step that starts on an idle device, to the end of its work there."""
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def relative(got: Tensor, want: Tensor) -> float:
    """Median over tokens of the relative RMS error of their logits (B, S, V)."""
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).median())


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
