"""docs/kit_mutants.md lists every wrong experts class with the kit test that kills it.

``PYTHONPATH=tests/support python tests/kit/test_kit_mutants.py`` writes the page's table.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import conformance_catches
import test_conformance_catches_calls
import test_conformance_catches_crossings
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
    test_conformance_catches_crossings,
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


def page_parts() -> tuple[str, str, str]:
    """Return the page's text before its table, the table, and the text behind it."""
    before, rest = PAGE.read_text().split("<!-- experts -->\n")
    listed, behind = rest.split("\n<!-- end -->")
    return f"{before}<!-- experts -->\n", listed, f"\n<!-- end -->{behind}"


def test_the_page_lists_every_mutant():
    assert page_parts()[1] == table(), f"write {PAGE} again: see this file's docstring"


if __name__ == "__main__":
    before, _, behind = page_parts()
    PAGE.write_text(before + table() + behind)
