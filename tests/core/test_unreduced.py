"""Sums over K that experts leave to a dispatcher, through the kernel and around experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moekit
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import Unreduced
from moekit.plugin import BufferSpec, Workspace
from moekit.testing import assert_close
from moekit.testing.calls import (
    LEAVES_SUMS,
    SUMS_ITSELF,
    SumsItself,
    by_assignment,
    check_call,
    kit_registry,
    pack,
)
from moekit.testing.cases import make_case, random_weights

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=96, intermediate_size=48, dtype=torch.float32, device="cpu"
)


def kernel_of(experts: str, backends=None):
    return moekit.compose(PROBLEM, SUMS_ITSELF, experts, backends=backends or kit_registry())


def test_a_composite_leaves_the_sums_of_the_member_that_does() -> None:
    kernel = kernel_of(f"torch:4|{LEAVES_SUMS}")
    packed = pack(kernel, random_weights(PROBLEM))
    for tokens, taken in ((3, 0), (5, 1), (4, 1), (60, 2)):
        check_call(kernel, make_case(PROBLEM, tokens, "masked"), packed)
        assert kernel.dispatcher.taken == taken


def test_padded_columns_are_cut_from_the_rows() -> None:
    found = kit_registry()
    padded = replace(found.expert(LEAVES_SUMS), name="padded", multiples=lambda problem: (64, 32))
    found.register(padded)
    kernel = kernel_of("padded", found)
    assert kernel.experts.inner.problem.hidden_size == 128
    check_call(kernel, make_case(PROBLEM, 17, "masked"))
    assert kernel.dispatcher.taken == 1


def test_batch_invariant_calls_are_not_asked(monkeypatch) -> None:
    monkeypatch.setattr(moekit.backends.local.LocalDispatcher, "takes_unreduced", None)
    kernel = moekit.compose(PROBLEM.replace(batch_invariant=True), "local", "torch")
    case = make_case(kernel.problem, 5)
    check_call(kernel, case)


class InWorkspace(TorchExperts):
    """Leaves rows in the workspace."""

    def workspace(self, rows):
        count = rows * self.problem.top_k
        row = BufferSpec((count, self.problem.hidden_size), self.problem.dtype)
        return (*super().workspace(rows), row)

    def apply_unreduced(self, tokens, weights, workspace):
        *inner, rows = workspace
        rows = rows[: tokens.topk_ids.numel()]
        self.apply(rows, by_assignment(tokens), weights, inner)
        return Unreduced(rows)


class CallsAnother(SumsItself):
    """Calls a kernel of the same workspace before it sums."""

    def finalize(self, y, dispatched, out_TH):
        if isinstance(y, Unreduced):
            self.other()
        return super().finalize(y, dispatched, out_TH)


def test_rows_keep_their_scratch_until_the_dispatcher_has_summed() -> None:
    found, workspace = kit_registry(), Workspace()
    for origin, kind in (
        (found.expert(LEAVES_SUMS), InWorkspace),
        (found.dispatcher(SUMS_ITSELF), CallsAnother),
    ):
        found.register(
            replace(origin, name=kind.__name__.lower(), target=f"{__name__}:{kind.__name__}")
        )
    kernel, other = (
        moekit.compose(PROBLEM, dispatcher, "inworkspace", backends=found, workspace=workspace)
        for dispatcher in ("callsanother", SUMS_ITSELF)
    )
    packed = pack(kernel, random_weights(PROBLEM))
    case, more = (make_case(PROBLEM, 9, key=key) for key in (1, 2))
    kernel.dispatcher.other = lambda: other(more.x, packed, more.routing)
    out = kernel(case.x, packed, case.routing)
    assert_close(out, case.reference(), PROBLEM, case=case)
    assert kernel.dispatcher.taken == other.dispatcher.taken == 1


@pytest.mark.parametrize("faulty", ["apply_unreduced", "finalize"])
def test_a_fault_gives_the_scratch_back(faulty: str, monkeypatch) -> None:
    found, workspace = kit_registry(), Workspace()
    found.register(replace(found.expert(LEAVES_SUMS), name="own", target=f"{__name__}:InWorkspace"))
    kernel = moekit.compose(PROBLEM, SUMS_ITSELF, "own", backends=found, workspace=workspace)
    case, packed = make_case(PROBLEM, 9), pack(kernel, random_weights(PROBLEM))
    kernel(case.x, packed, case.routing)
    held = workspace.nbytes
    assert held

    def fails(*args):
        raise RuntimeError("on purpose")

    party = kernel.experts if faulty == "apply_unreduced" else kernel.dispatcher
    monkeypatch.setattr(party, faulty, fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        kernel(case.x, packed, case.routing)
    assert workspace.nbytes == held


def test_calls_without_rows_are_not_asked() -> None:
    kernel = kernel_of(LEAVES_SUMS)
    check_call(kernel, make_case(PROBLEM, 0))
    assert kernel.experts.calls == 0
