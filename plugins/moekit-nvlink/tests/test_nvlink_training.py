"""Backwards that fail, on CPU ranks that share memory. test_nvlink_standin.py has the others."""

from __future__ import annotations

import pytest
import torch

from moekit.errors import InvalidInput, PeerFailed
from moekit.testing.cases import seed
from moekit.testing.distributed import RankPool
from moekit.testing.gradient_ranks import gradients_of_calls
from moekit.testing.ranks import Call, Job, Rank

if torch.cuda.is_available():
    pytest.skip("for the stand-in", allow_module_level=True)

import nvlink_standin  # noqa: E402
from nvlink_host import problems  # noqa: E402


def failing_experts(rank: int, ranks: int, job: Job) -> None:
    """Let parts of one rank's experts fail, more often than there are buffers."""
    r, fail, call = Rank(rank, ranks, job), Call((4, 2, 3)), Call((1, 6, 0))

    def broken(*_: object) -> None:
        raise InvalidInput("fails on purpose")

    for turn in range(6):
        part = ("forward", "backward_input", "backward_weight")[turn % 3]
        fails, whole = rank == turn % ranks, getattr(r.kernel.experts, part)
        if fails:
            setattr(r.kernel.experts, part, broken)
            with pytest.raises(InvalidInput, match="on purpose"):
                gradients_of_calls(r, [fail], "")
        elif part == "backward_weight":  # this rank's gradients are right
            gradients_of_calls(r, [fail], "")
        else:
            with pytest.raises(PeerFailed, match=f"rank {turn % ranks} failed"):
                gradients_of_calls(r, [fail], "")
        setattr(r.kernel.experts, part, whole)
        assert r.kernel.dispatcher.lease.value.calls.in_flight == 0, part
        gradients_of_calls(r, [call], "")
    r.finish()


def test_experts_that_fail() -> None:
    spec = next(spec for spec in nvlink_standin.specs() if "ht" in spec.name)
    problem = problems(3, 1, 5, 3, 16, 6, dtype=torch.float32, training=True)[0]
    with RankPool(3, "cpu", timeout=120) as pool:
        pool.run(failing_experts, Job(spec, problem, seed()))
