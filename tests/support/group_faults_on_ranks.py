"""Functions that each rank runs in test_group_faults.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_events import GUARD, happened, wait_for

from moekit import ExpertWeights, MoEProblem, ParallelConfig, compose
from moekit.backends.reference import oracle
from moekit.contract import PrepareAndFinalize, Routing
from moekit.errors import GroupMismatch, PeerFailed
from moekit.kernel import ModularKernel
from moekit.runtime import warmup
from moekit.runtime.workspace import Workspace
from moekit.selection import select
from moekit.testing.distributed import wait_until_connected
from moekit.testing.experts_base import sizes_of

E, K, H, INNER, T = 4, 2, 32, 16, 3


class Layer:
    """A checked kernel over the ranks of ``group``, one share of the experts on each."""

    def __init__(self, group: dist.ProcessGroup, seconds: float, **options: Any) -> None:
        rank, ranks = group.rank(), group.size()
        self.rank = rank
        parallel = ParallelConfig(ep_size=ranks, ep_rank=rank, dp_size=ranks)
        self.problem = MoEProblem(
            **sizes_of(E, K, H, INNER), dtype=torch.float32, parallel=parallel, device="cpu"
        )
        self.kernel: ModularKernel = compose(
            self.problem, "naive", "torch", group=group, peer_timeout=seconds,
            workspace=Workspace(), **{"checked": True, **options},
        )  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        self.whole = ExpertWeights(
            torch.randn(E, 2 * INNER, H, generator=draw) / H**0.5,
            torch.randn(E, H, INNER, generator=draw) / INNER**0.5,
        )
        each = E // ranks
        self.packed = self.kernel.pack(self.whole.select(range(rank * each, (rank + 1) * each)))

    def call(self, seed: int = 0) -> str:
        """Return "right" or "wrong" for a call's output, or the error that it raises."""
        draw = torch.Generator().manual_seed(100 * seed + self.rank)
        x = torch.randn(T, H, generator=draw)
        ids = torch.rand(T, E, generator=draw).topk(K).indices
        routing = Routing(torch.rand(T, K, generator=draw), ids)
        try:
            out = self.kernel(x, self.packed, routing)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        want = oracle(x, self.whole, routing, self.problem.replace(parallel=ParallelConfig()))
        return "right" if torch.allclose(out, want, atol=1e-4) else "wrong"

    def timed(self) -> tuple[str, float]:
        start = time.monotonic()
        return self.call(), time.monotonic() - start

    def wait(self, seconds: float) -> None:
        """Let the next steps wait for other ranks for this long."""
        self.kernel._calls.agreement._timeout = seconds


def late(rank: int, world_size: int) -> list[tuple[str, float]]:
    """Rank 1 is stuck while the others give up twice. Then it calls, and all call again."""
    layer = Layer(dist.new_group(), GUARD)
    said = [layer.timed()]
    if rank == 1:
        wait_for("rank 0 gave up twice")
        return [*said, layer.timed(), layer.timed(), layer.timed()]
    layer.wait(1.0)
    said += [layer.timed(), layer.timed()]
    happened("rank 0 gave up twice")
    layer.wait(GUARD)
    return [*said, layer.timed(), layer.timed()]


