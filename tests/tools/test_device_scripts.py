"""The scripts in benchmarks/device need a GPU to run, but each must import without one."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "device"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_imports(name: str, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if not package.startswith("moekit_") or (error.name or "") != package:
            raise
        pytest.skip(f"{package} is not installed")
    finally:
        for added in {*SCRIPTS} & (set(sys.modules) - before):
            del sys.modules[added]
