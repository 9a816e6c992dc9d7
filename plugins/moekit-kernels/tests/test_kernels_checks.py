"""The package's findings for ``python -m moekit doctor``."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from moekit_kernels import checks


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_a_kernel_runs_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert list(checks.checks()) == [("Triton kernel", "ok", "interpreted")]
    monkeypatch.setattr(checks, "add_one", lambda device: False)
    assert list(checks.checks()) == [("Triton kernel", "bad", "x + 1 came out wrong")]

    def no_compiler(device: str) -> NoReturn:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(checks, "add_one", no_compiler)
    assert list(checks.checks()) == [("Triton kernel", "bad", "RuntimeError: no C compiler")]
    monkeypatch.delenv("TRITON_INTERPRET")
    ((_, state, text),) = checks.checks()
    assert state == "no" and text.startswith("no GPU")
