"""Threads on one CUDA stream and on a stream each."""

from __future__ import annotations

import pytest
import torch
from thread_stress import SUBJECTS, Setting, stress

import moekit
from moekit.errors import Unsupported

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "own streams"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
@pytest.mark.parametrize("experts", sorted(moekit.registry().experts))
def test_threads_get_what_one_thread_gets(experts: str, subject, own_streams: bool) -> None:
    if subject.__name__ == "model":
        pytest.importorskip("transformers", reason="transformers is not installed")
    quant = "int4_w4a16_g128" if experts.startswith("marlin") else "none"
    try:
        with torch.inference_mode():
            made = subject(Setting("cuda", experts, 4, quant))
    except Unsupported as error:
        pytest.skip("; ".join(error.reasons))
    outcome = stress(made, calls=50, own_streams=own_streams)
    assert outcome.right, str(outcome)
