"""One module imports everything that the package needs from moekit beyond public names."""

from __future__ import annotations

import ast
from pathlib import Path

import moekit_bench

PUBLIC = {"moekit", "moekit.plugin", "moekit.errors", "moekit.testing.distributed"}
FOLDER = Path(moekit_bench.__file__).parent


def test_only_internals_looks_inside_moekit() -> None:
    found = {
        f"{file.name}: {node.module}"
        for file in FOLDER.glob("*.py")
        if file.name != "internals.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moekit")
        if node.level == 0 and node.module not in PUBLIC
    }
    assert not found


def test_the_readme_names_what_internals_imports() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    tree = ast.parse((FOLDER / "internals.py").read_text())
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in imported for alias in node.names]
    missing = [f"{module}.{name}" for module, name in names if name.split(".")[-1] not in readme]
    assert not missing
