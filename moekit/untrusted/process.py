"""Run a function in a separate process, which may hang, crash, print, fork or exhaust memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from moekit.untrusted.code import describe, printable

Report = Callable[..., None]  # report("finding", "acme", "ok") sends one answer

_END, _RAISED = "end", "raised"
_MOST_WRITTEN = 1 << 28  # bytes of a file


def run(function: Callable[[Report], None], seconds: float) -> tuple[list[list[str]], str]:
    """Call ``function(report)`` in a fork of this process.

    The fork is killed after ``seconds``, with the processes of its session. It may hold half of
    the machine's memory. Its output is discarded, except that a fault quotes its end. Call it
    before this process initializes CUDA, which a fork could not use afterwards.

    Returns:
        The answers, and the fault: empty if the function returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, printed = Path(folder, "answers"), Path(folder, "printed")
        answers.touch()
        fork = get_context("fork").Process(target=_child, args=(function, answers, printed))
        fork.start()
        fork.join(seconds)
        ended = fork.exitcode
        assert fork.pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(fork.pid, signal.SIGKILL)
        fork.kill()
        fork.join()
        found = list(_answers(answers))
        last = found.pop() if found else []
        if last[:1] == [_END]:
            return found, ""
        if last[:1] == [_RAISED]:
            return found, last[-1]
        fault = f"it did not end within {seconds:g} s" if ended is None else _ending(ended)
        return [*found, *filter(None, [last])], fault + _last_line(printed)


def _child(function: Callable[[Report], None], answers: Path, printed: Path) -> None:
    """Run the function in the fork, and exit without running the parent's exit handlers."""
    me, told = os.getpid(), answers.open("a")

    def report(*answer: str) -> None:
        if os.getpid() != me:  # the function forked a copy of this process
            os._exit(0)
        print(json.dumps([printable(each) for each in answer]), file=told, flush=True)

    try:
        os.setsid()
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(caught, signal.SIG_DFL)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
            (resource.RLIMIT_DATA, memory // 2),
        ):
            resource.setrlimit(limit, (most, most))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)
        for number in (1, 2):
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout = sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
        function(report)
        report(_END)
    except BaseException as error:
        report(_RAISED, describe(error))
    finally:
        os._exit(0)


def _answers(file: Path) -> Iterator[list[str]]:
    """Yield the answers in whole lines; the process may have been killed while it wrote one."""
    for line in file.read_text(errors="replace").split("\n")[:-1]:
        with suppress(ValueError):
            yield json.loads(line)


def _ending(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code} before it had answered"
    more = " (it may have taken too much memory)" if code == -signal.SIGKILL else ""
    name = next((each.name for each in signal.Signals if each == -code), -code)
    return f"signal {name} ended it{more}"


def _last_line(file: Path) -> str:
    """Return the end of what was printed, in words, or ""."""
    with suppress(OSError), file.open("rb") as printed:
        printed.seek(max(0, file.stat().st_size - 4096))
        text = printed.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        return f"; it printed last: {printable(text, 200)}" if text else ""
    return ""
