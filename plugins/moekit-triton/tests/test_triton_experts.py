"""Both backends through moekit.compose, beyond what the conformance kit draws."""

import os
import subprocess
import sys
import textwrap

import torch

import moekit
from moekit.runtime.workspace import Workspace
from moekit.testing.cases import make_case, random_weights


def make_problem(device: torch.device, **changes) -> moekit.MoEProblem:
    sizes = dict(num_experts=5, top_k=2, hidden_size=136, intermediate_size=72)
    return moekit.MoEProblem(**{**sizes, "device": device, **changes})


def test_workspace_for_more_rows_serves_fewer(device):
    problem = make_problem(device, num_experts=4, top_k=2, hidden_size=32, intermediate_size=32)
    kernel = moekit.compose(problem, "local", "triton")
    experts, packed = kernel.experts, kernel.pack(random_weights(problem))
    for rows in (1, 30, 130):
        scratch = Workspace().take(experts.workspace(200), device)
        for view in scratch:
            view.view(-1).view(torch.uint8).fill_(255)  # NaN
        case = make_case(problem, rows, "masked")
        tokens = moekit.Dispatched(case.x, None, case.routing.topk_ids, case.routing.topk_weights)
        y = torch.empty_like(case.x)
        experts.apply(y, tokens, packed, scratch)
        assert torch.equal(y, kernel(case.x, packed, case.routing))


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
