"""Build pages from files outside docs/, and plots from tables of results, with mkdocs.

READMEs, CONTRIBUTING, CHANGELOG and benchmarks/results become pages. Links are written for readers
of the repository; the hooks point those that leave docs/ to these pages.
"""

from __future__ import annotations

import io
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Page of the site -> file of the repository.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{
        f"packages/{path.name}.md": f"plugins/{path.name}/README.md"
        for path in sorted((ROOT / "plugins").iterdir())
    },
    "results/index.md": "benchmarks/results/README.md",
    **{
        f"results/{path.name}": f"benchmarks/results/{path.name}"
        for path in sorted(RESULTS.glob("2*.md"))
    },
}
_PAGE_OF = {source: page for page, source in PAGES.items()}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_PLOT = re.compile(r"<!-- plot: (\S+) (.+?) -->")


def on_config(config: Any) -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "moekit" / "version.py").read_text())
    assert version
    config.site_name = f"moekit {version[1]}"
    for section in config.nav:
        if isinstance(section, dict) and "Packages" in section:
            section["Packages"] = [page for page in PAGES if page.startswith("packages/")]


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text()
        if page.startswith("results/2"):
            text = "---\nsearch:\n  exclude: true\n---\n\n" + text
        files.append(File.generated(config, page, content=_relink(text, source, page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    name = page.file.src_uri
    if name not in PAGES:
        markdown = _relink(markdown, f"docs/{name}", name)
    return _PLOT.sub(lambda found: plot(RESULTS / found[1], found[2]), markdown)


def _relink(text: str, source: str, page: str) -> str:
    """Point the links of ``source`` to pages; a link to another file becomes plain text."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        goal = _PAGE_OF.get(path) or (path[5:] if path.startswith("docs/") else None)
        if path == "benchmarks/results":
            goal = "results/index.md"
        if goal is None:
            assert (ROOT / path).exists(), f"{source} links to {target}, which does not exist"
            return words
        return f"[{words}]({posixpath.relpath(goal, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, text)


def plot(file: Path, heading: str) -> str:
    """Return an SVG of the times in the table under ``heading``: one panel per value of column 1.

    Without a column in front of T there is one panel. The vertical axis is the fastest time of a
    row divided by the column's time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    header, *rows = _table(file.read_text(), heading)
    if header[0] == "T":
        header, rows = ["", *header], [["", *row] for row in rows]
    shapes = list(dict.fromkeys(row[0] for row in rows))
    figure, grid = pyplot.subplots(1, len(shapes), figsize=(11, 3.2), sharey=True, squeeze=False)
    panels = grid[0]
    for panel, shape in zip(panels, shapes, strict=True):
        cells = [[_number(text) for text in row[1:]] for row in rows if row[0] == shape]
        best = [min(time for time in cell[1:] if time == time) for cell in cells]
        for column, name in enumerate(header[2:], start=1):
            share = [least / cell[column] for least, cell in zip(best, cells, strict=True)]
            panel.plot([cell[0] for cell in cells], share, marker="o", ms=3, label=name)
        panel.set_xscale("log", base=2)
        panel.set_title(shape, fontsize=10)
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("fastest time / time")
    panels[0].set_ylim(0, 1.05)
    columns = 110 // max(map(len, header))
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=columns)
    figure.set_layout_engine("constrained")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=False)
    pyplot.close(figure)
    svg = drawn.getvalue()
    return re.sub(
        r'<svg height="[^"]*"', "<svg", svg[svg.index("<svg") :].replace("\n", " "), count=1
    )


def _number(cell: str) -> float:
    """Return the first number of a cell, without its marks; NaN if it has none."""
    found = re.search(r"\d+(?:\.\d+)?", cell)
    return float(found[0]) if found else float("nan")


def _table(text: str, heading: str) -> list[list[str]]:
    """Return the header and the rows of the first table under ``## heading``."""
    under = text.split(f"## {heading}\n", 1)[1]
    found = re.search(r"(?:^\|.*\n?)+", under, flags=re.M)
    assert found, f"no table under {heading}"
    rows = found[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[:1] + rows[2:]]
