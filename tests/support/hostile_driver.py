"""Installs each plugin of `hostile_plugins` beside two good ones, in forks with limits.

A program: it prints, as JSON, what each case does that it may not. Every fork has a limit of memory
(RLIMIT_AS) and of time; this process imports torch and moekit once for all of them.
"""

from __future__ import annotations

import contextlib
import email
import gc
import io
import json
import logging
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import filterfalse
from pathlib import Path

import pytest  # noqa: F401 (a plugin imports it: not once for each case)
import torch
from fake_plugins import PROBLEM, Fakes, assert_usable, offers, state
from hostile_plugins import CASES, DEADLY, Case

import moekit
from moekit.cli.main import main
from moekit.discovery import entry_points as discovery
from moekit.discovery import registry as plugins
from moekit.errors import MoekitError
from moekit.testing.calls import check_call, pack
from moekit.testing.cases import make_case

MORE_MEMORY = 1 << 30  # bytes of address space that a case may take beyond this process's
SECONDS = 600  # for each fork
# Time limits that doctor is given where each plugin ends by itself, and where none does.
LONG, SHORT = 500, 2


class Fork:
    """A fork that calls a function, within limits."""

    def __init__(self, *functions: Callable[[], None]) -> None:
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            try:
                limit = _address_space() + MORE_MEMORY
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                signal.alarm(SECONDS)
                for number in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
                for function in functions:
                    function()
            except BaseException:
                self.said.write(traceback.format_exc())
                self.said.flush()
            finally:
                os._exit(0)

    def faults(self) -> list[str]:
        """Return what the function raised, or what ended the fork; empty if nothing did."""
        _, status = os.waitpid(self.pid, 0)
        with self.said:
            self.said.seek(0)
            said = self.said.read() or ("" if status == 0 else f"wait status {status}")
        return [said] if said else []


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run_program(*args: str) -> tuple[int, str]:
    """`python -m moekit` in this process: exit code, and what reached file descriptor 1."""
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:  # a plugin closed them
        pass
    os.close(free)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False)
        sys.argv = ["moekit", *args]
        plugins._registry = None
        for module in [name for name in sys.modules if name.startswith("fake_") and "dist" in name]:
            del sys.modules[module]
        try:
            runpy.run_module("moekit", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        out.seek(0)
        return int(code or 0), out.read().decode()


def check_listing(case: Case) -> None:
    """`plugins --json` prints JSON with the plugin's state and reason, and the others' as ever."""
    code, text = run_program("plugins", "--json")
    states = {p["name"]: p for p in json.loads(text)["plugins"]}
    for name in ("core", "aaa", "zzz"):
        assert states[name]["state"] == "ok", states[name]
    assert all(spec["usable"] for p in ("core", "aaa") for spec in states[p]["experts"])
    if case.state is None:
        assert case.listed not in states and code == 0
        return
    found = states[case.listed]
    assert found["state"] == case.state, found
    assert code == (case.state != "ok")
    for words in case.says:
        assert words in found["reason"], f"{words!r} is not in {found['reason']!r}"
    assert len(json.dumps(found)) < 10_000


def check_use(case: Case, fakes: Fakes) -> None:
    """The good plugins compute what they should; the hostile one is refused, or passed over."""
    found = fakes.discover(**os.environ)
    for experts in ("good_a", "good_z"):
        assert_usable(found, experts)
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("moekit").addHandler(handler)
    right = make_case(PROBLEM, 5)
    if case.packs:
        with contextlib.suppress(MoekitError):
            pack(moekit.compose(PROBLEM, backends=found), right.weights)
            raise AssertionError("what pack() returned was taken")
    else:
        kernel = moekit.compose(PROBLEM, backends=found)
        check_call(kernel, right)
        passed = [text for text in records if "passing over bad" in text]
        assert len(passed) == bool(case.named), records
        if case.named or case.rejected:
            chosen = (kernel.dispatcher.spec.name, kernel.experts.spec.name)
            assert "bad" not in chosen
    if case.named or case.rejected:
        offered = state(found, "bad").backends[0].kind == "dispatcher"
        name = {"dispatcher": "bad"} if offered else {"experts": "bad"}
        try:
            pack(moekit.compose(PROBLEM, **name, backends=found), right.weights)
            raise AssertionError("'bad' was composed and packed")
        except MoekitError as error:
            said = str(error)
        for words in (case.named or case.rejected, "'bad'" if not case.rejected else ""):
            assert words in said, f"{words!r} is not in {said!r}"
        records.append(said)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        explanation = moekit.explain(PROBLEM, backends=found).text(every=True)
        plugins._registry = found
        main(["plugins"])
    if case.rejected:
        assert case.rejected in explanation
    for text in (*records, *found.faults(), explanation, out.getvalue()):
        for line in text.splitlines():
            assert line.isprintable(), f"control characters reach the reader: {line!r}"


def check_doctor(names: Sequence[str]) -> None:
    """`doctor --json` names each plugin and says what became of it, and finds no other fault.

    A right plugin may need more than the short limit on a busy machine, so its state counts where
    the limit is long.
    """
    hang = all(_hangs(name) for name in names)
    code, text = run_program("doctor", "--json", "--time-limit", str(SHORT if hang else LONG))
    findings = [f for f in json.loads(text)["findings"] if f["group"] == "backends"]
    found = {f["name"]: (f["state"], f["text"]) for f in findings}
    assert len(found) == len(findings), findings
    for name in () if hang else ("good_a", "good_z", "torch", "reference", "local"):
        assert found.get(name, ("",))[0] == "ok", f"{name}: {found}"
    faults = [f"the exit code was {code}"] * (code != 1)
    for name in names:
        state, said = found.get(name, ("missing", ""))
        if DEADLY[name][1] not in said:
            faults.append(f"{name} is {state}: {said!r}, without {DEADLY[name][1]!r}")
        if state != ("ok" if DEADLY[name][1].startswith("serves") else "bad"):
            faults.append(f"{name} is {state}: {said!r}")
    assert not faults, "\n".join(faults)


def _hangs(name: str) -> bool:
    return DEADLY[name][1] == "it did not end within"


@contextlib.contextmanager
def good_ones(keep: contextlib.ExitStack | None = None) -> Iterator[Fakes]:
    """Two good plugins, installed on sys.path; the folder stays as long as ``keep``."""
    with contextlib.ExitStack() as stack:
        root = tempfile.mkdtemp()  # a TemporaryDirectory ends with a fork's exit handlers
        (keep or stack).callback(shutil.rmtree, root)
        fakes = Fakes(Path(root))
        for name, experts in (("aaa", "good_a"), ("zzz", "good_z")):
            fakes.install(name, offers(experts, more=", priority=1"))
        sys.path.insert(0, root)
        stack.callback(sys.path.remove, root)
        yield fakes


def check_all(at_once: int = 4) -> Iterator[tuple[str, list[str]]]:
    """Cases, and what each does that it may not."""
    names = list(CASES)
    for start in range(0, len(names), at_once):
        with contextlib.ExitStack() as folders:
            forks = {}
            for name in names[start : start + at_once]:
                case = CASES[name]
                with good_ones(folders) as fakes:
                    fakes.install(
                        "bad",
                        case.source,
                        entries=case.entries,
                        metadata=case.metadata,
                        late=case.late,
                    )
                    for rival, source in case.beside.items():
                        fakes.install(rival, source)
                    checks = partial(check_use, case, fakes), partial(check_listing, case)
                    forks[name] = Fork(*checks)
            yield from ((name, fork.faults()) for name, fork in forks.items())


def check_doctors() -> Iterator[tuple[str, list[str]]]:
    """`check_doctor` for those that hang, which wait for the time limit, and for those that end."""
    with contextlib.ExitStack() as folders:
        forks = {}
        for names in filter(None, ([*filter(_hangs, DEADLY)], [*filterfalse(_hangs, DEADLY)])):
            with good_ones(folders) as fakes:
                for name in names:
                    source, _, late = DEADLY[name]
                    source = source.replace("'bad'", repr(name)).replace("_bad_", f"_{name}_")
                    fakes.install(name, source, late=late)
                forks[f"doctor: {', '.join(names)}"] = Fork(partial(check_doctor, names))
        for names, fork in forks.items():
            yield names, fork.faults()


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads, which a fork would lack
    for variable in (*discovery.SWITCHES, "MOEKIT_EXPERTS", "MOEKIT_DISPATCHER"):
        os.environ.pop(variable, None)
    real = [source.distribution for source, _ in discovery.sources({})[0][1:]]
    os.environ["MOEKIT_BLOCK"] = ",".join(real)
    assert_usable(plugins.Registry.discover(), "torch")  # imports what every case needs
    # Forks need not read the real plugins' metadata again, nor tidy torch up.
    email.message_from_string = cache(email.message_from_string)
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    names = sys.argv[1:]
    for table in (CASES, DEADLY):
        for name in [n for n in table if names and n not in names]:
            del table[name]
    gc.collect()
    gc.freeze()  # so that forks share it
    print(json.dumps(dict([*check_all(), *check_doctors()])))
