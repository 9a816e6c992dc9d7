"""The ranks of a layer: do they fit the problem, do they agree on a call, what do they share?

Dispatchers that move tokens build on three things: `resolve` at construction, `Agreement` around
every checked call, and `SharedBuffers` for what the layers of a model use in turn.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from threading import Lock, RLock
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moekit.errors import GroupMismatch, MoekitError, PeerFailed
from moekit.problem import MoEProblem
from moekit.runtime.store import Job, StoreLost, access, host_of, learn_host

logger = logging.getLogger("moekit")

T = TypeVar("T")

# Seconds to wait for a rank, where nobody says how many.
_TIMEOUT = 60.0
# Seconds that the store may take to answer.
_SLACK = 2.0
_AGAIN = "correct what failed, then all can call again"


def resolve(
    problem: MoEProblem,
    group: dist.ProcessGroup | None,
    protocol: str = "",
    timeout: float | None = None,
) -> dist.ProcessGroup | None:
    """The group to exchange tokens in; None when tokens need not move.

    Collective when tokens move or a group is given. protocol: what else ranks must have in
    common, a library's version, say. timeout: seconds to wait for a rank; by default the
    ``peer_timeout`` of the last `moekit.compose` in the group. Raises GroupMismatch, and then on
    all ranks; PeerFailed if a rank does not come.
    """
    parallel = problem.parallel
    if group is None and not parallel.moves_tokens:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupMismatch(
            f"dp_size={parallel.dp_size}: tokens must move between ranks, but torch.distributed "
            "is not initialized; call torch.distributed.init_process_group first (torchrun sets "
            "its environment), or describe one rank with ParallelConfig()"
        )
    group = group or dist.group.WORLD
    assert group is not None
    # This rank's own fault travels too: raising before the exchange would leave the others in it.
    said = _fingerprint(problem) | {"protocol": protocol}
    _same("describe the layer", said, _fault(problem, group), group, timeout)
    return group if parallel.moves_tokens else None


def same_choice(
    chosen: str,
    group: dist.ProcessGroup | None,
    fault: str | None = None,
    timeout: float | None = None,
) -> None:
    """All ranks chose alike, or all raise GroupMismatch. Collective where ranks are known.

    fault: why this rank has not chosen. timeout: as in `resolve`. Raises PeerFailed if a rank does
    not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # `resolve` says what is missing
    group = group or dist.group.WORLD
    assert group is not None
    said = {"dispatcher and experts": chosen} if fault is None else {}
    _same(
        "choose backends", said, fault, group, timeout,
        " plugins, tuned tables (MOEKIT_TUNED) and variables, or name both",
    )  # fmt: skip


def exchange(
    what: str, mine: str, group: dist.ProcessGroup, timeout: float | None = None
) -> list[str]:
    """Return ``mine`` of every rank, in rank order. Collective; over the host.

    what: the step all ranks must be at. timeout: as in `resolve`. Raises PeerFailed, which names
    the ranks that do not come.
    """
    sequence = _Sequence.of(group)
    if timeout is not None:
        sequence.timeout = timeout
    return sequence.meet(what, mine, None, sequence.timeout)


