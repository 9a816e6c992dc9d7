"""``python -m moekit demo``: a model's MoE layer through moekit, compared with transformers'.

The demo builds a small Qwen3-MoE with random weights, saves it with transformers, reads its experts
back from the safetensors file, composes a kernel for this machine, and compares outputs and times.
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
from moekit.checkpoint import load_experts
from moekit.errors import MoekitError

TOKENS = (1, 32, 256)


def run(model_dir: str | None = None) -> int:
    """Run the demo; return 0 if moekit's numbers agree with those of transformers.

    model_dir: keep the generated model there; default: in a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _run(Path(model_dir or scratch))


def _run(directory: Path) -> int:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    transformers = _transformers()
    print(f"1. A small Qwen3-MoE, random weights, saved by transformers to {directory}", flush=True)
    config, model = _build(transformers, directory, device)
    print(
        f"   {config.num_hidden_layers} layers, {config.num_experts} experts, top-"
        f"{config.num_experts_per_tok}, hidden {config.hidden_size}, "
        f"intermediate {config.moe_intermediate_size}, bfloat16, on {device}"
    )

    problem = moekit.MoEProblem(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=torch.bfloat16,
        device=device,
    )
    print("\n2. moekit's choice for it")
    kernel = moekit.compose(problem)
    print("   " + str(kernel.explanation).replace("\n", "\n   "))

    print("\n3. The model with moekit in place of its experts, read from the safetensors file")
    block = model.model.layers[0].mlp
    weights = kernel.pack(load_experts(directory, "qwen3_moe", 0, problem).to(device))

    def moekit_block(x: Tensor) -> Tensor:
        x_TH = x.reshape(-1, config.hidden_size)
        _, topk_weights, topk_ids = block.gate(x_TH)  # transformers' own router
        return kernel(x_TH, weights, moekit.Routing(topk_weights.float(), topk_ids)).view_as(x)

    with torch.inference_mode():
        begin, waited = time.perf_counter(), waited_for_cores()
        rows = _compare(config, block, moekit_block, device)
        took, waited = time.perf_counter() - begin, waited_for_cores() - waited
        whole = _compare_model(config, model, block, moekit_block, device)
        same = _same_routing(config, block, device)
    print(f"   moekit.route chooses the same experts for {same:.1%} of tokens (bf16 logits tie)")
    print(f"\n   {'tokens':>8} {'error':>9} {'eager':>12} {'moekit':>12} {'speed-up':>9}")
    for tokens, rms, eager, ours in rows:
        print(
            f"   {tokens:>8} {rms:>9.1e} {eager * 1e6:>9.0f} us {ours * 1e6:>9.0f} us "
            f"{eager / ours:>8.2f}x"
        )
    if _disturbed(waited, took):
        print("\n   Other work took the cores meanwhile, so these times say little. If it stays,")
        print("   OMP_WAIT_POLICY=passive keeps torch's threads from waiting actively.")
    memory = kernel.memory(max(TOKENS))
    print(f"\n   scratch for {max(TOKENS)} tokens: {memory.total / 2**20:.1f} MiB (kernel.memory)")
    agrees = max(whole, *(row[1] for row in rows)) < 2e-2
    print("   " + ("agrees with transformers" if agrees else "DISAGREES with transformers"))
    return 0 if agrees else 1


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MoekitError("the demo needs transformers: pip install 'moekit[hf]'") from error


def _build(transformers: Any, directory: Path, device: torch.device) -> tuple[Any, Any]:
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
        experts_implementation="eager",
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
    return config, model.eval().to(device)


def _compare(
    config: Any, block: Any, ours: Callable[[Tensor], Tensor], device: torch.device
) -> list[tuple[int, float, float, float]]:
    """Return (tokens, relative RMS error, eager seconds, moekit seconds) for each token count."""
    rows = []
    for tokens in TOKENS:
        x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
        error = _relative_rms(ours(x), block(x))
        eager, own = _seconds([block, ours], x)
        rows.append((tokens, error, eager, own))
    return rows


def _disturbed(waited: float, took: float) -> bool:
    """Return whether threads waited for cores for more than a share of the seconds it took."""
    return waited > BUSY * took * torch.get_num_threads()


def _compare_model(
    config: Any, model: Any, block: Any, ours: Callable[[Tensor], Tensor], device: torch.device
) -> float:
    """Return the error of the hidden states after layer 0 when moekit computes its experts."""
    ids = torch.randint(config.vocab_size, (2, 24), device=device)
    expected = model.model(ids, output_hidden_states=True).hidden_states[1]
    original, block.forward = block.forward, ours
    try:
        got = model.model(ids, output_hidden_states=True).hidden_states[1]
    finally:
        block.forward = original
    error = _relative_rms(got, expected)
    print(f"   hidden states of the whole first layer, 2 x 24 tokens: error {error:.1e}")
    return error


def _same_routing(config: Any, block: Any, device: torch.device) -> float:
    """Return the share of tokens for which `moekit.route` chooses the same experts."""
    x_TH = torch.randn(512, config.hidden_size, dtype=torch.bfloat16, device=device)
    logits = nn.functional.linear(x_TH, block.gate.weight)
    ours = moekit.route(logits, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    theirs = block.gate(x_TH)[2]
    equal = ours.topk_ids.sort(dim=1).values == theirs.sort(dim=1).values
    return float(equal.all(dim=1).float().mean())


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
