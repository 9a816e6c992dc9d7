"""Run examples/lora.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


def test_adapters_learn_and_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLE))["main"](["--steps", "8"]) == 0
    said = capsys.readouterr().out
    assert said.count("64 of 64 matrices moved") == 2
    assert "tokens without an adapter have the base's bits: True" in said
    assert "served now: reverse, weak reverse" in said