def reason_of(error: BaseException) -> str:
    """The error's type and text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (without a text: its __str__ fails)"


def has_backend(group: dist.ProcessGroup, device_type: str, *names: str) -> bool:
    """Whether ``group`` carries tensors of ``device_type`` (by one of the ``names``, if given)."""
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    backend = backends.get(device_type)
    return backend is not None and (not names or backend in names)


class _Sequence:
    """The steps that the ranks of a group take together, in one order.

    Each rank has one key a step. A key is written once: by its rank, with where that rank is
    (``+what`` and a payload) or why it cannot go on (``-reason``); or by a rank that does not wait
    for it any longer (``~seconds|rank|what``) or leaves the step (``!rank|reason``). So all ranks
    read the same values, and a step succeeds on all of them or on none. A rank that comes late
    finds its key written, and goes on at the first step that has none: at once, if it comes for
    something else than what the others gave up.
    """

    _of: ClassVar[WeakKeyDictionary[dist.ProcessGroup, _Sequence]] = WeakKeyDictionary()
    _made: ClassVar[Counter[str]] = Counter()
    _making: ClassVar[Lock] = Lock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Sequence:
        with cls._making:
            found = cls._of.get(group)
            if found is None:
                found = cls._of[group] = cls(group)
            return found

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = group.group_name
        self._made[name] += 1  # a group made after another was destroyed may have its name
        self._prefix = f"moekit/{name}/{self._made[name]}"
        self._store = dist.distributed_c10d._get_default_store()
        self.rank, self._size = group.rank(), group.size()
        self.step = 0
        self._oldest = 0  # the first step whose key this rank has not deleted
        # What this rank wrote at `step`, and why it does not know how that ended.
        self._left: tuple[bytes, str] | None = None
        self.timeout = _TIMEOUT  # where `resolve` is not told
        self.spoilt = ""
        self.turn = RLock()  # collectives of one group run in one thread at a time

    def meet(
        self, what: str, payload: str, fault: str | None, timeout: float, after: str = _AGAIN
    ) -> list[str]:
        """Return every rank's payload. Raises PeerFailed unless all ranks came to ``what``.

        A rank with a ``fault`` tells it and gets an empty list: it does not wait for the others.
        after: what to do after a failure.
        """
        mine = _encoded(f"+{what}\n{payload}" if fault is None else f"-{fault}")
        with self.turn:
            step, left = self.step, self._left
            wait = min(timeout, _SLACK) if fault is not None else timeout

            def work(client: Any, job: Job) -> tuple[int, int, list[str]]:
                # Who calls again what it left is still expected there, or finds that it is over.
                now = step
                if left is not None and left[0] != mine:
                    now = self._settle(client, step, left[1])
                return self._take(client, job, now, mine, what, wait)

            self._left = mine, f"{what} was not finished"
            try:
                _, self.step, said = access(self._store, work, wait + _SLACK, self._tidy)
            except StoreLost as error:
                self._left = mine, f"the store {error}"
                raise PeerFailed(
                    f"the store of the process group {error}: {host_of(self._store)} is stopped, "
                    f"died, or cannot be reached. This rank stopped at '{what}'; {after}"
                ) from error
            except BaseException as error:
                self._leave(mine, reason_of(error))
                raise
            self._left = None
        if fault is not None:
            return []
        if said.count(said[0]) != self._size:
            self._compare(said, what, after)
        return [text.partition("\n")[2] for text in said]

    def _take(
        self, client: Any, job: Job, step: int, mine: bytes, what: str, seconds: float
    ) -> tuple[int, int, list[str]]:
        """Write this rank's key. Return the step, the next step, and all ranks' values."""
        keys = self._keys(step)
        job.go_on()
        found = client.compare_set(keys[self.rank], "", mine)
        if found != mine:  # the others went on without this rank
            told, after = _decoded(found), self._next(client, step + 1)
            if told[:1] == "~" and told.split("|", 2)[2] != what:  # not what this rank is about
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
        except dist.DistStoreError:
            job.go_on()
            late = _encoded(f"~{seconds:g}|{self.rank}|{what}")
            values = [client.compare_set(key, "", late) for key in keys]
        return step, step + 1, [_decoded(value) for value in values]

    def _settle(self, client: Any, step: int, why: str) -> int:
        """Leave a step whose end this rank does not know. Return where this rank goes on."""
        gone = _encoded(f"!{self.rank}|{why}")
        values = [client.compare_set(key, "", gone) for key in self._keys(step)]
        if all(value[:1] == b"+" for value in values):  # the others went on to the next step
            step += 1
            client.compare_set(self._keys(step)[self.rank], "", _encoded(f"-{why}"))
        return self._next(client, step + 1)

    def _next(self, client: Any, step: int) -> int:
        """The first step at which nobody gave up waiting for this rank."""
        while client.check([self._keys(step)[self.rank]]):
            step += 1
        return step

    def _leave(self, mine: bytes, why: str) -> None:
        """Tell the others now, if the store answers; else the next step does."""
        self._left, step = (mine, why), self.step
        with suppress(StoreLost, RuntimeError):
            self.step = access(self._store, lambda c, _: self._settle(c, step, why), _SLACK)
            self._left = None

    def _tidy(self, client: Any, result: tuple[int, int, list[str]]) -> None:
        """Delete this rank's old keys: ranks that came to this step have read them."""
        step, _, said = result
        learn_host(self._store, client)
        if said and all(text[:1] in ("+", "-") for text in said):
            while self._oldest < step:
                client.delete_key(self._keys(self._oldest)[self.rank])
                self._oldest += 1

    def _keys(self, step: int) -> list[str]:
        return [f"{self._prefix}/{step}/{rank}" for rank in range(self._size)]

    def _compare(self, said: list[str], what: str, after: str) -> None:
        failed, late = {}, {}
        for rank, text in enumerate(said):
            if text.startswith("-"):
                failed[rank] = text[1:]
            elif text.startswith("!"):
                who, _, why = text[1:].partition("|")
                failed[int(who)] = why
            elif text.startswith("~"):
                late[rank] = text[1:].split("|", 2)
        faults = [f"rank {rank} failed: {why}" for rank, why in failed.items()]
        if self.rank in late:
            seconds, who, where = late.pop(self.rank)
            faults.append(
                f"rank {who} gave up at '{where}', where it waited {seconds} s for this rank "
                f"({self.rank})"
            )
        elif late:
            seconds, _, where = next(iter(late.values()))
            faults.append(
                f"rank {', '.join(map(str, late))} did not come to '{where}' within {seconds} s: "
                "it died, hangs, or makes its calls in another order"
            )
        if faults:
            raise PeerFailed(f"{'; '.join(faults)}. No rank finished this call; {after}")
        at = {rank: text[1:].partition("\n")[0] for rank, text in enumerate(said)}
        if other := {rank: text for rank, text in at.items() if text != what}:
            raise PeerFailed(
                f"rank {self.rank} is at '{what}', others are not: {other}; start and run "
                "calls in one order on all ranks, from one thread for each process group"
            )


