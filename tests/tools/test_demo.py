"""`python -m moekit demo`: how it takes times."""

from __future__ import annotations

import torch

from moekit.cli import demo


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
