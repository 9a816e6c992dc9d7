"""Train a small Qwen3-MoE on this repository's documentation, with eager experts and with moekit.

    python benchmarks/loss_curves.py [--steps 240] [--threads 2]

Both start from one seed and see the same batches, in fp32 and under bf16 autocast. Rounding decides
which experts compute a token, so curves drift apart: as a control, eager experts train once more
from weights that were changed by 1e-7 of their size. The program writes docs/loss_curves.csv and
docs/loss_curves.svg, and prints how far the curves are apart.
It needs transformers: pip install 'moekit[hf]'.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import moekit.integrations.transformers

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "loss_curves.csv"
# Name of a curve: implementation, dtype, change of the first weights.
RUNS = {
    "eager float32": ("eager", "float32", 0.0),
    "moekit float32": ("moekit", "float32", 0.0),
    "control float32": ("eager", "float32", 1e-7),
    "eager bfloat16": ("eager", "bfloat16", 0.0),
    "moekit bfloat16": ("moekit", "bfloat16", 0.0),
}
COLOURS = ("#d9822b", "#3b8fd6", "#808080", "#b04fa8", "#2f9e6e")
GREY, LEFT, TOP, WIDTH, HEIGHT = "#808080", 50, 20, 730, 230
START = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 310" font-size="13">'
TEXT = '<text x="{:.0f}" y="{:.0f}" fill="{}" text-anchor="{}" font-family="sans-serif">{}</text>'
LINE = '<path d="{}" fill="none" stroke="{}" stroke-width="{}"{}/>'


def documentation() -> Tensor:
    """Return the bytes of this repository's guide, (N,) int64."""
    files = (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def losses(
    how: str,
    dtype: str,
    change: float,
    steps: int,
    text: Tensor,
    rows: int = 4,
    length: int = 64,
) -> list[float]:
    """Return the loss of each step. ``dtype`` is autocast's, or float32 for none."""
    moekit.integrations.transformers.install()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=96, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, norm_topk_prob=True, tie_word_embeddings=True,
        output_router_logits=True, router_aux_loss_coef=0.02,  # else a few experts get all tokens
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation=how).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + change * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    generator, made = torch.Generator().manual_seed(1), []
    for _ in tqdm(range(steps), desc=f"{how} {dtype}", unit="step", disable=None):
        starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
        batch = text[starts + torch.arange(length)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        made.append(loss.item())
    return made


def distances(ours: list[float], theirs: list[float], last: int = 20) -> tuple[float, float]:
    """Return the largest distance of two curves, and the distance of the means of their ends."""
    apart = torch.tensor(ours) - torch.tensor(theirs)
    return float(apart.abs().max()), float(apart[-last:].mean().abs())


def plot(curves: dict[str, list[float]]) -> str:
    """Return the curves as SVG, whose colours suit light and dark pages."""
    steps, most = len(next(iter(curves.values()))), 6.0

    def at(step: float, loss: float) -> tuple[float, float]:
        return LEFT + WIDTH * step / steps, TOP + HEIGHT * (1 - loss / most)

    parts = [START]
    for loss in range(7):
        x, y = at(0, loss)
        parts.append(LINE.format(f"M{x} {y:.1f}h{WIDTH}", GREY + "40", 1, ""))
        parts.append(TEXT.format(x - 8, y + 4, GREY, "end", loss))
    for step in range(0, steps + 1, max(1, steps // 6)):
        parts.append(TEXT.format(*at(step, -0.5), GREY, "middle", step))
    for i, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=True)):
        ours = name.startswith("moekit")
        path = "M" + "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in enumerate(curve))
        dashes = ' stroke-dasharray="5 4"' if ours else ""
        parts.append(LINE.format(path, colour, 1.5 if ours else 3, dashes))
        parts.append(TEXT.format(LEFT + 150 * i, 300, colour, "start", f"━ {name}"))
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = documentation()
    curves = {name: losses(*run, args.steps, text) for name, run in RUNS.items()}
    with OUT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *curves])
        for step, values in enumerate(zip(*curves.values(), strict=True)):
            rows.writerow([step, *(f"{value:.4f}" for value in values)])
    OUT.with_suffix(".svg").write_text(plot(curves))
    for name, curve in curves.items():
        most, final = distances(curve, curves[f"eager {RUNS[name][1]}"])
        print(
            f"{name}: from {curve[0]:.3f} to {sum(curve[-20:]) / 20:.3f} (mean of the last 20); "
            f"from eager's curve: at most {most:.4f}, {final:.4f} in that mean"
        )


if __name__ == "__main__":
    main()
