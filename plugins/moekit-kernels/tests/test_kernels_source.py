"""Kernels of all plugins, as source: what some supported version of Triton cannot compile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted(Path(__file__).parents[2].glob("*/src/**/*.py"))
# Files without kernels are no cases.
KERNELS = [file for file in SOURCES if "triton.jit" in file.read_text()]


def defaults_that_fail(source: str) -> Iterator[str]:
    """Yield the constexpr parameters whose default is a string, which Triton 3.6 does not wrap."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(given[::-1], arguments.defaults[::-1], strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            kind = argument.annotation
            text = isinstance(default, ast.Constant) and isinstance(default.value, str)
            if text and kind is not None and ast.unparse(kind).endswith("constexpr"):
                yield f"{function.name}({argument.arg})"


def test_such_defaults_are_found() -> None:
    source = 'def f(x, A: tl.constexpr = 1, B: tl.constexpr = "sys", *, C: str = "x"): ...'
    assert list(defaults_that_fail(source)) == ["f(B)"]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_default_of_a_constant_is_a_string(file: Path) -> None:
    assert not list(defaults_that_fail(file.read_text()))
