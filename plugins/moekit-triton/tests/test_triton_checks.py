"""moekit-triton's findings for ``python -m moekit doctor``."""

from __future__ import annotations

import pytest
from moekit_triton.checks import checks

import moekit
from moekit.plugin import DeviceSpec


def test_tables_are_found_by_device() -> None:
    ((_, state, text),) = checks(DeviceSpec("cuda", (9, 0), "NVIDIA H200"))
    assert state == "ok" and text.endswith("problems were measured on NVIDIA H200")
    ((_, state, text),) = checks(DeviceSpec("cuda", (9, 0), "NVIDIA H2000"))
    assert state == "no" and text.startswith("none for NVIDIA H2000") and "tune triton" in text
    assert [state for _, state, _ in checks(DeviceSpec("cpu"))] == ["no"]


def test_tables_of_the_user_that_cannot_be_read_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path))
    folder = tmp_path / "triton"
    folder.mkdir()
    (folder / "nvidia-l4.json").write_text('{"entries": [{"experts": 8}]}')
    (folder / "nvidia-h200.json").write_text('{"entries": []}')
    ((name, state, text), _) = checks(DeviceSpec("cpu"))
    assert (name, state) == ("triton/nvidia-l4.json", "bad")
    assert "nvidia-l4.json cannot be used: KeyError" in text and "tune triton" in text


@pytest.mark.parametrize("value", ["2", "on"])
def test_a_gluon_switch_is_0_or_1(monkeypatch, value) -> None:
    monkeypatch.setenv("MOEKIT_TRITON_GLUON", value)
    problem = moekit.MoEProblem(
        num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, device="sm90"
    )
    (reason,) = moekit.registry().expert("triton").unsupported(problem)
    assert reason.startswith(f"MOEKIT_TRITON_GLUON={value!r}: expected 0 or 1")
