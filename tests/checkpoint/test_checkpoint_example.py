"""Run examples/load_layer.py in this process."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
EXAMPLE = Path(__file__).parents[2] / "examples" / "load_layer.py"


def test_the_sum_over_ranks_is_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLE))
    error = names["main"]()
    assert 1e-4 < error < 0.1  # fp8 activations have an error, and another layer a larger one
    out = capsys.readouterr().out
    assert "fp8 (float8_e4m3fn, a scale per 128 x 128), scheme fp8_block" in out
    ranks = re.findall(r"rank \d: experts .* (\d+) of (\d+) bytes read", out)
    assert len(ranks) == 2
    for read, size in ranks:
        assert 0.45 < int(read) / int(size) < 0.5  # the rest is headers
