"""`python -m moekit demo`: how it compares and takes times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moekit.cli import demo
from moekit.integrations import transformers as integration


def test_times_are_taken_in_turns() -> None:
    """Work that begins or ends meanwhile disturbs both."""
    called: list[str] = []

    def function(name: str):
        return lambda x: called.append(name) or x

    seconds = demo._seconds([function("eager"), function("moekit")], torch.ones(1), repeats=3)
    assert called == ["eager", "moekit"] * 5 and len(seconds) == 2 and min(seconds) > 0


def test_disturbed_times(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert demo._disturbed(waited=2.0, took=1.0) and not demo._disturbed(waited=0.04, took=1.0)


def test_experts_of_equal_logits_are_the_same_choice() -> None:
    """Ties of bf16 logits must not look like errors, and errors must not look like ties."""
    config = SimpleNamespace(hidden_size=8, num_experts_per_tok=2, norm_topk_prob=True)

    def block(weight: torch.Tensor, ids: list[int]) -> SimpleNamespace:
        def gate(x: torch.Tensor) -> tuple[None, None, torch.Tensor]:
            return None, None, torch.tensor([ids]).expand(len(x), 2)

        gate.weight = weight.bfloat16()  # type: ignore[attr-defined]
        return SimpleNamespace(gate=gate)

    tied = block(torch.ones(4, 8), [3, 1])
    assert demo._same_routing(config, tied, torch.device("cpu")) == 1
    apart = block(torch.arange(32.0).view(4, 8), [3, 1])
    assert demo._same_routing(config, apart, torch.device("cpu")) < 1


@pytest.mark.full
def test_the_demo_agrees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        assert demo.run(str(tmp_path)) == 0
    finally:
        integration.uninstall()
    said = capsys.readouterr().out
    assert "of the same logits for 100% of 512 tokens" in said
    assert said.endswith("agrees with transformers\n") and "chosen: local + " in said
