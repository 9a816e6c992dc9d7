"""Both backends through moekit.compose, beyond what the conformance kit draws."""

import os
import subprocess
import sys
import textwrap

import torch

import moekit


def make_problem(device: torch.device, **changes) -> moekit.MoEProblem:
    sizes = dict(num_experts=5, top_k=2, hidden_size=136, intermediate_size=72)
    return moekit.MoEProblem(**{**sizes, "device": device, **changes})


def test_interpreter_asked_for_too_late():
    code = """
        import os, triton.language
        os.environ["TRITON_INTERPRET"] = "1"
        import moekit
        problem = moekit.MoEProblem(
            num_experts=2, top_k=1, hidden_size=8, intermediate_size=8, device="cpu"
        )
        (reason,) = moekit.registry().expert("triton").unsupported(problem)
        assert "after triton had been imported" in reason
    """
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environ)


def test_unsupported_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    backends = moekit.Registry.discover({})
    spec = backends.expert("triton")
    (reason,) = spec.unsupported(make_problem("cpu"))
    assert "TRITON_INTERPRET=1" in reason
    assert spec.unsupported(make_problem("sm90", quant="fp8_block")) == []
    (reason,) = spec.unsupported(make_problem("sm80", quant="fp8_block"))
    assert "8.9" in reason
    assert spec.unsupported(make_problem("sm80")) == []
    assert spec.priority > 0
