"""Steps that all ranks of a process group take together, or none of them.

Messages go through the group's store, over the host: no GPU waits for another rank, no collective
is left half-way, and a rank that does not answer is named.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from threading import Lock, RLock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from moekit.errors import InvalidInput, MoekitError, PeerFailed
from moekit.runtime.store import Job, StoreLost, access, host_of
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import describe

logger = logging.getLogger("moekit")

# Seconds to wait for a rank, unless the caller sets another limit.
_TIMEOUT = 60.0
# Seconds that the store may take to answer.
_SLACK = 2.0
_AGAIN = "correct what failed, then all can call again"


def exchange(
    what: str, mine: str, group: dist.ProcessGroup, timeout: float | None = None
) -> list[str]:
    """Return ``mine`` of every rank, in rank order. Collective, over the host.

    Args:
        what: the step at which all ranks must be.
        mine: this rank's text.
        timeout: seconds to wait for a rank, also for later exchanges in the group. Default: the
            last one given, or 60.

    Raises:
        PeerFailed: some ranks did not come; the error names them.
    """
    sequence = _Sequence.of(group)
    if timeout is not None:
        sequence.timeout = timeout
    return sequence.meet(what, mine, None, sequence.timeout)


def peer_timeout(group: dist.ProcessGroup) -> float:
    """Return the seconds that exchanges in the group wait for a rank, unless told otherwise."""
    return _Sequence.of(group).timeout


class _Sequence:
    """The steps that the ranks of a group take together, in one order.

    Each rank has one key a step, and a key is written once. Its own rank writes where it is
    (``+what`` and a payload) or why it cannot go on (``-reason``). Another rank writes it to stop
    waiting for the key's rank (``~seconds|rank|what``) or to leave the step (``!rank|reason``). So
    all ranks read the same values, and a step succeeds on all of them or on none. A late rank finds
    its key written and goes on at the first step whose key is not: at once if it comes for another
    step than the one that the others gave up.
    """

    _of: ClassVar[WeakKeyDictionary[dist.ProcessGroup, _Sequence]] = WeakKeyDictionary()
    _making: ClassVar[Lock] = Lock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Sequence:
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidInput(
                f"group is {shown(group)}, expected a ProcessGroup of the ranks: pass what "
                "moekit.plugin.resolve(problem, group) returns"
            )
        with cls._making:
            if group not in cls._of:
                cls._of[group] = cls(group)
            return cls._of[group]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name, self._prefix = f"moekit/{group.group_name}", ""
        self._store = dist.distributed_c10d._get_default_store()
        self.rank, self._size = group.rank(), group.size()
        self.step = 0
        self._oldest = 0  # the first step whose key this rank has not deleted
        # This rank's text at `step`, and why it does not know how that step ended.
        self._left: tuple[bytes, str] | None = None
        self.timeout = _TIMEOUT
        # Which failed call left tokens in flight, if one did. A later call could receive them.
        self.poisoned = ""
        self.turn = RLock()  # collectives of one group run in one thread at a time

    def meet(
        self, what: str, payload: str, fault: str | None, timeout: float, advice: str = _AGAIN
    ) -> list[str]:
        """Return every rank's payload. Raises PeerFailed unless all ranks came to ``what``.

        A rank with a ``fault`` reports it and gets an empty list: it does not wait for the others.
        advice: what to do after a failure.
        """
        mine = _encoded(f"+{what}\n{payload}" if fault is None else f"-{fault}")
        wait = timeout if fault is None else min(timeout, _SLACK)

        def work(client: Any, job: Job) -> tuple[int, int, list[str]]:
            self._choose_prefix(client)
            # A rank that repeats the call it left is still expected there, or learns that the
            # others gave it up.
            now = self._settle(client, step, left[1]) if left and left[0] != mine else step
            return self._take(client, job, now, mine, what, wait)

        with self.turn:
            step, left = self.step, self._left
            self._left = mine, f"{what} was not finished"
            try:
                _, self.step, said = access(self._store, work, wait + _SLACK, self._tidy)
            except StoreLost as error:
                self._left = mine, f"the store {error}"
                raise PeerFailed(
                    f"the store of the process group {error}: {host_of(self._store)} is stopped, "
                    f"died, or cannot be reached. This rank stopped at '{what}'; {advice}"
                ) from error
            except BaseException as error:
                self._leave(mine, describe(error))
                raise
            self._left = None
        if said and fault is None:
            self._compare(said, what, advice)
        return [text.partition("\n")[2] for text in said]

    def _choose_prefix(self, client: Any) -> None:
        """Choose the prefix of the keys, at the first access.

        A group that is made after another was destroyed may have its name and its store. This
        rank's groups are counted in the store: a process may have used groups of
        another store, for example if another rank has been restarted.
        """
        if not self._prefix:
            made = client.add(f"{self._name}/made/{self.rank}", 1)
            self._prefix = f"{self._name}/{made}"

    def _take(
        self, client: Any, job: Job, step: int, mine: bytes, what: str, seconds: float
    ) -> tuple[int, int, list[str]]:
        """Write this rank's key. Return the step, the next step, and all ranks' values."""
        keys = self._keys(step)
        job.go_on()
        found = client.compare_set(keys[self.rank], "", mine)
        if found != mine:  # the others went on without this rank
            told, after = _decoded(found), self._next(client, step + 1)
            if told[:1] == "~" and told.split("|", 2)[2] != what:  # they gave up another step
                return self._take(client, job, after, mine, what, seconds)
            said = [""] * self._size
            said[self.rank] = told
            return step, after, said
        if mine[:1] == b"-":
            return step, step + 1, []
        try:
            values = job.read(client, keys, seconds)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a timeout; FileStore raises no special type
            job.go_on()
            late = _encoded(f"~{seconds:g}|{self.rank}|{what}")
            values = [client.compare_set(key, "", late) for key in keys]
        return step, step + 1, [_decoded(value) for value in values]

    def _settle(self, client: Any, step: int, why: str) -> int:
        """Leave a step whose end this rank does not know. Return the step where it goes on."""
        self._choose_prefix(client)
        gone = _encoded(f"!{self.rank}|{why}")
        values = [client.compare_set(key, "", gone) for key in self._keys(step)]
        if all(value[:1] == b"+" for value in values):  # the others went on to the next step
            step += 1
            client.compare_set(self._keys(step)[self.rank], "", _encoded(f"-{why}"))
        return self._next(client, step + 1)

    def _next(self, client: Any, step: int) -> int:
        """Return the first step at which no rank gave up waiting for this one."""
        while client.check([self._keys(step)[self.rank]]):
            step += 1
        return step

    def _leave(self, mine: bytes, why: str) -> None:
        """Report to the others now if the store answers; otherwise in the next step."""
        self._left, step = (mine, why), self.step
        with suppress(StoreLost, RuntimeError):
            self.step = access(self._store, lambda c, _: self._settle(c, step, why), _SLACK)
            self._left = None

    def _tidy(self, client: Any, result: tuple[int, int, list[str]]) -> None:
        """Delete this rank's old keys: ranks that came to this step have read them."""
        step, _, said = result
        if said and all(text[:1] in ("+", "-") for text in said):
            while self._oldest < step:
                client.delete_key(self._keys(self._oldest)[self.rank])
                self._oldest += 1

    def _keys(self, step: int) -> list[str]:
        return [f"{self._prefix}/{step}/{rank}" for rank in range(self._size)]

    def _compare(self, said: list[str], what: str, advice: str) -> None:
        faults = dict.fromkeys(filter(None, map(self._fault, range(self._size), said)))
        if faults:
            raise PeerFailed(f"{'; '.join(faults)}. No rank finished this call; {advice}")
        at = {rank: text[1:].partition("\n")[0] for rank, text in enumerate(said)}
        if other := {rank: text for rank, text in at.items() if text != what}:
            raise PeerFailed(
                f"rank {self.rank} is at '{what}', other ranks are at another step: {other}; start "
                "and run calls in one order on all ranks, from one thread for each process group"
            )

    def _fault(self, rank: int, text: str) -> str:
        """Return the fault that a rank's value reports, or ""."""
        kind, rest = text[:1], text[1:]
        if kind == "-":
            return f"rank {rank} failed: {rest}"
        if kind == "!":
            who, _, why = rest.partition("|")
            return f"rank {who} failed: {why}"
        if kind != "~":
            return ""
        seconds, who, where = rest.split("|", 2)
        if rank == self.rank:
            waited = f"where it waited {seconds} s for this rank ({rank})"
            return f"rank {who} gave up at '{where}', {waited}"
        return (
            f"rank {rank} did not come to '{where}' within {seconds} s: it died, hangs, or makes "
            "its calls in another order"
        )


