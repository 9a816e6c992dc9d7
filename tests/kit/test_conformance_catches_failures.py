"""Wrong dispatchers that fail on one rank, or after a failure."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from moekit_naive.dispatcher import NaiveDispatcher
from right_naive import caught_naive

from moekit.contract.pending import Pending
from moekit.errors import InvalidInput, MoekitError, PeerFailed
from moekit.plugin import exchange


class NoAbort(NaiveDispatcher):
    def abort(self, reason):
        pass


class AbortAnonymous(NaiveDispatcher):
    def _agree(self, *args):
        try:
            return super()._agree(*args)
        except PeerFailed:
            raise PeerFailed("some rank failed") from None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (NoAbort, "got no error although rank 1 failed before prepare"),
        (AbortAnonymous, "but not that it is rank"),
    ],
)
def test_abort_that_tells_nothing(wrong, says):
    caught_naive(wrong, "test_failure_without_checks", 2, says=says)


class AbortsByThemselves(NaiveDispatcher):
    """Leaves out its reason if another rank fails, too."""

    def abort(self, reason):
        headers = self._exchange_headers([-1, 0, 0])
        if sum(header[0] < 0 for header in headers) == 1:
            exchange("end a call", reason, self.group, timeout=3.0)


class AbortOfAnotherKind(NaiveDispatcher):
    def _agree(self, *args):
        try:
            return super()._agree(*args)
        except PeerFailed as error:
            raise InvalidInput(str(error)) from None


class AbortLosesLanes(NaiveDispatcher):
    """Has three buffers, and does not give back that of a call that another rank aborts."""

    _free = 3

    def _agree(self, *args):
        if not self._free:
            raise MoekitError("no free buffer")
        self._free -= 1
        sizes = super()._agree(*args)
        self._free += 1
        return sizes


class AbortsInWorld(NaiveDispatcher):
    """Resolves its group, but says in WORLD why a call ends."""

    def _agree(self, *args):
        with mock.patch("moekit_naive.dispatcher.exchange", exchange_in_world):
            return super()._agree(*args)

    def abort(self, reason):
        with mock.patch("moekit_naive.dispatcher.exchange", exchange_in_world):
            super().abort(reason)


def exchange_in_world(what, said, group):
    return exchange(what, said, dist.group.WORLD, timeout=3.0)


@pytest.mark.parametrize(
    ("wrong", "ranks", "says"),
    [
        (AbortsByThemselves, 4, "gave up at 'end a call'|did not come"),
        (AbortOfAnotherKind, 2, "by InvalidInput, expected PeerFailed"),
        (AbortLosesLanes, 4, "no free buffer"),
        (AbortsInWorld, 2, "gave up at 'end a call'|did not come"),
    ],
)
def test_abort_that_is_wrong_for_some(wrong, ranks, says):
    caught_naive(wrong, "test_failure_without_checks", ranks, says=says)


class AbandonsAll(NaiveDispatcher):
    """Ends all calls in flight when one of them is abandoned."""

    _failures = 0

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        return replace(tokens, handle=(self._failures, tokens.handle))

    def finalize(self, y, dispatched, out_TH):
        failures, handle = dispatched.handle
        pending = super().finalize(y, replace(dispatched, handle=handle), out_TH)
        lost = failures != self._failures
        return Pending(lambda: pending.result().mul_(0 if lost else 1))

    def abandon(self, dispatched):
        self._failures += 1


class LanesLost(NaiveDispatcher):
    """Has three buffers, and gives back those of finished calls alone."""

    _free = 3

    def prepare(self, *args):
        if not self._free:
            raise MoekitError("no free buffer")
        self._free -= 1
        return super().prepare(*args)

    def finalize(self, *args):
        self._free += 1
        return super().finalize(*args)


def test_abandoned_call_keeps_its_buffer():
    caught_naive(LanesLost, "test_failure_after_dispatch", 2, says="no free buffer")
