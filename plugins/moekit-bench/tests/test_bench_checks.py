"""moekit-bench's findings for ``python -m moekit doctor``."""

from __future__ import annotations

import pytest
import torch
from moekit_bench.checks import checks, judge
from moekit_bench.limits import Ceilings

H200 = Ceilings({"bf16": 800e12}, 4e12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed")
def test_without_a_gpu_nothing_is_timed() -> None:
    assert list(checks()) == [("GPU speed", "no", "no GPU to time")]


def test_a_slow_gpu_is_a_fault() -> None:
    fast = "bf16 matmul 720 TFLOP/s, read 3600 GB/s"
    assert judge(Ceilings({"bf16": 720e12}, 3.6e12), None) == ("ok", fast)
    found = judge(Ceilings({"bf16": 720e12}, 3.6e12), H200)
    assert found == ("ok", f"{fast}: 90% and 90% of this GPU's known ceilings")
    state, text = judge(Ceilings({"bf16": 720e12}, 1.2e12), H200)
    assert state == "bad" and "90% and 30%" in text and "clocks may be limited" in text
