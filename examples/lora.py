"""Train adapters (LoRA) on the experts of a layer, and serve several of them in one batch.

    python examples/lora.py                # on a CPU in seconds

Each adapter learns to turn a frozen layer's output into another function of the tokens. Then one
call computes tokens with either adapter and with none, and an adapter is replaced while it serves.
For models of transformers, PEFT's `target_parameters` does the same: see docs/guide/lora.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

import moekit
from moekit.lora import Adapter, AdapterSlots, tensors_of

E, K, H, I, RANK = 16, 4, 64, 32, 8
FROZEN = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, device="cpu",
              params_dtype=torch.float32)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every adapter learned, and served tokens as it was trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="of each training")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    weights = moekit.ExpertWeights(torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 6)
    gate = torch.randn(H, E)
    wanted = {"reverse": lambda x: x.flip(1), "double": lambda x: 2 * x}
    trained = {name: train(name, f, weights, gate, args.steps) for name, f in wanted.items()}

    layer = moekit.FusedMoE(**FROZEN, adapters=AdapterSlots(2, RANK), prefix="served")
    layer.load_weights(weights)
    for name, (adapter, _) in trained.items():
        layer.adapters.load(name, adapter)
    x = torch.randn(6, H)
    names = ["reverse", "double", None] * 2
    out = layer(x, x @ gate, adapter_ids=layer.adapters.ids(names))
    base = layer(x, x @ gate, adapter_ids=layer.adapters.ids([None] * 6))
    right = torch.equal(out[2::3], base[2::3])
    for start, name in enumerate(wanted):
        error = (out[start::3] - wanted[name](x)[start::3]).square().mean()
        was = (base[start::3] - wanted[name](x)[start::3]).square().mean()
        print(f"tokens with {name!r}: squared error {error:.3f}, {was:.3f} without an adapter")
        right &= bool(error < was)
    print(f"tokens without an adapter have the base's bits: {torch.equal(out[2::3], base[2::3])}")

    layer.adapters.drop("double")
    layer.adapters.load("weak reverse", Adapter(0.5, **trained["reverse"][0].tensors()))
    print(f"served now: {', '.join(layer.adapters.slots)}")
    stored = tensors_of(trained["reverse"][0], "model.layers.0.mlp.experts")
    print(f"as PEFT's file: {', '.join(f'{n} {tuple(t.shape)}' for n, t in stored.items())}")
    return 0 if right and all(count for _, count in trained.values()) else 1


def train(
    name: str,
    wanted: Callable[[Tensor], Tensor],
    weights: moekit.ExpertWeights,
    gate: Tensor,
    steps: int,
) -> tuple[Adapter, int]:
    """Return an adapter, and how many of its matrices training moved."""
    layer = moekit.FusedMoE(**FROZEN, trainable=True, adapters=AdapterSlots(1, RANK), prefix=name)
    layer.load_weights(weights)
    layer.requires_grad_(False)
    first = Adapter(1.0, torch.randn(E, 1, RANK, H) / H**0.5, torch.zeros(E, 2 * I, RANK),
                    torch.randn(E, RANK, I) / I**0.5, torch.zeros(E, H, RANK))  # fmt: skip
    layer.adapters.load(name, first)
    matrices = {n: t.requires_grad_() for n, t in layer.adapters.adapters.tensors().items()}
    before = {n: t.detach().clone() for n, t in matrices.items()}
    optimizer = torch.optim.Adam(matrices.values(), lr=1e-2)
    bar = tqdm(range(steps), desc=f"training {name!r}", unit="step")
    for _ in bar:
        x = torch.randn(256, H)
        loss = (layer(x, x @ gate) - wanted(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    moved = sum(int((t != before[n])[0].flatten(1).any(1).sum()) for n, t in matrices.items())
    print(f"{name!r}: {moved} of {4 * E} matrices moved; the experts' weights are frozen")
    return Adapter(1.0, **{n: t.detach()[0].clone() for n, t in matrices.items()}), moved


if __name__ == "__main__":
    raise SystemExit(main())