class Agreement:
    """Lets all ranks of a group go on together, or none of them.

    All agreements of a group share one sequence of steps, which all ranks take in one order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """timeout: seconds to wait for a rank."""
        self._sequence, self._timeout = _Sequence.of(group), timeout
        self.turn = self._sequence.turn  # a thread holds it while its call runs in the group

    def agree(self, what: str, fault: str | None = None, *, moving: bool = False) -> None:
        """Return on every rank, or raise PeerFailed on every rank that has no ``fault``.

        Args:
            what: the step at which all ranks must be.
            fault: why this rank cannot go on. It does not wait for the others then.
            moving: this rank's tokens are in flight, and never arrive if this step fails: the
                group is poisoned then.
        """
        advice = "tokens are left in flight: start the ranks anew, or make another group"
        try:
            self._sequence.meet(what, "", fault, self._timeout, advice if moving else _AGAIN)
        except PeerFailed as error:
            if fault is None:
                if moving:
                    self._sequence.poisoned = f"an earlier call was left half-way: {error}"
                raise
            logger.warning("could not tell the other ranks about %r: %s", fault, error)

    def enter(self, what: str) -> None:
        """Raise PeerFailed in a poisoned group, where a device may wait without end.

        Args:
            what: as in `agree`, which the other ranks then leave with the same reason.
        """
        if why := self._sequence.poisoned:
            self.agree(what, why)
            raise PeerFailed(why)

    @property
    def step(self) -> int:
        """Return the number of the next step. After a successful step it is equal on all ranks."""
        return self._sequence.step


_lost: WeakSet[dist.ProcessGroup] = WeakSet()  # no later call waits for their ranks again


def farewell(group: dist.ProcessGroup, what: str, fault: str = "", timeout: float = 20.0) -> str:
    """Return why some rank does not free ``what`` now, or "" if all do. Collective.

    fault: why this rank does not, or "". timeout: seconds to wait for the other ranks.
    """
    if group in _lost:
        return "a rank did not answer before"
    try:
        dist.get_process_group_ranks(group)
        Agreement(group, timeout).agree(f"free {what}", fault or None)
    except PeerFailed as error:
        fault = str(error)
    except (KeyError, ValueError):
        return "the process group was destroyed first; destroy kernels before their group"
    if fault:
        _lost.add(group)
    return fault


def gpu_fault(last: torch.cuda.Stream | None, timeout: float = 20.0) -> str:
    """Return why the GPU does not end the work of the current stream and of ``last`` in time."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    now, end = torch.cuda.current_stream(), time.monotonic() + timeout
    try:
        while not (now.query() and (last or now).query()):
            if time.monotonic() > end:
                return "its GPU still waits for another rank"
            time.sleep(0.001)
    except RuntimeError as error:
        return f"its GPU has failed: {error}"
    return ""


class Transfers:
    """Context manager around collectives: one that fails because a rank died raises PeerFailed.

    The library's own error only says that some connection broke. All ranks enter it, and the
    group's agreements, in one order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 3.0) -> None:
        """timeout: seconds for the surviving ranks, whose transfers fail too, to answer."""
        self._roll_call = Agreement(group, timeout)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = MoekitError, torch.OutOfMemoryError  # these are not transfer errors
        if isinstance(error, RuntimeError) and not isinstance(error, own):
            self._roll_call.agree("go on after a failed transfer", moving=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "replace")
