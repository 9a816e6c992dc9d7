"""moekit-triton's findings for ``python -m moekit doctor``."""

from __future__ import annotations

from moekit_triton.checks import checks

from moekit.plugin import DeviceSpec


def test_tables_are_found_by_device() -> None:
    ((_, state, text),) = checks(DeviceSpec("cuda", (9, 0), "NVIDIA H200"))
    assert state == "ok" and text.endswith("problems were measured on NVIDIA H200")
    ((_, state, text),) = checks(DeviceSpec("cuda", (9, 0), "NVIDIA H2000"))
    assert state == "no" and text.startswith("none for NVIDIA H2000") and "tune triton" in text
    assert [state for _, state, _ in checks(DeviceSpec("cpu"))] == ["no"]
