"""Wrong dispatchers that fail on one rank, or after a failure."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch.distributed as dist
from conformance_catches import killed_by
from right_naive import Naive

from moekit.contract.pending import Pending
from moekit.errors import InvalidInput, MoekitError, PeerFailed
from moekit.plugin import exchange


@killed_by("test_failure_without_checks", 2, abort=Naive,
           says="got no error although rank 1 failed before prepare")  # fmt: skip
def NoAbort(self, reason):
    """`abort` does nothing, though declared."""


@killed_by("test_failure_without_checks", 2, says="but not that it is rank", _agree=Naive)
def AbortAnonymous(self, *args):
    """`abort` does not name the rank."""
    try:
        return Naive._agree(self, *args)
    except PeerFailed:
        raise PeerFailed("some rank failed") from None


@killed_by("test_failure_without_checks", 4, says="gave up at 'end a call'|did not come",
           abort=Naive)  # fmt: skip
def AbortsByThemselves(self, reason):
    """Leaves out its reason if another rank also fails."""
    headers = self._exchange_headers([-1, 0, 0])
    if sum(header[0] < 0 for header in headers) == 1:
        exchange("end a call", reason, self.group, timeout=3.0)


@killed_by("test_failure_without_checks", 2, says="by InvalidInput, expected PeerFailed",
           _agree=Naive)  # fmt: skip
def AbortOfAnotherKind(self, *args):
    """Ranks that are told of a failure raise InvalidInput."""
    try:
        return Naive._agree(self, *args)
    except PeerFailed as error:
        raise InvalidInput(str(error)) from None


@killed_by("test_failure_without_checks", 4, says="no free buffer")
class AbortLosesLanes(Naive):
    """Has three buffers, and keeps one when another rank aborts its call."""

    _free = 3

    def _agree(self, *args):
        if not self._free:
            raise MoekitError("no free buffer")
        self._free -= 1
        sizes = super()._agree(*args)
        self._free += 1
        return sizes


@killed_by("test_failure_without_checks", 2, says="gave up at 'end a call'|did not come")
class AbortsInWorld(Naive):
    """Resolves its group, but says in WORLD why a call ends."""

    def _agree(self, *args):
        with mock.patch("moekit_naive.dispatcher.exchange", exchange_in_world):
            return super()._agree(*args)

    def abort(self, reason):
        with mock.patch("moekit_naive.dispatcher.exchange", exchange_in_world):
            super().abort(reason)


def exchange_in_world(what, said, group):
    return exchange(what, said, dist.group.WORLD, timeout=3.0)


class AbandonsAll(Naive):
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


@killed_by("test_failure_after_dispatch", 2, says="no free buffer")
class LanesLost(Naive):
    """Has three buffers, and gives one back only when its call finishes."""

    _free = 3

    def prepare(self, *args):
        if not self._free:
            raise MoekitError("no free buffer")
        self._free -= 1
        return super().prepare(*args)

    def finalize(self, *args):
        self._free += 1
        return super().finalize(*args)
