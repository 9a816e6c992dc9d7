"""A pool of ranks for tests of code that uses torch.distributed.

Starting a rank costs seconds (a process that imports torch), so one pool serves many tests.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_STARTUP_SECONDS = 180.0
# Once a rank has raised, how long the others get before they count as waiting for it forever.
_GRACE_SECONDS = 5.0
# How long a hanging rank may take to write its stack.
_STACK_SECONDS = 3.0
_HOST = "127.0.0.1"


class RankError(RuntimeError):
    """Ranks raised, hung or died in `RankPool.run`. After a rank hung or died the pool is closed.

    Attributes:
        tracebacks: rank -> the formatted traceback of what it raised.
        hung: ranks that neither returned nor raised.
        died: rank -> exit code.
    """

    def __init__(
        self,
        message: str,
        tracebacks: Mapping[int, str],
        hung: Sequence[int] = (),
        died: Mapping[int, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.tracebacks = dict(tracebacks)
        self.hung = tuple(hung)
        self.died = dict(died or {})


class RankPool(AbstractContextManager["RankPool"]):
    """Processes with a common process group, kept for many calls of `run`.

    Ranks inherit the environment at the time of construction.

    Args:
        world_size: the number of processes.
        device_type: ``"cpu"``: gloo, one thread in each rank. ``"cuda"``: rank r on GPU r modulo
            their number, NCCL for CUDA tensors and gloo for CPU tensors. Ranks that share a GPU
            and use NCCL need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
        timeout: the seconds that one `run` may take; also the timeout of the process group.
    """

    def __init__(self, world_size: int, device_type: str = "cpu", timeout: float = 600.0) -> None:
        self.world_size = world_size
        self.device_type = device_type
        self.timeout = timeout
        self.failures = 0  # runs that raised
        self._why_closed: str | None = None
        self._stacks = tempfile.TemporaryDirectory(prefix="moekit-ranks-")
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        # Daemons: the interpreter ends them at exit even if nobody calls close().
        context = _start_method(device_type)
        environment = dict(os.environ)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            stack = str(Path(self._stacks.name, str(rank)))
            join = partial(_join, rank, world_size, device_type, timeout, self._store.port)
            args = theirs, stack, environment, partial(_call, rank, world_size), join
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect("the start of the process group", _STARTUP_SECONDS)

    @property
    def closed(self) -> bool:
        return self._why_closed is not None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on every rank, and return the results by rank.

        Tensors travel by value and arrive on the CPU.

        Args:
            function: defined at module level, so that ranks can import it.

        Raises:
            RankError: a rank raised, hung or died. The pool stays usable if every rank returned
                or raised.
        """
        if self._why_closed is not None:
            raise RankError(f"the pool of ranks is closed: {self._why_closed}", {})
        task = _dumps((sys.path, _dumps((function, args))))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(task)
            except OSError as error:
                self._end(f"rank {rank} is gone", patience=0.0)
                raise RankError(f"rank {rank} died since its last task", {}) from error
        return self._collect(getattr(function, "__qualname__", str(function)), self.timeout)

    def close(self, patience: float = 5.0) -> None:
        """End the processes; idempotent.

        Args:
            patience: seconds until they are killed.
        """
        if self._why_closed is None:
            for pipe in self._pipes:
                try:
                    pipe.send_bytes(b"")
                except OSError:  # that rank is gone already
                    pass
            self._end("close() was called", patience)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _collect(self, what: str, seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        tracebacks: dict[int, str] = {}
        died: dict[int, int | None] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    reply = ready.recv_bytes()
                except (EOFError, OSError):
                    self._processes[rank].join(1.0)
                    died[rank] = self._processes[rank].exitcode
                    continue
                try:
                    succeeded, value = _loads(reply)
                except Exception:  # a result of a type that only the worker can import
                    succeeded, value = False, traceback.format_exc()
                (results if succeeded else tracebacks)[rank] = value
            if tracebacks or died:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        hung = sorted(waiting.values())
        if not (tracebacks or died or hung):
            return [results[rank] for rank in range(self.world_size)]

        self.failures += 1
        raised: dict[str, list[int]] = {}
        for rank in sorted(tracebacks):
            raised.setdefault(tracebacks[rank], []).append(rank)
        faults = [f"ranks {ranks} raised:\n{text}" for text, ranks in raised.items()]
        faults += [f"rank {rank} died with exit code {died[rank]}" for rank in sorted(died)]
        faults += [
            f"rank {rank} hangs (neither returned nor raised):\n{self._stack_of(rank)}"
            for rank in hung
        ]
        message = f"{what} failed on ranks {sorted((*tracebacks, *died, *hung))}"
        if hung or died:
            message += "; the pool is now closed"
            self._end(f"{what} left ranks {sorted((*died, *hung))} hanging or dead", patience=0.0)
        raise RankError("\n".join([message, *faults]), tracebacks, hung, died)

    def _stack_of(self, rank: int) -> str:
        """Return the stack of a hanging rank, which it writes on a signal."""
        file, process = Path(self._stacks.name, str(rank)), self._processes[rank]
        if not file.exists() or process.pid is None:
            return "(no stack: not started yet)"
        os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while not (stack := file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)  # it may still write
        return file.read_text() if stack else "(no stack: it does not answer signals)"

    def _end(self, why: str, patience: float) -> None:
        self._why_closed = why
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        del self._store
        self._stacks.cleanup()


def wait_until_connected() -> None:
    """Return when every rank has the default group, so that this one may leave it.

    gloo may finish on one rank while another one still connects to it. If the first then leaves,
    ``init_process_group`` of the other fails with "connection closed by peer".
    """
    store = dist.distributed_c10d._get_default_store()
    _meet(store, "connected", dist.get_rank(), dist.get_world_size())


def _meet(store: Store, where: str, rank: int, world_size: int) -> None:
    """Return when all ranks have called this with ``where``."""
    store.set(f"{where}/{rank}", "1")
    everyone = [f"{where}/{other}" for other in range(world_size)]
    store.wait(everyone, timedelta(seconds=_STARTUP_SECONDS))


def _start_method(device_type: str) -> SpawnContext | ForkServerContext:
    """Return how ranks start.

    CPU ranks are forks of a server that has imported torch, which takes most of the time of a
    start. Ranks on GPUs are new processes, because what a vendor's library opens when it is
    imported may not survive a fork.
    """
    if device_type != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo"])
    return context


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _work(
    pipe: Connection,
    stack_file: str,
    environment: Mapping[str, str],
    call: Callable[[bytes], Any],
    join: Callable[[], None],
) -> None:
    """Join the group, then call the tasks that come through ``pipe`` until it is closed."""
    os.environ.clear()  # a fork has the server's
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stack_file, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        started = _attempt(pipe, join)
        while started:
            try:
                task = pipe.recv_bytes()
            except EOFError:  # the parent is gone
                break
            if not task:
                break
            _attempt(pipe, partial(call, task))
        if dist.is_initialized():
            dist.destroy_process_group()


def _call(rank: int, world_size: int, task: bytes) -> Any:
    # The parent's path may have grown since the start (pytest adds test folders).
    sys.path[:], inner = _loads(task)
    function, args = _loads(inner)
    gc.freeze()  # collections then skip the modules, which take 0.2 s each time
    try:
        return function(rank, world_size, *args)
    finally:
        gc.unfreeze()


def _attempt(pipe: Connection, call: Callable[[], Any]) -> bool:
    """Send what ``call`` returns, or the traceback of what it raises."""
    try:
        reply = _dumps((True, call()))
    except BaseException:  # including a pytest skip, which is no Exception
        pipe.send_bytes(_dumps((False, traceback.format_exc())))
        return False
    pipe.send_bytes(reply)
    return True


def _join(rank: int, world_size: int, device_type: str, timeout: float, port: int) -> None:
    device = None
    backend = "gloo"
    if device_type == "cpu":
        torch.set_num_threads(1)
    else:
        backend = "cpu:gloo,cuda:nccl"
        count = torch.cuda.device_count()
        if not count:
            raise RuntimeError("device_type='cuda', but torch sees no GPU here; use 'cpu'")
        torch.cuda.set_device(rank % count)
        if world_size <= count:  # else NCCL must not connect before its first use
            device = torch.device("cuda", rank)
    # Otherwise gloo looks up the host's name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = TCPStore(_HOST, port, is_master=False)
    # Ranks start at different speeds. They meet before the group's timeout, which may be short.
    _meet(store, "started", rank, world_size)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
