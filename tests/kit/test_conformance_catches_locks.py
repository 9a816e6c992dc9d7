"""Wrong dispatchers that hold a lock of the process while they wait for other ranks."""

from __future__ import annotations

import threading

import pytest
from conformance_catches import suite
from moekit_naive.dispatcher import NaiveDispatcher
from right_naive import Naive_

from moekit.contract.pending import Pending
from moekit.testing import dispatchers
from moekit.testing.distributed import RankError


class OneLockForAllGroups(NaiveDispatcher):
    """Holds a lock of the process while it exchanges sizes with other ranks."""

    _lock = threading.Lock()

    def _exchange_headers(self, header):
        with OneLockForAllGroups._lock:
            return super()._exchange_headers(header)


class OneLockForConstructors(NaiveDispatcher):
    """Holds a lock of the process while ranks make a dispatcher together."""

    _lock = threading.Lock()

    def __init__(self, spec, problem, group=None):
        with OneLockForConstructors._lock:
            super().__init__(spec, problem, group)


class OneLockForCombines(NaiveDispatcher):
    """Holds a lock of the process while it waits for the experts' results."""

    _lock = threading.Lock()

    def finalize(self, y, dispatched, out_TH):
        with OneLockForCombines._lock:
            return Pending.ready(super().finalize(y, dispatched, out_TH).result())


@pytest.mark.parametrize(
    ("wrong", "step"),
    [
        (OneLockForAllGroups, "start calls"),
        (OneLockForConstructors, "make dispatchers"),
        (OneLockForCombines, "run experts and combine"),
    ],
)
def test_lock_that_groups_share(wrong, step, monkeypatch):
    suite(Naive_, "naive").test_groups_in_threads(4)
    monkeypatch.setattr(dispatchers, "_THREAD_SECONDS", 5.0)
    with pytest.raises(RankError, match=f"to {step} in two groups.*use a lock for each group"):
        suite(wrong, "naive").test_groups_in_threads(4)
