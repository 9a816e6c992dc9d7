"""Run examples/ep_ranks.py with torchrun on two ranks, as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "ep_ranks.py"


def test_two_ranks() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", "--local-addr", "127.0.0.1", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d): experts ([\d, ]+); (\d+) tokens, error ([\d.e+-]+)$",
                       done.stdout, flags=re.M)  # fmt: skip
    (_, first, tokens, error), (_, second, none, _) = sorted(found)
    assert first.split(", ") == [str(e) for e in range(0, 16, 2)]
    assert second.split(", ") == [str(e) for e in range(1, 16, 2)]
    assert int(tokens) > 0 and float(error) > 0 and none == "0"
    assert "tokens move" in done.stdout
