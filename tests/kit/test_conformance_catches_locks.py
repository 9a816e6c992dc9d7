"""Wrong dispatchers that hold a lock of the process while they wait for other ranks."""

from __future__ import annotations

import threading

import pytest
from conformance_catches import killed_by, mutants_of
from right_naive import Naive

from moekit.contract.pending import Pending
from moekit.testing import dispatchers


@killed_by("test_groups_in_threads", 4, says="to start calls in two groups.*use a lock")
class OneLockForAllGroups(Naive):
    """Holds a lock of the process while it exchanges sizes with other ranks."""

    _lock = threading.Lock()

    def _exchange_headers(self, header):
        with OneLockForAllGroups._lock:
            return super()._exchange_headers(header)


@killed_by("test_groups_in_threads", 4, says="to make dispatchers in two groups.*use a lock")
class OneLockForConstructors(Naive):
    """Holds a lock of the process while ranks make a dispatcher together."""

    _lock = threading.Lock()

    def __init__(self, spec, problem, group=None):
        with OneLockForConstructors._lock:
            super().__init__(spec, problem, group)


@killed_by(
    "test_groups_in_threads",
    4,
    says="to run experts and combine in two groups",
)
class OneLockForCombines(Naive):
    """Holds a lock of the process while it waits for the experts' results."""

    _lock = threading.Lock()

    def finalize(self, y, dispatched, out_TH):
        with OneLockForCombines._lock:
            return Pending.ready(super().finalize(y, dispatched, out_TH).result())


@pytest.mark.parametrize("mutant", mutants_of(__name__))
def test_killed(mutant, monkeypatch):
    mutant.check_right()
    monkeypatch.setattr(dispatchers, "_THREAD_SECONDS", 5.0)
    mutant.check()
