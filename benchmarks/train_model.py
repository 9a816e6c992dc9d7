"""Time fine-tuning a Qwen3-MoE in transformers: moekit's experts beside transformers' own.

    python benchmarks/train_model.py                  # on a GPU: Qwen3-30B's layers, 8 of them
    python benchmarks/train_model.py --device cpu --layers 2 --hidden 128 --experts 16 --tokens 128

full: all weights, by AdamW with its state in bf16. lora: adapters of PEFT on the attention, over
frozen experts. Tokens per second of a whole step (forward, backward, optimizer), median of the
steps after three to warm up; peak: the most memory of a step. The models begin with the same
weights and see the same tokens. The loss is the last step's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from moekit_bench import Table
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import moekit.integrations.transformers

_WARM = 3


def step_times(how: str, kind: str, args: argparse.Namespace) -> tuple[float, int, float]:
    """Return the median seconds of a step, its peak bytes, and the last loss."""
    device = torch.device(args.device)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=32768, hidden_size=args.hidden, moe_intermediate_size=768,
        num_experts=args.experts, num_experts_per_tok=8, num_hidden_layers=args.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, experts_implementation=how, dtype=torch.bfloat16
        ).train()
    if kind == "lora":
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=16, target_modules=names))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    generator, times = torch.Generator().manual_seed(1), []
    rows = max(1, args.tokens // 4096)
    for _ in range(_WARM + args.steps):
        ids = torch.randint(32768, (rows, args.tokens // rows), generator=generator).to(device)
        torch.get_device_module(device).synchronize()
        start = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return statistics.median(times[_WARM:]), peak, loss.item()


def main() -> None:
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--implementations", default="moekit,grouped_mm")
    parser.add_argument("--kinds", default="full,lora")
    parser.add_argument("--device", default=here.type)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    moekit.integrations.transformers.install()
    table = Table("trained", "experts", "tokens/s", "step ms", "peak GB", "loss")
    print(*table, sep="\n")
    for kind in args.kinds.split(","):
        for how in args.implementations.split(","):
            seconds, peak, loss = step_times(how, kind, args)
            cells = f"{args.tokens / seconds:.0f}", f"{1e3 * seconds:.0f}", f"{peak / 1e9:.1f}"
            print(table.add(kind, how, *cells, f"{loss:.4f}"), flush=True)
            gc.collect()
            if args.device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
