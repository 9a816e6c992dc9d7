"""Fine-tune a Hugging Face MoE model whose experts moekit computes, on text that it makes itself.

    python examples/finetune.py                  # a small Qwen3-MoE with random weights
    python examples/finetune.py --steps 100

First only the attention is trained, over frozen experts: with adapters of PEFT if it is installed
(pip install peft), else its own weights. Then all weights are trained. Each time, the program
prints the loss on text that it did not train on, and checks which experts moved.
This needs transformers: pip install 'moekit[hf]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moekit.integrations.transformers

ROWS, LENGTH = 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if both kinds of training lowered the loss and moved the right experts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="of each of the two trainings")
    args = parser.parse_args(argv)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    moekit.integrations.transformers.install()

    model = small_model().to(device)  # with experts_implementation="moekit"
    held_out = torch.stack([batch(seed) for seed in range(4)]).flatten(0, 1).to(device)
    right = True

    print("\nAttention only, over frozen experts:")
    adapted = adapters(model)
    right &= fine_tune(adapted, model, held_out, args.steps, rate=5e-3, moves=False)
    if adapted is not model:
        model = adapted.merge_and_unload()

    print("\nAll weights:")
    model.requires_grad_(True)
    right &= fine_tune(model, model, held_out, args.steps, rate=3e-3, moves=True)

    kernel = next(iter(moekit.integrations.transformers.kernels(model).values()))
    print(f"\n{kernel.explanation.chosen} computed the experts and their gradients")
    return 0 if right else 1


def fine_tune(
    model: Any, base: PreTrainedModel, held_out: Tensor, steps: int, rate: float, moves: bool
) -> bool:
    """Train the parameters that require a gradient, and return whether all went as it should.

    moves: each expert that had tokens has to move; otherwise none may.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    experts = {name: m for name, m in base.named_modules() if name.endswith("mlp.experts")}
    before = {name: m.down_proj.detach().clone() for name, m in experts.items()}
    first = loss_on(model, held_out)
    optimizer = torch.optim.Adam(trained, lr=rate)
    with counted(experts) as used:
        bar = tqdm(range(steps), desc=f"training {share:.1%} of the weights", unit="step")
        for step in bar:
            ids = batch(1000 + step).to(held_out.device)
            loss = model.train()(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}")
    last = loss_on(model, held_out)
    print(f"  loss on other text: {first:.3f} before, {last:.3f} after")

    moved = {name: (m.down_proj != before[name]).flatten(1).any(1) for name, m in experts.items()}
    with_tokens = sum(int(used[name].sum()) for name in experts)
    movers = sum(int(each.sum()) for each in moved.values())
    print(f"  experts with tokens: {with_tokens}; experts that moved: {movers}")
    same = all(torch.equal(moved[name], used[name] & moves) for name in experts)
    if not same or last >= first:
        print("  WRONG: the loss rose, or other experts moved than should have")
    return same and last < first


@contextmanager
def counted(experts: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield which experts of each module have had tokens since."""
    used = {
        name: torch.zeros(len(m.down_proj), dtype=torch.bool, device=m.down_proj.device)
        for name, m in experts.items()
    }

    def note(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            used[name][args[1].flatten()] = True  # (hidden states, expert ids, router weights)

        return hook

    hooks = [m.register_forward_pre_hook(note(name)) for name, m in experts.items()]
    yield used
    for hook in hooks:
        hook.remove()


def adapters(model: PreTrainedModel) -> Any:
    """Return the model with adapters on its attention, or with only its attention to train."""
    if importlib.util.find_spec("peft") is not None:
        import peft

        projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=projections))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    return model


@torch.no_grad()
def loss_on(model: Any, ids: Tensor) -> float:
    return float(model.eval()(ids, labels=ids, use_cache=False).loss)


def small_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=128, hidden_size=128, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, norm_topk_prob=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, experts_implementation="moekit")


def batch(seed: int) -> Tensor:
    """Return ids (ROWS, LENGTH) of sentences, one id for each character."""
    choose = random.Random(seed).choice
    rows = []
    for _ in range(ROWS):
        text = ""
        while len(text) < LENGTH:
            few, many = sorted((choose(range(10)), choose(range(10))))
            animal = choose(["cat", "dog", "owl", "fox", "hen", "bee"])
            text += f"{few} {animal}s and {many - few} {animal}s are {many} {animal}s. "
        rows.append(list(text[:LENGTH].encode()))
    return torch.tensor(rows)


if __name__ == "__main__":
    raise SystemExit(main())
