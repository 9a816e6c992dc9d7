"""Every package declares what it imports: a clean install has nothing else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moekit.discovery.registry import registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PACKAGES = {"moekit": ROOT} | {
    file.parent.name: file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))
}
# Modules whose distribution has another name.
MODULES = {
    "quack-kernels": "quack",
    "nvidia-cutlass-dsl": "cutlass",
    "flashinfer-python": "flashinfer",
}
# Optional parts of the core, with the extra that declares them.
OPTIONAL_IN_CORE = {
    "gguf": "checkpoints",
    "numpy": "checkpoints",
    "peft": "lora",
    "pytest": "testing",
    "safetensors": "hf",
    "transformers": "hf",
}


def imports(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name.partition(".")[0], file
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.partition(".")[0], file


def module_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return MODULES.get(match[0], match[0].replace("-", "_"))


def project(name: str) -> dict:
    return tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text())["project"]


def undeclared(own: str, folder: Path, known: set[str]) -> dict[str, str]:
    """Imported modules that are neither known nor Python's, with a file that imports each."""
    known = {*known, own, *sys.stdlib_module_names}
    return {
        name: str(file.relative_to(folder)) for name, file in imports(folder) if name not in known
    }


def test_the_core_declares_what_it_imports() -> None:
    said = project("moekit")
    known = {module_of(requirement) for requirement in said["dependencies"]}
    assert known == {"torch", "pluggy"}
    for module, extra in OPTIONAL_IN_CORE.items():
        assert module in {module_of(r) for r in said["optional-dependencies"][extra]}
    found = undeclared("moekit", ROOT / "moekit", known | set(OPTIONAL_IN_CORE))
    assert found == {}, found


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "moekit"])
def test_a_plugin_declares_what_it_imports(name) -> None:
    """In its dependencies or, a vendor's library, in what its backends say they require."""
    own, said = name.replace("-", "_"), project(name)
    dependencies = {module_of(requirement) for requirement in said["dependencies"]}
    specs = [*registry().dispatchers.values(), *registry().experts.values()]
    mine = [spec for spec in specs if spec.target.partition(":")[0].partition(".")[0] == own]
    assert mine or "moekit" not in said.get("entry-points", {}), f"{name} offers nothing"
    required = {module.partition(".")[0] for spec in mine for module in spec.requires}
    extras = {
        module_of(requirement)
        for extra in said.get("optional-dependencies", {}).values()
        for requirement in extra
    }
    found = undeclared(own, PACKAGES[name] / "src" / own, dependencies | required | extras)
    assert found == {}, found
    ours = {module for module in required if module.startswith("moekit") or module == "triton"}
    assert ours - {own} <= dependencies, "a spec requires what the package does not bring"


def test_what_is_not_declared_is_found(tmp_path) -> None:
    (tmp_path / "a.py").write_text("import os, torch\ndef f():\n    from numpy import array\n")
    assert undeclared("moekit", tmp_path, {"torch"}) == {"numpy": "a.py"}


def test_every_package_is_tested_with_the_settings_of_the_whole() -> None:
    """pytest takes the settings of the folder it is given, and then finds no tests/support."""
    own = [
        name
        for name in PACKAGES
        if "[tool.pytest" in (PACKAGES[name] / "pyproject.toml").read_text()
    ]
    assert own == ["moekit"]
