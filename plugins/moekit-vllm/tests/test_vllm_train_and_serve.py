"""Run examples/train_and_serve.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_and_serve.py"


def test_the_server_follows_the_trainer(tmp_path: Path) -> None:
    # vLLM compiles a function here, even in eager mode. Other versions' headers may be cached.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(EXAMPLE), "--steps", "2"]
    done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert said.count("equal bits of the experts: True") == 2
