"""Comments, docstrings and documents avoid phrases that readers stumble over."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BANNED = re.compile(
    r"\b(?:that of|those of|of its own|for ever|insist(?:s|ed)? on|by turns|likewise)\b|, too\b",
    re.IGNORECASE,
)
# Still to be edited: remove a path when it is clean.
TO_EDIT = (
    "benchmarks/device/tile_regret.py",
    "docs/guide/batch_invariant.md",
    "docs/guide/vllm_layer.md",
    "docs/kit_mutants.md",
    "docs/kit_mutants_dispatchers.md",
    "docs/measured.md",
    "moekit/backends/",
    "moekit/cli/",
    "moekit/contract",
    "moekit/discovery/",
    "moekit/eplb/",
    "moekit/errors.py",
    "moekit/kernel.py",
    "moekit/layer/",
    "moekit/problem/",
    "moekit/runtime/",
    "moekit/selection/",
    "moekit/testing/",
    "plugins/moekit-cutlass/README.md",
    "plugins/moekit-cutlass/src/",
    "plugins/moekit-deepep/README.md",
    "plugins/moekit-deepep/src/",
    "plugins/moekit-deepep/tests/",
    "plugins/moekit-flashinfer/src/",
    "plugins/moekit-kernels/README.md",
    "plugins/moekit-marlin/src/",
    "plugins/moekit-marlin/tests/",
    "plugins/moekit-triton/src/",
    "plugins/moekit-triton/tests/",
    "plugins/moekit-vllm/src/",
    "plugins/moekit-vllm/tests/",
    "tests/core/",
    "tests/kit/",
    "tests/layer/",
    "tests/ranks/",
    "tests/support/",
)


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--", *patterns]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split() if (ROOT / name).is_file()]


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module, with the lines on which they begin."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node, clean=False) or ""


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the text without fenced code."""
    blank = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    yield 1, blank


def found(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    prose = prose_of_python(text) if name.endswith(".py") else prose_of_markdown(text)
    faults = []
    for line, part in prose:
        joined = re.sub(r"\s*\n[ #]*", lambda end: " " * len(end[0]), part)
        for match in BANNED.finditer(re.sub(r" +", " ", joined)):
            faults.append(f"{name}:{line}+: {match[0]}")
    return faults


def test_no_banned_phrase() -> None:
    names = [n for n in tracked("*.py", "*.md") if not n.startswith(TO_EDIT)]
    faults = [fault for name in names for fault in found(name)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("# those of rank 1", True),
        ('"""It is there,\n\n    too."""', True),
        ("x = 'that of'", False),
    ],
)
def test_comments_and_docstrings_are_read(text: str, banned: bool) -> None:
    prose = [part for _, part in prose_of_python(text)]
    joined = " ".join(re.sub(r"\s+", " ", part) for part in prose)
    assert bool(BANNED.search(joined)) is banned
