"""The kernels compile for a GPU that is not here, with the installed triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).parent / "triton_compile.py"


@pytest.mark.parametrize(
    "arguments",
    [["--quick"], *(pytest.param([arch], marks=pytest.mark.full) for arch in ("80", "90", "120"))],
    ids=" ".join,
)
def test_kernels_compile(arguments, tmp_path) -> None:
    if not Path(triton.__file__, "../backends/nvidia/bin/cuobjdump").resolve().exists():
        pytest.skip("this triton has no NVIDIA backend")
    made = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count("registers") > 10 and "WRONG" not in made.stdout