class Agreement:
    """Lets all ranks of a group go on together, or none.

    Messages go through the group's store, over the host: no GPU waits, no collective is left
    half-way, and a rank that says nothing is known by name. All agreements of a group share one
    sequence of steps, which all ranks take in one order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """timeout: seconds to wait for a rank."""
        self._sequence, self._timeout = _Sequence.of(group), timeout

    def agree(self, what: str, fault: str | None = None, *, moving: bool = False) -> None:
        """Returns on every rank, or raises PeerFailed on every rank that brought no ``fault``.

        what: the step all ranks must be at. A rank with a fault does not wait for the others.
        moving: this rank's tokens are on their way, and never arrive where this step fails: the
        group is `spoilt` then.
        """
        after = "tokens are left on their way: start the ranks anew, or make another group"
        try:
            self._sequence.meet(what, "", fault, self._timeout, after if moving else _AGAIN)
        except PeerFailed as error:
            if fault is None:
                if moving:
                    self._sequence.spoilt = f"an earlier call was left half-way: {error}"
                raise
            logger.warning("could not tell the other ranks about %r: %s", fault, error)

    @property
    def step(self) -> int:
        """The number of the next step, the same on all ranks after one that succeeded."""
        return self._sequence.step

    @property
    def spoilt(self) -> str:
        """What left this rank's tokens on their way in the group: what is sent later would be taken
        for them. Or nothing."""
        return self._sequence.spoilt


def named(
    group: dist.ProcessGroup | None, timeout: float, checked: bool
) -> tuple[str, Agreement | None]:
    """What all ranks call a kernel that they compose, and its agreement if it is checked.

    Collective. Raises GroupMismatch on all ranks if only some are checked, and PeerFailed if a
    rank does not come.
    """
    if group is None:
        return "", None
    _same("compose a kernel", {"checked": str(checked)}, None, group, timeout)
    agreement = Agreement(group, timeout)
    return f"kernel {agreement.step}", agreement if checked else None


def turn_in(group: dist.ProcessGroup | None) -> AbstractContextManager[object]:
    """Held by the thread whose call runs in the group, in which collectives have one order."""
    return nullcontext() if group is None else _Sequence.of(group).turn


class Together:
    """``with`` it around a step: where there is an agreement, all ranks get past it or none does.

    Nobody begins one in a group that is spoilt, where its device may wait for ever.
    what, moving: as in `Agreement.agree`. otherwise: what a rank without an agreement does with
    its own failure.
    """

    def __init__(
        self,
        agreement: Agreement | None,
        what: str,
        otherwise: Callable[[str], None] | None = None,
        *,
        moving: bool = False,
    ) -> None:
        self._agreement, self._what = agreement, what
        self._otherwise, self._moving = otherwise, moving

    def __enter__(self) -> None:
        if self._agreement is not None and (why := self._agreement.spoilt):
            self._agreement.agree(self._what, why)
            raise PeerFailed(why)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self._agreement is not None:
                self._agreement.agree(self._what, moving=self._moving)
        elif self._agreement is not None:  # whatever it is, no rank may wait for this one
            self._agreement.agree(self._what, reason_of(error))
        elif self._otherwise is not None and isinstance(error, Exception):
            self._otherwise(reason_of(error))  # it waits for the others: no interrupt may do that


class Transfers:
    """``with`` it around collectives: where one fails since a rank is gone, PeerFailed names that.

    The library's own error says no more than that some connection broke. timeout: seconds in which
    the ranks that are left, whose transfer fails too, say that they are there.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 3.0) -> None:
        """All ranks make them, and a group's agreements, in one order."""
        self._roll_call = Agreement(group, timeout)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = MoekitError, torch.OutOfMemoryError  # no transfer's
        if isinstance(error, RuntimeError) and not isinstance(error, own):
            self._roll_call.agree("go on after a failed transfer")