def away_from(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 1 never comes to a default group whose store is a file. Then all make another one."""
    said = []
    for store, comes in (("first", rank != 1), ("second", True)):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{store}", rank=rank, world_size=world_size
        )
        wait_until_connected()
        try:
            said.append(Layer(dist.group.WORLD, 2.0).call() if comes else "away")
        except PeerFailed as error:
            said.append(str(error))
    return said


def interrupted(rank: int, world_size: int, where: str, kind: type[BaseException]) -> list[str]:
    """Rank 1 is interrupted in its second call; all go on to a third and a fourth."""
    layer = Layer(dist.new_group(), 20.0)
    said = [layer.call()]
    if rank == 1:
        owner, name = {
            "check": (layer.kernel, "_arrange"),
            "experts": (layer.kernel.experts, "apply"),
            "send": (layer.kernel.dispatcher, "_to_send"),
        }[where]

        def stop(*args: Any) -> Any:
            raise kind("planted")

        setattr(owner, name, stop)
        said.append(layer.call())
        delattr(owner, name)
    else:
        said.append(layer.call())
    return [*said, layer.call(1), layer.call(2)]


def interrupted_waiting(rank: int, world_size: int) -> list[tuple[str, float]]:
    """A signal interrupts rank 1 while it waits for rank 0 to start a call."""
    layer = Layer(dist.new_group(), GUARD)
    said = [layer.timed()]
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_interrupt_agreement, args=(threading.main_thread(),)).start()
    if rank == 0:
        wait_for("rank 1 was interrupted")
    said.append(layer.timed())
    if rank == 1:
        happened("rank 1 was interrupted")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return [*said, layer.timed()]


def _interrupt_agreement(waiting: threading.Thread) -> None:
    """Interrupt this process when the thread waits for other ranks."""
    while True:
        frame = sys._current_frames()[waiting.ident or 0]
        if any(f.name == "agree" for f in traceback.extract_stack(frame)):
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def one_group(rank: int, world_size: int, calls: int) -> list[str]:
    """Two threads call one kernel."""
    layer, said = Layer(dist.new_group(), 10.0), []

    def work() -> None:
        said.extend(layer.call(index) for index in range(calls))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def no_tensor(rank: int, world_size: int) -> list[str]:
    """All ranks hold the same tokens, and rank 1 passes a list for x in its first call."""
    parallel = ParallelConfig(ep_size=world_size, ep_rank=rank, dp_size=1)
    problem = MoEProblem(
        **sizes_of(E, K, H, INNER), dtype=torch.float32, parallel=parallel, device="cpu"
    )
    kernel = compose(problem, "local", "torch", group=dist.new_group(), peer_timeout=5.0)
    each = problem.num_local_experts
    packed = kernel.pack(ExpertWeights(torch.ones(each, 2 * INNER, H), torch.ones(each, H, INNER)))
    said, x = [], torch.ones(T, H)
    routing = Routing(torch.ones(T, K), torch.arange(K).repeat(T, 1))
    for given in (x.tolist() if rank == 1 else x, x):
        try:
            kernel(given, packed, routing)
            said.append("right")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def lost_in_prepare(rank: int, world_size: int, stopped: bool) -> list[str]:
    """Rank 1 stops in its second dispatch, or fails there and tells nobody; all call again."""
    layer = Layer(dist.new_group(), 20.0)
    said = [layer.call()]
    layer.kernel._calls.agreement._timeout = layer.kernel.dispatcher.peer_timeout = 1.0
    store, dispatcher = dist.distributed_c10d._get_default_store(), layer.kernel.dispatcher
    gone = f"gave up {stopped} "
    others = [f"{gone}{other}" for other in range(world_size) if other != 1]

    def lose(*args: Any) -> Any:
        if not stopped:
            raise ZeroDivisionError("planted")
        store.wait(others)
        return type(dispatcher)._to_send(dispatcher, *args)

    if rank == 1:
        name = "_to_send" if stopped else "prepare"
        setattr(dispatcher, name, lose)
        said.append(layer.call())
        delattr(dispatcher, name)
    else:
        said.append(layer.call())
        store.set(f"{gone}{rank}", "")
    return [*said, layer.call()]


def checked_differs(rank: int, world_size: int) -> tuple[str, str, int]:
    """Return the error, the next kernel's call, and how many dispatchers were destroyed."""
    group, destroy, destroyed = dist.new_group(), PrepareAndFinalize.destroy, []
    PrepareAndFinalize.destroy = lambda self: destroyed.append(self)
    try:
        Layer(group, 5.0, checked=rank == 0)
    except GroupMismatch as error:
        return str(error), Layer(group, 5.0).call(), len(destroyed)
    finally:
        PrepareAndFinalize.destroy = destroy
    return "no error", "", 0


def warmup_of_other_sizes(rank: int, world_size: int) -> tuple[list[int], str]:
    """Return the sizes of warm-up calls, and the error where ranks name other numbers of tokens.

    Rank 1's experts name one size more than rank 0's.
    """
    layer, sizes = Layer(dist.new_group(), 2.0), []
    layer.kernel.experts.largest_calls = lambda num_tokens: (num_tokens, 3)[: 1 + rank]

    def call(kernel: object, weights: object, dtype: torch.dtype, tokens: int) -> None:
        if dtype == torch.int64:  # and as many ids of int32
            sizes.append(tokens)

    with mock.patch.object(warmup, "_random_call", call):
        layer.kernel.warmup(layer.packed, 5)
        try:
            layer.kernel.warmup(layer.packed, 5 + rank)
        except PeerFailed as error:
            return sizes, str(error)
    return sizes, "no error"


def choosing_fails(rank: int, world_size: int) -> tuple[str, float]:
    """Let rank 1 raise no MoekitError while it chooses backends; return every error, and when."""

    def fail(*args: object) -> None:
        raise ZeroDivisionError("a fault of moekit")

    group, start, judge = dist.new_group(), time.monotonic(), select.judge
    select.judge = fail if rank == 1 else judge
    try:
        Layer(group, GUARD)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    finally:
        select.judge = judge
    return "no error", 0.0


def never_composes(rank: int, world_size: int, again: bool) -> tuple[str, float]:
    """Rank 1 does not compose, or composes when the others have given up."""
    group, start = dist.new_group(), time.monotonic()
    if rank == 1 and not again:
        return "away", 0.0
    if rank == 1:
        wait_for("rank 0 did not compose")
        start = time.monotonic()
    try:
        Layer(group, GUARD if rank else 1.0)
    except PeerFailed as error:
        text, seconds = str(error), time.monotonic() - start
        if again:
            happened("rank 0 did not compose")
            text += " | " + Layer(group, GUARD).call()
        return text, seconds
    return "no error", 0.0


def serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """A process whose rank 0 hosts the store, as torch makes it: calls whenever it is told to."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=GUARD), world_size, rank
    )
    layer = Layer(dist.group.WORLD, GUARD)
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        layer.wait(seconds)
        pipe.send(layer.timed())
