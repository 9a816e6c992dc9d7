"""Run a function in a separate process, which may hang, crash, print, fork or exhaust memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from moekit.untrusted.code import describe, printable

Answer = list[str]
Report = Callable[..., None]  # report("finding", "acme", "ok") sends one answer

_END, _RAISED = "end", "raised"
_MOST_ANSWERED = 1 << 20
_TAIL = 4096
_POLL = 0.05  # seconds


@dataclass
class Outcome:
    """The answers of the process, and its fault: empty if the function returned."""

    answers: list[Answer] = field(default_factory=list)
    fault: str = ""


def run(
    function: Callable[[Report], None], seconds: float, most_bytes: int | None = None
) -> Outcome:
    """Call ``function(report)`` in a fork of this process.

    The fork and its own forks are killed after ``seconds``, when they hold more than ``most_bytes``
    of memory (default: half of the available memory), and when the function returns. Their output
    is discarded, except that a fault quotes its end. Call it before this process initializes CUDA,
    which a fork could not use afterwards.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    answers, reported = os.pipe()
    output, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        for unused in (answers, output):
            os.close(unused)
        _child(function, reported, printed)
    for unused in (reported, printed):
        os.close(unused)
    try:
        return _watch(pid, answers, output, seconds, most_bytes or _half_of_memory())
    finally:
        _kill(pid)
        os.close(answers)
        os.close(output)


def _child(function: Callable[[Report], None], answers: int, printed: int) -> NoReturn:
    """Run the function in the fork, and exit without running the parent's exit handlers."""
    me = os.getpid()

    def report(*answer: str) -> None:
        if os.getpid() != me:  # the function forked a copy of this process
            os._exit(0)
        line = json.dumps([printable(each) for each in answer]).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]

    try:
        os.setsid()
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(caught, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # if memory runs out, the kernel kills this process first
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(printed, number)
        sys.stdout = sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
        function(report)
        report(_END)
    except BaseException as error:
        report(_RAISED, describe(error))
    finally:
        os._exit(0)


def _watch(pid: int, answers: int, output: int, seconds: float, most_bytes: int) -> Outcome:
    received, tail = bytearray(), b""
    status: int | None = None
    deadline, next_look = time.monotonic() + seconds, 0.0
    fault = ""
    pipes = [answers, output]
    for pipe in pipes:
        os.set_blocking(pipe, False)
    while True:
        ended = status is not None  # read before the last reading of the pipes, or answers are lost
        ready, _, _ = select.select(pipes, [], [], 0 if ended else _POLL)
        for pipe in ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                pipes.remove(pipe)
            elif pipe == answers:
                received += chunk
            else:
                tail = (tail + chunk)[-_TAIL:]
        if ended and (answers not in ready or answers not in pipes):
            break
        now = time.monotonic()
        if len(received) > _MOST_ANSWERED:
            fault = "it answered more than 1 MiB"
        elif not ended and now > deadline:
            fault = f"it did not end within {seconds:g} s"
        elif not ended and now > next_look:
            next_look = now + 2 * _POLL
            if (held := _memory_of(pid)) > most_bytes:
                fault = f"it took {held / 2**30:.1f} GiB of memory"
        if fault:
            break
        if not ended:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
    outcome = Outcome(list(_answers(bytes(received))))
    last = outcome.answers.pop() if outcome.answers else []
    if last[:1] == [_RAISED] and len(last) == 2:
        outcome.fault = last[1]
    elif last[:1] != [_END]:
        outcome.answers += [last] if last else []
        outcome.fault = fault or _ended(status or 0)
        text = tail.decode(errors="replace").strip().rpartition("\n")[2].strip()
        outcome.fault += f"; it printed last: {printable(text, 200)}" if text else ""
    return outcome


def _answers(received: bytes) -> Iterator[Answer]:
    """Yield the answers in whole lines that `report` can have written."""
    for line in received.split(b"\n")[:-1]:
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, list) and answer and all(isinstance(t, str) for t in answer):
                yield [printable(each) for each in answer]


def _ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"it exited with code {os.waitstatus_to_exitcode(status)} before it had answered"
    number = os.WTERMSIG(status)
    with suppress(ValueError):
        more = " (it may have taken too much memory)" if number == signal.SIGKILL else ""
        return f"signal {signal.Signals(number).name} ended it{more}"
    return f"signal {number} ended it"


def _kill(pid: int) -> None:
    """Kill the process and those that it started, and wait briefly for its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for _ in range(100):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:  # it was waited for
            return
        time.sleep(_POLL)


def _half_of_memory() -> int:
    """Return half of the available memory in bytes; without /proc, no limit."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024 // 2
    return 1 << 62


def _memory_of(session: int) -> int:
    """Return the bytes that the processes of a session hold, or 0 if unknown."""
    pages = 0
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, ValueError, IndexError):  # the process may have ended
                facts = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                pages += int(facts[21]) if int(facts[3]) == session else 0
    return pages * resource.getpagesize()
