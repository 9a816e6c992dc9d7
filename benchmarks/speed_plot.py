"""Write docs/speed.svg: moekit's fastest backend relative to vLLM's Triton kernel, from a result.

    python benchmarks/speed_plot.py

Colours and the missing background suit light and dark pages.
"""

import math
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "2026-11-22-h200-bench.md"
OURS, BASELINE = ("triton", "deepgemm", "cutlass"), "vllm_triton"
COLOURS = {"mixtral": "#d9822b", "qwen3-30b": "#3b8fd6", "dsv3-ep8": "#2f9e6e"}
GREY, TOP, WIDTH, HEIGHT = "#808080", 46, 330, 190
START = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" font-size="13">'
TEXT = '<text x="{:.0f}" y="{:.0f}" fill="{}" text-anchor="{}" font-family="sans-serif">{}</text>'
LINE = '<path d="{}" fill="none" stroke="{}" stroke-width="{}"/>'


def speeds(heading: str) -> dict[str, list[tuple[int, float]]]:
    """Return (T, speed) of each shape from the table under ``heading``."""
    rows = RESULT.read_text().split(f"## {heading}\n\n")[1].split("\n\n")[0].splitlines()
    header, _, *cells = ([c.strip() for c in row.strip("|").split("|")] for row in rows)
    found: dict[str, list[tuple[int, float]]] = {}
    for shape, tokens, *texts in cells:
        us = [float(re.findall(r"[\d.]+", text)[0]) for text in texts]
        times = dict(zip(header[2:], us, strict=True))
        best = min(times[name] for name in OURS if name in times)
        found.setdefault(shape, []).append((int(tokens), times[BASELINE] / best))
    return found


def panel(heading: str, left: float) -> list[str]:
    """Return a panel that begins at ``left``: T from 1 to 16384, speeds from 0.5 to 3."""

    def at(tokens: int, speed: float) -> tuple[float, float]:
        return left + WIDTH * math.log2(tokens) / 14, TOP + HEIGHT * (3 - speed) / 2.5

    made = [TEXT.format(left + WIDTH / 2, TOP - 12, GREY, "middle", heading)]
    for speed in (1, 1.5, 2, 2.5, 3):
        x, y = at(1, speed)
        made.append(LINE.format(f"M{x} {y}h{WIDTH}", GREY if speed == 1 else GREY + "40", 1))
        made.append(TEXT.format(x - 6, y + 4, GREY, "end", f"{speed:g}×"))
    for tokens in (1, 64, 1024, 16384):
        made.append(TEXT.format(*at(tokens, 0.3), GREY, "middle", tokens))
    for shape, points in speeds(heading).items():
        path = "M" + "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        made.append(LINE.format(path, COLOURS[shape], 2.5))
    return made


parts = [START, *panel("bf16", 40), *panel("fp8 blocks", 430)]
for i, (shape, colour) in enumerate(COLOURS.items()):
    parts.append(TEXT.format(40 + 120 * i, 284, colour, "start", f"━ {shape}"))
parts.append(TEXT.format(760, 284, GREY, "end", "tokens in a call; 1× is vLLM's Triton kernel"))
(ROOT / "docs" / "speed.svg").write_text("\n".join([*parts, "</svg>\n"]))
