"""Modules that moved keep their old names, with a DeprecationWarning."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moekit
from moekit._moved import _MOVED

SCRIPT = """
import importlib, sys, warnings
import moekit
for name, new in {moved!r}.items():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        old = importlib.import_module(name)
    assert old is importlib.import_module(new) is sys.modules[name], name
    said = [str(w.message) for w in seen if w.category is DeprecationWarning]
    assert any(text.startswith(f"{{name}} is now {{new}};") for text in said), (name, said)
"""


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=300
    )


def test_every_old_module_imports_and_warns() -> None:
    done = run(SCRIPT.format(moved=_MOVED))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from moekit.activation import apply_activation",
        "from moekit.bench import Unavailable",
        "from moekit.bench.shapes import inputs",
        "from moekit.group import Agreement, SharedBuffers, Transfers, exchange, resolve",
        "from moekit.local import LocalDispatcher, local_ids",
        "from moekit.parallel import parallel_config",
        "from moekit.plugins import SWITCHES, DispatcherSpec, MoekitSpecs, hookimpl, importable",
        "from moekit.reference import oracle",
        "from moekit.select import compose, explain",
        "from moekit.workspace import Workspace",
        "import moekit; moekit.reference.oracle",
    ],
)
def test_names_of_old_modules(line: str) -> None:
    with pytest.warns(DeprecationWarning, match="is now"):
        for name in [n for n in sys.modules if n in _MOVED]:
            del sys.modules[name]
            vars(moekit).pop(name.partition(".")[2], None)
        exec(line, {})


def test_the_warning_names_the_importing_line() -> None:
    done = run("import moekit.reference", "-W", "error::DeprecationWarning")
    assert "DeprecationWarning: moekit.reference is now moekit.backends.reference" in done.stderr
    assert 'File "<string>", line 1' in done.stderr


def test_a_folder_of_an_old_name_hides_nothing(tmp_path) -> None:
    (tmp_path / "graphs").mkdir()
    done = run(
        f"import moekit; moekit.__path__.insert(0, {str(tmp_path)!r}); "
        "from moekit.graphs import GraphedKernel"
    )
    assert done.returncode == 0, done.stderr


def test_dir_is_the_api() -> None:
    assert set(dir(moekit)) == {*moekit.__all__, "__version__"}
    assert all(hasattr(moekit, name) for name in dir(moekit))
    with pytest.raises(AttributeError, match="has no attribute 'compos'"):
        _ = moekit.compos


def test_the_readmes_submodules_load_at_first_use() -> None:
    done = run("import moekit; moekit.eplb.Rebalancer, moekit.checkpoint.load_experts")
    assert done.returncode == 0, done.stderr


def test_no_old_module_has_the_name_of_the_api() -> None:
    """Importing it would replace the function or class in the package."""
    assert not {name.partition(".")[2] for name in _MOVED} & set(moekit.__all__)
