r"""Time Hugging Face models with moekit's experts and with transformers' own implementations.

    python benchmarks/hf_generate.py [--models qwen3-30b,mixtral] [--out FILE.md]
    python benchmarks/hf_generate.py --device cpu --threads 2 --models qwen3-small --prefill 512 \
        --batches 1 --repeats 5
    python benchmarks/hf_generate.py --tiny          # on any machine, to try the script

Models have real shapes, few layers and random bf16 weights. Times are of whole forward
passes, host included: the prefill of one prompt, and a decoding step of B sequences, each started
on an idle device. "experts" is one layer's experts alone in a CUDA graph (four routings), without
the host. All are medians. Error: the relative RMS error of each token's logits against the same
model in fp32 (eager), median of the tokens.
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
from moekit_bench import Prepared, Table, Timer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moekit.integrations.transformers
from moekit.backends.cpu_costs import capability

# model_type, layers, and what differs from the defaults of its config
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
BASELINES = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
ROUTINGS = 4

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-30b,mixtral,gpt-oss-20b")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--batches", default="1,16,64", help="sequences of a decoding step")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--experts", help="moekit's experts backend; default: what it chooses")
    parser.add_argument("--quant", default="none", help="moekit quantizes its experts to this")
    parser.add_argument(
        "--baselines",
        help="of transformers' implementations; default: all that it has",
    )  # fmt: skip
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
    report = Report(device, BASELINES if args.baselines is None else args.baselines.split(","))
    for name in args.models.split(","):
        start = time.perf_counter()
        measure(
            Comparison(name, build(name, args.tiny, device), report, args.repeats), args, batches
        )
        free()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(["", *report.notes]))
    if args.out:
        lines = [report.title, "", *report.table, "", *report.notes]
        args.out.write_text("\n".join(lines) + "\n")


class Report:
    """A table that is printed row by row, and notes that come last."""

    def __init__(self, device: torch.device, baselines: Sequence[str]) -> None:
        self.notes: list[str] = []
        self.baselines = [b for b in baselines if b == "eager" or b in ALL_EXPERTS_FUNCTIONS]
        cpu = f"{capability()}, {torch.get_num_threads()} thread(s)"
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        self.title = (
            f"`{' '.join(['python', *sys.argv])}`: {machine}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, moekit {moekit.__version__}; ms (error)"
        )
        self.table = Table("model", "what", *self.baselines, "moekit", "best / moekit")
        print("\n".join([self.title, "", *self.table]), flush=True)

    def row(self, model: str, what: str, times: dict[str, float], errors: dict[str, float]) -> None:
        def cell(name: str) -> str:
            error = f" ({errors[name]:.1e})" if name in errors else ""
            return f"{times[name]:.3f}{error}" if name in times else "–"

        best = min((times[b] for b in self.baselines if b in times), default=float("nan"))
        ratio = f"{best / times['moekit']:.2f}" if "moekit" in times else "–"
        cells = map(cell, [*self.baselines, "moekit"])
        print(self.table.add(model, what, *cells, ratio), flush=True)


class Comparison:
    """One model, run with one experts implementation after the other."""

    def __init__(self, name: str, model: Any, report: Report, repeats: int) -> None:
        self.name, self.model, self.report, self.repeats = name, model, report, repeats
        self.timer = Timer(model.device)
        self.implementations = [*report.baselines, "moekit"]

    def run(
        self,
        what: str,
        prepare: Callable[[], Step],
        error: Callable[[], float] | None = None,
        calls: int = 1,
        without: Sequence[str] = (),
    ) -> None:
        """Add a row to the table; implementations that fail are noted and left out.

        Args:
            prepare: Returns the step to time under the implementation that is set.
            error: Returns the error of the outputs.
            calls: How many calls a step makes.
            without: Implementations that this row leaves out.
        """
        steps: dict[str, Step] = {}
        errors: dict[str, float] = {}
        for how in [i for i in self.implementations if i not in without]:
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
                self.implementations.remove(how)
            except Exception as failure:  # whatever a vendor's kernel raises
                self._note(f"{what}, {how}: {type(failure).__name__}: {failure}")
                free()
        times: dict[str, list[float]] = {how: [] for how in steps}
        for _ in range(self.repeats):
            for how, step in steps.items():
                self.model.set_experts_implementation(how)
                times[how].append(self.timer.queued_us(step) / 1e3 / calls)
        medians = {how: statistics.median(taken) for how, taken in times.items()}
        self.report.row(self.name, what, medians, errors)

    def _note(self, text: str, about: str | None = None) -> None:
        about = f"{self.name}, " if about is None else about
        note = f"- {about}{text.splitlines()[0][:200]}"
        if note not in self.report.notes:
            self.report.notes.append(note)


@torch.inference_mode()
def measure(comparison: Comparison, args: argparse.Namespace, batches: list[int]) -> None:
    model, device = comparison.model, comparison.model.device
    vocabulary = model.config.vocab_size

    prompt = torch.randint(vocabulary, (1, args.prefill), device=device)
    want = exact_logits(model, prompt)
    comparison.run(
        f"prefill {args.prefill}",
        lambda: lambda: model(prompt, use_cache=False),
        error=lambda: relative(model(prompt, use_cache=False).logits, want),
        # It copies an expert's weights for every token: tens of GB.
        without=["batched_mm"] if device.type == "cpu" else [],
    )
    for batch in batches:
        prompts = torch.randint(vocabulary, (batch, CONTEXT), device=device)
        comparison.run(f"decode B={batch}", partial(decoding, model, prompts))
    if device.type == "cuda":
        for tokens in (*batches, args.prefill):
            prepare = partial(captured_experts, model, tokens)
            comparison.run(f"experts T={tokens}", prepare, calls=ROUTINGS, without=["eager"])

    kernels = moekit.integrations.transformers.kernels(model)
    chosen = {str(kernel.explanation.chosen) for kernel in kernels.values() if kernel.explanation}
    memory = moekit.integrations.transformers.memory(model)
    comparison.report.notes.append(
        f"- {comparison.name}: moekit ran {', '.join(sorted(chosen))} in {len(kernels)} layers; "
        f"{memory.packed / 2**30:.2f} GiB packed beside {memory.parameters / 2**30:.2f} GiB"
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
    """Return the replay of a CUDA graph of one layer's experts on several routings."""
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    count, top_k, device = (
        experts.down_proj.shape[0],
        model.config.num_experts_per_tok,
        model.device,
    )
    x = torch.randn(tokens, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    routings = [torch.rand(tokens, count, device=device).topk(top_k) for _ in range(ROUTINGS)]
    calls = [(x, ids, weights.bfloat16()) for weights, ids in routings]
    prepared = Prepared(experts, calls, device)
    if prepared.graph is None:
        raise RuntimeError(prepared.note)
    return lambda: prepared.graph.replay()  # also keeps the inputs, which the graph reads


def relative(got: Tensor, want: Tensor) -> float:
    """Return the median over tokens of the relative RMS error of their logits (B, S, V)."""
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).median())


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
