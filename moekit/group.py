"""The ranks of a layer: do they fit the problem, do they agree on a call, what do they share?

Dispatchers that move tokens build on three things: `resolve` at construction, `Agreement` around
every checked call, and `SharedBuffers` for what the layers of a model use in turn.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moekit.errors import GroupMismatch, MoekitError, PeerFailed
from moekit.problem import MoEProblem

T = TypeVar("T")


def resolve(
    problem: MoEProblem, group: dist.ProcessGroup | None, protocol: str = ""
) -> dist.ProcessGroup | None:
    """The group to exchange tokens in; None when tokens need not move.

    Collective when tokens move or a group is given. protocol: what else ranks must have in
    common, a library's version, say. Raises GroupMismatch, and then on all ranks.
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
    _agree(problem, group, protocol)
    return group if parallel.moves_tokens else None


def same_choice(chosen: str, group: dist.ProcessGroup | None, fault: str | None = None) -> None:
    """All ranks chose alike, or all raise GroupMismatch. Collective where ranks are known.

    fault: why this rank has not chosen.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # `resolve` says what is missing
    group = group or dist.group.WORLD
    assert group is not None
    said = {"dispatcher and experts": chosen} if fault is None else {}
    if faults := _differences(said, fault, group):
        raise GroupMismatch(
            f"{'; '.join(faults)} plugins, tuned tables (MOEKIT_TUNED) and variables, or name both"
        )


def has_backend(group: dist.ProcessGroup, device_type: str, *names: str) -> bool:
    """Whether ``group`` carries tensors of ``device_type`` (by one of the ``names``, if given)."""
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    backend = backends.get(device_type)
    return backend is not None and (not names or backend in names)


class Agreement:
    """Lets all ranks of a group go on together, or none.

    Messages go through the group's store, over the host: no GPU waits, no collective is left
    half-way, and a rank that says nothing is known by name.
    """

    _made: ClassVar[Counter[str]] = Counter()
    _spoilt: ClassVar[WeakKeyDictionary[dist.ProcessGroup, str]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """All ranks make a group's agreements in one order. timeout: seconds to wait for a rank."""
        self._group, self._rank, self._size = group, group.rank(), group.size()
        ranks = str(dist.get_process_group_ranks(group))
        self._made[ranks] += 1
        self._store = PrefixStore(
            f"moekit/{ranks}/{self._made[ranks]}", dist.distributed_c10d._get_default_store()
        )
        self._timeout = timedelta(seconds=timeout)
        self._step = 0
        self._old: list[str] = []

    def agree(self, what: str, fault: str | None = None, *, moving: bool = False) -> None:
        """Returns on every rank, or raises PeerFailed on every rank that brought no ``fault``.

        what: the step all ranks must be at. A rank with a fault does not wait for the others.
        moving: this rank's tokens are on their way, and never arrive where this step fails: the
        group is `spoilt` then.
        """
        keys = [f"{self._step}/{rank}" for rank in range(self._size)]
        self._step += 1
        mine = f"+{what}" if fault is None else f"-{fault}"
        self._store.set(keys[self._rank], mine)
        self._old.append(keys[self._rank])
        if fault is not None:
            return
        try:
            self._compare(self._everyones(keys, what), mine, moving)
        except PeerFailed as error:
            if moving:
                self._spoilt[self._group] = f"an earlier call was left half-way: {error}"
            raise

    @property
    def spoilt(self) -> str:
        """What left this rank's tokens on their way in the group: what is sent later would be taken
        for them. Or nothing."""
        return self._spoilt.get(self._group, "")

    def _compare(self, said: list[str], mine: str, moving: bool) -> None:
        # Who is at this step has read everything of the steps before.
        for key in self._old[:-1]:
            self._store.delete_key(key)
        del self._old[:-1]
        failed = {rank: text[1:] for rank, text in enumerate(said) if text.startswith("-")}
        if failed:
            text = "; ".join(f"rank {rank} failed: {why}" for rank, why in failed.items())
            after = "correct it there, then all can call again"
            if moving:
                after = "tokens are left on their way: start the ranks anew, or make another group"
            raise PeerFailed(f"{text}. No rank finished this call; {after}")
        other = {rank: text[1:] for rank, text in enumerate(said) if text != mine}
        if other:
            raise PeerFailed(
                f"rank {self._rank} is at '{mine[1:]}', others are not: {other}; start and run "
                "calls in one order on all ranks"
            )

    def _everyones(self, keys: list[str], what: str) -> list[str]:
        try:
            self._store.wait(keys, self._timeout)
            return [value.decode() for value in self._store.multi_get(keys)]
        except dist.DistNetworkError as error:
            raise PeerFailed(
                "the store of the process group is gone, and with it the rank that keeps it "
                "(global rank 0 under torchrun)"
            ) from error
        except dist.DistStoreError as error:
            silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise PeerFailed(
                f"rank {', '.join(silent)} did not come to '{what}' within "
                f"{self._timeout.total_seconds():g} s: it died, hangs, or makes its calls in "
                "another order"
            ) from error


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
        elif isinstance(error, Exception):  # whatever it is, no peer may wait for this rank
            reason = f"{type(error).__name__}: {error}"
            if self._agreement is not None:
                self._agreement.agree(self._what, reason)
            elif self._otherwise is not None:
                self._otherwise(reason)


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


def _agree(problem: MoEProblem, group: dist.ProcessGroup, protocol: str) -> None:
    # This rank's own fault travels too: raising before the exchange would leave the others in it.
    said = _fingerprint(problem) | {"protocol": protocol}
    if faults := _differences(said, _fault(problem, group), group):
        raise GroupMismatch("; ".join(faults))


def _differences(said: Mapping[str, str], fault: str | None, group: dist.ProcessGroup) -> list[str]:
    """In what ranks differ, and their faults; the same on every rank. Collective."""
    mine = (dict(said), fault)
    everyone: list[tuple[dict[str, str], str | None]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    faults = []
    for name in sorted({name for fingerprint, _ in everyone for name in fingerprint}):
        holders: dict[str, list[int]] = {}
        for rank, (fingerprint, _) in enumerate(everyone):
            holders.setdefault(fingerprint.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
            faults.append(f"ranks disagree on {name}: {values}; give all ranks the same")
    return faults + [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(everyone) if fault]


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
