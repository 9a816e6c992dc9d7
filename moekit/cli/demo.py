"""``python -m moekit demo``: a Hugging Face model with moekit's experts, compared with eager ones.

The demo saves a small Qwen3-MoE with random weights, loads it with both experts implementations,
and compares outputs and times.
"""

from __future__ import annotations

import importlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moekit
from moekit.backends.cpu_costs import BUSY, waited_for_cores
from moekit.errors import MoekitError
from moekit.integrations import transformers as integration

TOKENS = (1, 32, 256)


def run(model_dir: str | None = None) -> int:
    """Run the demo; return 0 if moekit and transformers agree.

    model_dir: keep the generated model there; default: in a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _run(Path(model_dir or scratch))


def _run(directory: Path) -> int:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    transformers = _transformers()
    print(f"1. A small Qwen3-MoE, random weights, saved by transformers to {directory}", flush=True)
    config = _save(transformers, directory)
    print(
        f"   {config.num_hidden_layers} layers, {config.num_experts} experts, top-"
        f"{config.num_experts_per_tok}, hidden {config.hidden_size}, "
        f"intermediate {config.moe_intermediate_size}, bfloat16, on {device}"
    )

    print('\n2. The model loaded again with experts_implementation="moekit"')
    transformers.logging.disable_progress_bar()
    integration.install()
    load = transformers.Qwen3MoeForCausalLM.from_pretrained
    eager, ours = (
        load(directory, dtype=torch.bfloat16, experts_implementation=how).eval().to(device)
        for how in ("eager", "moekit")
    )
    with torch.inference_mode():
        ids = torch.randint(config.vocab_size, (2, 24), device=device)
        states = [m.model(ids, output_hidden_states=True).hidden_states[1] for m in (ours, eager)]
        kernel = next(iter(integration.kernels(ours).values()))
        print("   " + str(kernel.explanation).replace("\n", "\n   "))

        print("\n3. Its first layer, compared with transformers' eager experts")
        whole = _relative_rms(*states)
        print(f"   hidden states behind it, 2 x 24 tokens: error {whole:.1e}")
        block, our_block = (m.model.layers[0].mlp for m in (eager, ours))
        same = _same_routing(config, block, device)
        print(f"   moekit.route chooses experts of the same logits for {same:.0%} of 512 tokens")
        print(f"\n   {'tokens':>8} {'error':>9} {'eager':>12} {'moekit':>12} {'speed-up':>9}")
        begin, waited = time.perf_counter(), waited_for_cores()
        sizes = [(1, tokens, config.hidden_size) for tokens in TOKENS]
        xs = [torch.randn(size, dtype=torch.bfloat16, device=device) for size in sizes]
        errors = [_compare(block, our_block, x) for x in xs]
        took, waited = time.perf_counter() - begin, waited_for_cores() - waited
    if _disturbed(waited, took):
        print("\n   Other work took the cores meanwhile, so these times say little. If it stays,")
        print("   OMP_WAIT_POLICY=passive keeps torch's threads from waiting actively.")
    memory = kernel.memory(max(TOKENS))
    print(f"\n   scratch for {max(TOKENS)} tokens: {memory.total / 2**20:.1f} MiB (kernel.memory)")
    agrees = same == 1 and max(whole, *errors) < 2e-2
    print("   " + ("agrees with transformers" if agrees else "DISAGREES with transformers"))
    return 0 if agrees else 1


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MoekitError("the demo needs transformers: pip install 'moekit[hf]'") from error


def _save(transformers: Any, directory: Path) -> Any:
    """Write a model to ``directory``, and return its config."""
    from safetensors import SafetensorError  # transformers requires it

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=512,
        moe_intermediate_size=384,
        num_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        norm_topk_prob=True,
        initializer_range=0.05,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise MoekitError(
            f"--model-dir {directory} cannot be written ({why}): choose another folder"
        ) from error
    return config


def _compare(eager: nn.Module, ours: nn.Module, x: Tensor) -> float:
    """Print the relative RMS error and both times for ``x``, and return the error."""
    error = _relative_rms(ours(x), eager(x))
    theirs, own = _seconds([eager, ours], x)
    print(
        f"   {x.shape[1]:>8} {error:>9.1e} {theirs * 1e6:>9.0f} us {own * 1e6:>9.0f} us "
        f"{theirs / own:>8.2f}x",
        flush=True,
    )
    return error


def _disturbed(waited: float, took: float) -> bool:
    """Return whether threads waited for cores for more than a share of the seconds it took."""
    return waited > BUSY * took * torch.get_num_threads()


def _same_routing(config: Any, block: Any, device: torch.device) -> float:
    """Return the share of tokens whose experts have the logits of those that transformers chooses.

    bf16 logits tie, and either expert is right then.
    """
    x_TH = torch.randn(512, config.hidden_size, dtype=torch.bfloat16, device=device)
    logits_TE = nn.functional.linear(x_TH, block.gate.weight)
    ours = moekit.route(logits_TE, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    chosen = [
        logits_TE.gather(1, ids).sort().values for ids in (ours.topk_ids, block.gate(x_TH)[2])
    ]
    return float((chosen[0] == chosen[1]).all(dim=1).float().mean())


def _relative_rms(got: Tensor, expected: Tensor) -> float:
    """Return the relative RMS error; infinite where an element is not finite."""
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    return error if math.isfinite(error) else math.inf


def _seconds(
    functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor, repeats: int = 10
) -> list[float]:
    """Return the median wall-clock seconds of a call of each function, device work included.

    They take turns, so that other work on the machine disturbs both.
    """
    synchronize = torch.get_device_module(x.device).synchronize
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 2):
        for function, took in zip(functions, times, strict=True):
            synchronize()
            start = time.perf_counter()
            function(x)
            synchronize()
            took.append(time.perf_counter() - start)
    return [statistics.median(took[2:]) for took in times]
