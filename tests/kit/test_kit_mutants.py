"""Every mutant dies, and docs/kit_mutants*.md list them with the kit tests that kill them.

``PYTHONPATH=tests/support python tests/kit/test_kit_mutants.py`` writes the pages' tables.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import conformance_catches
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "kit_mutants.md": (
        "experts", "sizes", "values", "calls", "forms", "invariance", "crossings", "threads",
    ),
    "kit_mutants_dispatchers.md": (
        "dispatchers", "naive", "transfers", "buffers", "failures", "locks", "fused",
    ),
    "kit_mutants_gradients.md": ("experts", "adapters", "dispatchers"),
}  # fmt: skip


MODULES = {
    page: [importlib.import_module(f"test_{kit}_{part}").__name__ for part in parts]
    for page, parts in PAGES.items()
    for kit in ["gradients_catch" if "gradients" in page else "conformance_catches"]
}
# Mutants of those modules wait for threads, and have a test there.
OTHERS = {"test_conformance_catches_threads", "test_conformance_catches_locks"}


def cases() -> list[Any]:
    """Return all mutants. A right class passes once in a process for those that it has in a row."""
    mutants = [m for m in conformance_catches.MUTANTS if m.wrong.__module__ not in OTHERS]
    mutants.sort(key=lambda m: (m.right.__name__, m.test, str(m.args)))
    return [pytest.param(m, id=str(m)) for m in mutants]


@pytest.mark.parametrize("mutant", cases())
def test_killed(mutant, capfd):
    mutant.check(capfd)


def table(page: str) -> str:
    """Return a page's table, a row for each mutant in the order of the modules."""
    tests: dict[type, list[str]] = {}
    for module in MODULES[page]:
        for mutant in conformance_catches.MUTANTS:
            if mutant.wrong.__module__ == module:
                name = f"`{mutant.kit_test}`"
                if name not in tests.setdefault(mutant.wrong, []):
                    tests[mutant.wrong].insert(0, name)
    rows = ["| mutant | mistake | killed by |", "|---|---|---|"]
    for wrong, names in tests.items():
        mistake = (inspect.getdoc(wrong) or "").split("\n")[0].rstrip(".")
        rows.append(f"| `{wrong.__name__}` | {mistake} | {', '.join(names)} |")
    return "\n".join(rows)


def page_parts(page: str) -> tuple[str, str, str]:
    """Return the page's text before its table, the table, and the text behind it."""
    before, rest = (DOCS / page).read_text().split("<!-- mutants -->\n")
    listed, behind = rest.split("\n<!-- end -->")
    return f"{before}<!-- mutants -->\n", listed, f"\n<!-- end -->{behind}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_lists_every_mutant(page):
    made = table(page)
    silent = [m.wrong.__name__ for m in conformance_catches.MUTANTS if not vars(m.wrong)["__doc__"]]
    assert not silent, "every mutant says its mistake"
    assert page_parts(page)[1] == made, f"write {page} again: see this file's docstring"


if __name__ == "__main__":
    for page in PAGES:
        before, _, behind = page_parts(page)
        (DOCS / page).write_text(before + table(page) + behind)
