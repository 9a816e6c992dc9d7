"""Everything that the documents name exists, and their code runs."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path

import pytest
import torch

import moekit
import moekit.plugin
from moekit.discovery.entry_points import MoekitSpecs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDES = [*sorted((ROOT / "docs" / "guide").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(text: str) -> list[str]:
    """Return the Python code of a page, without the files that it includes."""
    return [
        code
        for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
        if "--8<--" not in code
    ]


@pytest.fixture(autouse=True)
def default_device():
    yield
    torch.set_default_device(None)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """Write a Qwen3-MoE model of random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_readme_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    first, compose, layer, _ = python_blocks(README)
    names: dict[str, object] = {}
    exec(first, names)
    exec(compose, names)
    exec(layer, names)
    out, y = names["out"], names["y"]
    assert isinstance(out, torch.Tensor) and out.shape == (16, 1024) and out.isfinite().all()
    torch.testing.assert_close(y, out, rtol=0.02, atol=0.02)
    assert capsys.readouterr().out.count("chosen: ") == 2
    names["layer"].destroy()  # type: ignore[attr-defined]


def test_the_readme_runs_a_model(tiny_model: Path) -> None:
    code = python_blocks(README)[-1]
    assert '"Qwen/Qwen3-30B-A3B"' in code
    names: dict[str, object] = {}
    exec(code.replace("Qwen/Qwen3-30B-A3B", str(tiny_model)), names)
    try:
        logits = names["model"](torch.arange(5)[None]).logits  # type: ignore[operator]
        assert logits.isfinite().all()
        assert moekit.integrations.transformers.kernels(names["model"])  # type: ignore[arg-type]
    finally:
        moekit.integrations.transformers.uninstall()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_guides_run_as_printed(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in python_blocks(guide.read_text()):
        exec(code, names)


def test_every_scheme_is_in_the_readme() -> None:
    for name in moekit.SCHEMES:
        stem, *suffixes = re.split(r"(?=_zp|_act_order)|(?<=w8a16)(?=_)", name)
        said = f"`{stem}" in README and all(f"`{suffix}`" in README for suffix in suffixes)
        assert f"`{name}`" in README or (suffixes and said), name


def test_every_environment_variable_is_documented() -> None:
    documented = (ROOT / "docs" / "variables.md").read_text()
    folders = (ROOT / "moekit", ROOT / "plugins")
    sources = " ".join(p.read_text() for folder in folders for p in folder.rglob("src/**/*.py"))
    sources += " ".join(p.read_text() for p in (ROOT / "moekit").rglob("*.py"))
    for variable in set(re.findall(r"\bMOEKIT_[A-Z_]*[A-Z]\b", sources)):
        assert f"`{variable}" in documented, variable


def test_every_hook_and_verb_is_documented() -> None:
    guide = (ROOT / "docs" / "backends.md").read_text()
    for hook in (name for name in vars(MoekitSpecs) if name.startswith("moekit_")):
        assert hook in guide, hook
    cli = (ROOT / "docs" / "cli.md").read_text()
    for verb in ("plugins", "explain", "check", "bench", "tune", "doctor"):
        assert f"python -m moekit {verb}" in README and verb in cli, verb


def test_every_plugin_is_in_the_readme() -> None:
    for folder in sorted((ROOT / "plugins").iterdir()):
        if (folder / "pyproject.toml").exists():
            assert folder.name in README, folder.name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
    for included in re.findall(r'--8<-- "(.+)"', page.read_text()):
        assert (ROOT / included).is_file(), included


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda p: p.stem)
def test_every_name_of_the_reference_exists(page: Path) -> None:
    for name in re.findall(r"^::: (\S+)", page.read_text(), flags=re.M):
        assert pydoc.locate(name) is not None, name


def test_the_reference_has_every_name_of_plugins() -> None:
    pages = [(ROOT / "docs" / "api" / name).read_text() for name in ("plugin.md", "moekit.md")]
    documented = set(re.findall(r"^::: \S+\.(\w+)$", "\n".join(pages), flags=re.M))
    not_described = {
        "ACTIVATIONS",
        "INT4_ZERO",
        "SCHEMES",
        "WIRE_SCHEMES",
        "hookimpl",
        "int4",
        "quant",
    }
    assert set(moekit.plugin.__all__) - documented <= not_described


def test_the_changelog_has_this_version() -> None:
    first = re.search(r"^## \[.*", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert first and moekit.__version__ in first[0]


def test_every_package_says_what_a_stranger_needs() -> None:
    tomllib = pytest.importorskip("tomllib")
    for folder in (ROOT, *sorted((ROOT / "plugins").iterdir())):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == moekit.__version__, folder.name
        assert project["license"]["text"] == "Apache-2.0" and (folder / "LICENSE").is_file(), (
            folder.name
        )
        assert (folder / project["readme"]).read_text().startswith("# moekit"), folder.name
        assert project["authors"] and project["classifiers"], folder.name
        packages = list(folder.glob("src/*/__init__.py")) or [ROOT / "moekit" / "__init__.py"]
        assert all((package.parent / "py.typed").exists() for package in packages), folder.name
        for requirement in project["dependencies"]:
            if requirement.startswith("moekit"):
                assert requirement.endswith(">=0.2,<0.3"), f"{folder.name}: {requirement}"
