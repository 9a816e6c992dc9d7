"""Run a function in a process of its own, which may hang, crash, print, fork or take all memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from moekit.untrusted.code import describe, printable

Answer = list[str]
Tell = Callable[..., None]  # tell("finding", "acme", "ok"): one answer

_END, _RAISED = "end", "raised"
_MOST_ANSWERED = 1 << 20
_TAIL = 4096
_POLL = 0.05  # seconds


@dataclass
class Outcome:
    """What the process told, and what became of it. fault: empty if the function returned."""

    answers: list[Answer] = field(default_factory=list)
    fault: str = ""


def run(function: Callable[[Tell], None], seconds: float, most_bytes: int | None = None) -> Outcome:
    """Call ``function(tell)`` in a fork of this process.

    The fork and what it forks are killed after ``seconds``, or when they hold more than
    ``most_bytes`` of memory (default: half of what the machine has available), and when the
    function returns. Their output goes nowhere; a fault quotes its end. Call it before this process
    initializes CUDA: a fork of one that has cannot use it.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    answers, tell = os.pipe()
    output, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        for unused in (answers, output):
            os.close(unused)
        _child(function, tell, printed)
    for unused in (tell, printed):
        os.close(unused)
    try:
        return _watch(pid, answers, output, seconds, most_bytes or _half_of_memory())
    finally:
        _kill(pid)
        os.close(answers)
        os.close(output)


def _child(function: Callable[[Tell], None], answers: int, printed: int) -> NoReturn:
    """In the fork: nothing of the parent's may run after it, not even its exit handlers."""
    me = os.getpid()

    def tell(*answer: str) -> None:
        if os.getpid() != me:  # a copy of this process, that the function forked
            os._exit(0)
        line = json.dumps([printable(each) for each in answer]).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]

    try:
        os.setsid()
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(caught, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # where memory runs out, this process goes first
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(printed, number)
        sys.stdout = sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
        function(tell)
        tell(_END)
    except BaseException as error:
        tell(_RAISED, describe(error))
    finally:
        os._exit(0)


def _watch(pid: int, answers: int, output: int, seconds: float, most_bytes: int) -> Outcome:
    told, tail = bytearray(), b""
    status: int | None = None
    deadline, next_look = time.monotonic() + seconds, 0.0
    fault = ""
    pipes = [answers, output]
    for pipe in pipes:
        os.set_blocking(pipe, False)
    while True:
        ended = status is not None  # looked at before the last reading, or answers are lost
        ready, _, _ = select.select(pipes, [], [], 0 if ended else _POLL)
        for pipe in ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                pipes.remove(pipe)
            elif pipe == answers:
                told += chunk
            else:
                tail = (tail + chunk)[-_TAIL:]
        if ended and (answers not in ready or answers not in pipes):
            break
        now = time.monotonic()
        if len(told) > _MOST_ANSWERED:
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
    outcome = Outcome(list(_answers(bytes(told))), fault)
    last = outcome.answers.pop() if outcome.answers else []
    if last[:1] == [_END]:
        outcome.fault = ""
    elif last[:1] == [_RAISED] and len(last) == 2:
        outcome.fault = last[1]
    else:
        outcome.answers += [last] if last else []
        outcome.fault = fault or _ended(status or 0)
        if lines := tail.decode(errors="replace").split("\n"):
            text = next((line.strip() for line in reversed(lines) if line.strip()), "")
            outcome.fault += f"; it printed last: {printable(text, 200)}" if text else ""
    return outcome


def _answers(told: bytes) -> Iterator[Answer]:
    """Whole lines that `tell` could have written."""
    for line in told.split(b"\n")[:-1]:
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
    """End the process and those it started, and wait a little for it."""
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
    """Bytes; without a /proc, more than there can be."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024 // 2
    return 1 << 62


def _memory_of(session: int) -> int:
    """Bytes that the processes of a session hold; 0 where nothing tells."""
    pages = 0
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                pages += _pages(name, session)
    return pages * resource.getpagesize()


def _pages(pid: str, session: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        facts: Sequence[str] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(facts[21]) if int(facts[3]) == session else 0
    return 0
