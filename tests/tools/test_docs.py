"""What the documents say exists, exists; and the README's code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import moekit
from moekit.discovery.entry_points import MoekitSpecs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
BENCH = (ROOT / "docs" / "bench.md").read_text()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_the_readme_example_runs(capsys) -> None:
    code = python_blocks(README)[0]
    small = (
        code.replace("2048", "64").replace("768", "96").replace("num_experts=128", "num_experts=8")
    )
    small = small.replace("dtype=torch.bfloat16", "dtype=torch.bfloat16, device='cpu'")
    assert small != code
    names = {
        "w13": torch.randn(8, 192, 64, dtype=torch.bfloat16),
        "w2": torch.randn(8, 64, 96, dtype=torch.bfloat16),
        "x": torch.randn(5, 64, dtype=torch.bfloat16),
        "logits": torch.randn(5, 8),
    }
    exec(small, names)
    assert names["out"].shape == (5, 64) and names["out"].isfinite().all()
    assert "chosen: " in capsys.readouterr().out


def test_every_scheme_is_in_the_readme() -> None:
    for name in moekit.SCHEMES:
        stem, *suffixes = re.split(r"(?=_zp|_act_order)|(?<=w8a16)(?=_)", name)
        said = f"`{stem}" in README and all(f"`{suffix}`" in README for suffix in suffixes)
        assert f"`{name}`" in README or (suffixes and said), name


def test_every_environment_variable_is_documented() -> None:
    sources = " ".join(p.read_text() for p in (ROOT / "moekit").rglob("*.py"))
    for variable in set(re.findall(r"\bMOEKIT_[A-Z_]+\b", sources)):
        assert variable in README or variable in CONTRIBUTING or variable in BENCH, variable


def test_every_hook_and_verb_is_documented() -> None:
    for hook in (name for name in vars(MoekitSpecs) if name.startswith("moekit_")):
        assert hook in CONTRIBUTING, hook
    cli = (ROOT / "docs" / "cli.md").read_text()
    for verb in ("plugins", "explain", "check", "demo", "bench", "tune", "doctor"):
        assert f"python -m moekit {verb}" in README and verb in cli, verb


def test_every_plugin_is_in_the_readme() -> None:
    for folder in sorted((ROOT / "plugins").iterdir()):
        if (folder / "pyproject.toml").exists():
            assert folder.name in README, folder.name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README + CONTRIBUTING):
        assert (ROOT / target).exists(), target


def test_every_package_says_what_a_stranger_needs() -> None:
    tomllib = pytest.importorskip("tomllib")
    for folder in (ROOT, *sorted((ROOT / "plugins").iterdir())):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == moekit.__version__, folder.name
        assert project["license"] == "Apache-2.0" and (folder / "LICENSE").is_file(), folder.name
        assert (folder / project["readme"]).read_text().startswith("# moekit"), folder.name
        assert project["authors"] and project["classifiers"], folder.name
        packages = list(folder.glob("src/*/__init__.py")) or [ROOT / "moekit" / "__init__.py"]
        assert all((package.parent / "py.typed").exists() for package in packages), folder.name
        for requirement in project["dependencies"]:
            if requirement.startswith("moekit"):
                assert requirement.endswith(">=0.2,<0.3"), f"{folder.name}: {requirement}"
