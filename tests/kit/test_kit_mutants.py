"""docs/kit_mutants.md lists every wrong experts class with the kit test that kills it."""

from __future__ import annotations

import inspect
from pathlib import Path

import conformance_catches
import test_conformance_catches_calls
import test_conformance_catches_experts
import test_conformance_catches_forms
import test_conformance_catches_invariance
import test_conformance_catches_sizes
import test_conformance_catches_values

PAGE = Path(__file__).parents[2] / "docs" / "kit_mutants.md"
MODULES = (
    test_conformance_catches_experts,
    test_conformance_catches_sizes,
    test_conformance_catches_values,
    test_conformance_catches_calls,
    test_conformance_catches_forms,
    test_conformance_catches_invariance,
)


def table() -> str:
    """Return the page's table, a row for each mutant in the order of the modules."""
    tests: dict[type, list[str]] = {}
    for module in MODULES:
        for mutant in conformance_catches.MUTANTS:
            if mutant.wrong.__module__ == module.__name__:
                tests.setdefault(mutant.wrong, []).insert(0, f"`{mutant.kit_test}`")
    rows = ["| mutant | mistake | killed by |", "|---|---|---|"]
    for wrong, names in tests.items():
        mistake = (inspect.getdoc(wrong) or "").split("\n")[0].rstrip(".")
        rows.append(f"| `{wrong.__name__}` | {mistake} | {', '.join(names)} |")
    return "\n".join(rows)


def test_every_mutant_says_its_mistake():
    wrong = {m.wrong for m in conformance_catches.MUTANTS}
    silent = sorted(c.__name__ for c in wrong if not vars(c)["__doc__"])
    assert not silent


def test_the_page_lists_every_mutant():
    listed = PAGE.read_text().split("<!-- experts -->\n")[1].split("\n<!-- end -->")[0]
    assert listed == table(), f"replace the table in {PAGE} by this:\n{table()}"
