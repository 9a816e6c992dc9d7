"""``python -m moekit doctor``: is this machine fit for what is installed, and if not, why not?

Unlike `plugins` and `explain`, the doctor tries things: it computes on every device, and loads
every backend that could serve one. It leaves nothing behind.
Code of plugins runs in separate processes, so that a plugin that hangs, crashes or exits is a
finding like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

import moekit
from moekit.cli.doctor import backends, system
from moekit.cli.plugins import wrap
from moekit.untrusted.code import describe, printable

_NAME = 30  # columns


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    state: ok; no: not here or not for this machine, which is no fault; bad: a fault.
    """

    group: str
    name: str
    state: str
    text: str


def run(out: TextIO, *, as_json: bool = False, seconds: float = 120.0) -> int:
    """Print the findings to ``out``; return 1 if there is a fault, else 0.

    seconds: how long a plugin may take.
    """
    found: list[Finding] = []
    for finding in examine(seconds):
        if not as_json:  # at once: a library may take the process down
            if not found or found[-1].group != finding.group:
                print(f"{finding.group}:", file=out)
            line = f"  {finding.state:<3} {finding.name:<{_NAME}} {finding.text}".rstrip()
            print(wrap(line, _NAME + 7), file=out, flush=True)
        found.append(finding)
    faults = [finding for finding in found if finding.state == "bad"]
    if as_json:
        listed = [asdict(finding) for finding in found]
        print(json.dumps({"moekit": moekit.__version__, "findings": listed}, indent=2), file=out)
    else:
        print(f"{len(faults)} faults" if len(faults) != 1 else "1 fault", file=out)
    return int(bool(faults))


def examine(seconds: float) -> Iterator[Finding]:
    """Yield the findings of every group.

    Plugins come before devices, as a process that has initialized CUDA cannot be forked.
    """
    for group, look in (
        ("versions", system.versions),
        ("backends", lambda: backends.examine(os.environ, seconds)),
        ("devices", system.devices),
    ):
        try:
            for name, state, text in look():
                yield Finding(group, name, state, printable(text))
        except Exception as error:  # the other groups may say why
            yield Finding(group, "looking", "bad", describe(error))
