"""Show that the kit's tolerance accepts a right result and no wrong one."""

from __future__ import annotations

from moekit.problem import MoEProblem
from moekit.testing import diagnose
from moekit.testing.cases import make_case
from moekit.testing.compare import complain

_CONTROL_TOKENS = 64


def check_negative_controls(problem: MoEProblem) -> None:
    """Assert that `tolerance` accepts the rounded oracle on ``problem`` and no wrong result."""
    p, case = problem, make_case(problem, _CONTROL_TOKENS, "masked")
    right = case.reference()
    diagnose.assert_close(right.to(p.dtype), right, p, "the rounded oracle")
    for what, out in diagnose.wrong_results(case).items():
        assert diagnose.complain_of(out.to(p.dtype), right, case), (
            f"the kit's tolerance for {p!r} lets this pass: {what}"
        )
    for value in (float("nan"), float("inf")):
        out = right.to(p.dtype)
        out[0, 0] = value
        assert complain(out, right, p), f"{value} in the output passes"
