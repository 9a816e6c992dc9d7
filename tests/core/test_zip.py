"""Imported from a zip file, moekit and its plugins find the data that they ship."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "moekit",
    *(ROOT / "plugins" / f"moekit-{n}" / "src" / f"moekit_{n}" for n in ("kernels", "triton")),
)
TRITON = """
import moekit_triton.tables as plugin
assert "x.zip" in plugin.__file__
for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", ""):
    found = plugin.FILES.known(device)
    assert found and found is plugin.FILES.known(device), device
assert plugin.FILES.known("Acme X1") == []
"""
CORE = """
import os
from moekit.selection.tuned import table
assert "x.zip" in table.__file__
known = table.known("cuda sm90")
assert {key.device for key in known} >= {"NVIDIA H200"} and known is table.known("cuda sm90")
assert table.known("cpu") == {}
"""


def test_shipped_tables_in_a_zip_file(tmp_path: Path) -> None:
    code = CORE + TRITON * (find_spec("triton") is not None)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for package in PACKAGES:
            for file in package.rglob("*"):
                if file.suffix in (".py", ".json", ".md"):
                    archive.write(file, file.relative_to(package.parent))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'x.zip'){code}"],
        cwd=tmp_path,
        env={"PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