@dataclass
class _Shared(Generic[T]):
    value: T
    users: int = 0


class SharedBuffers(Generic[T]):
    """Buffers that the layers of one process use in turn, one set for each key.

    ``acquire`` makes a set at its first use, ``release`` frees it with its last user; what is
    left at exit is freed then.
    """

    def __init__(self, free: Callable[[T], None]) -> None:
        self._free = free
        self._held: dict[Hashable, _Shared[T]] = {}
        atexit.register(self.clear)

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Collective where ``make`` is. The key names the group and all sizes."""
        shared = self._held.get(key)
        if shared is None:
            shared = self._held[key] = _Shared(make())
        shared.users += 1
        return shared.value

    def release(self, key: Hashable) -> None:
        """Collective where freeing is; a key that is not held is ignored."""
        shared = self._held.get(key)
        if shared is None:
            return
        shared.users -= 1
        if not shared.users:
            del self._held[key]
            self._free(shared.value)

    def clear(self) -> None:
        while self._held:
            _, shared = self._held.popitem()
            self._free(shared.value)


def _same(
    what: str,
    said: Mapping[str, str],
    fault: str | None,
    group: dist.ProcessGroup,
    timeout: float | None = None,
    advice: str = "",
) -> None:
    """Raises GroupMismatch on every rank if they say different things, or one has a fault."""
    everyone: list[tuple[dict[str, str], str | None]] = [
        tuple(json.loads(text))
        for text in exchange(what, json.dumps([dict(said), fault]), group, timeout)
    ]
    faults = []
    for name in sorted({name for fingerprint, _ in everyone for name in fingerprint}):
        holders: dict[str, list[int]] = {}
        for rank, (fingerprint, _) in enumerate(everyone):
            holders.setdefault(fingerprint.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
            faults.append(f"ranks disagree on {name}: {values}; give all ranks the same")
    faults += [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(everyone) if fault]
    if faults:
        raise GroupMismatch("; ".join(faults) + advice)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _fingerprint(problem: MoEProblem) -> dict[str, str]:
    """What all ranks must have in common, by field name."""
    own = ("parallel", "device")
    values = {f.name: repr(getattr(problem, f.name)) for f in fields(problem) if f.name not in own}
    parallel = problem.parallel
    return values | {
        "ep_size": str(parallel.ep_size),
        "tp_size": str(parallel.tp_size),
        "dp_size": str(parallel.dp_size),
        "nodes": str(parallel.nodes),
        "device": problem.device.type,
    }


def _fault(problem: MoEProblem, group: dist.ProcessGroup) -> str | None:
    parallel = problem.parallel
    sizes = f"ep_size={parallel.ep_size} x tp_size={parallel.tp_size}"
    wanted = parallel.ep_size * parallel.tp_size
    if group.size() != wanted:
        return (
            f"the process group has {group.size()} ranks, {sizes} wants {wanted}; pass the group "
            "of exactly the ranks that share this layer, or correct the ParallelConfig"
        )
    rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
    if group.rank() != rank:
        return (
            f"is rank {group.rank()} of the process group, but ep_rank={parallel.ep_rank} and "
            f"tp_rank={parallel.tp_rank} ({sizes}) want it to be rank {rank}; set ep_rank = "
            "group rank // tp_size and tp_rank = group rank % tp_size"
        )
    device = problem.device.type
    backends = ("gloo", "mpi") if device == "cpu" else ("nccl",)
    if not has_backend(group, device, *backends):
        return (
            f"the process group's backends are {dist.get_backend_config(group)}, tensors on "
            f"{device} want {' or '.join(backends)}; initialize it with "
            f"backend='{'gloo' if device == 'cpu' else 'cpu:gloo,cuda:nccl'}'"
        )
    return None
