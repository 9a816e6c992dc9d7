"""Commands that other packages add to ``python -m moekit``.

A package declares an entry point of group ``moekit.commands``: the name is the command, the value
a function ``main(argv: Sequence[str]) -> int`` as ``"package.module:main"``. The module is imported
when the command is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moekit.discovery.entry_points import Source, entry_points
from moekit.discovery.packages import REPOSITORY
from moekit.errors import MoekitError
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import Fault, contained

GROUP = "moekit.commands"
KNOWN = {name: package for package in REPOSITORY for name in package.commands}


def installed(group: str = GROUP) -> Mapping[str, Source]:
    """Return what installed packages add to ``group``, by name, sorted."""
    found: dict[str, Source] = {}
    for source in sorted(entry_points(group), key=lambda each: (each.name, each.distribution)):
        if other := found.get(source.name):
            why = f"{other.distribution} and {source.distribution} both add it: uninstall one"
            source = Source.broken(source.name, source.distribution, source.version, why)
        found[source.name] = source
    return found


def helps() -> Mapping[str, str]:
    """Return one line for each command, installed or known; imports none of them."""
    found = {name: f"a command of {source.distribution}" for name, source in installed().items()}
    for name, package in KNOWN.items():
        found[name] = package.commands[name] if name in found else f"({_missing(name)})"
    return found


def run(name: str, argv: Sequence[str]) -> int | None:
    """Call a command and return its exit code; None if no package is known to have it.

    Raises MoekitError if its package is not installed or does not load.
    """
    if source := installed().get(name):
        return int(load(source, f"the command {name!r}")(argv))
    if name in KNOWN:
        raise MoekitError(_missing(name))
    return None


def load(source: Source, what: str) -> Callable[..., Any]:
    """Return the function that an entry point names. Raises MoekitError if it cannot be loaded, or
    is no function; ``what`` names it."""
    try:
        with contained():
            found = source.load()
            if not callable(found):
                raise TypeError(f"{shown(found)} is no function")
    except Fault as fault:
        owner = f"{source.distribution} {source.version}"
        raise MoekitError(f"{what} of {owner} cannot be loaded: {fault}") from fault
    return found


def _missing(name: str) -> str:
    return f"{name} is a command of {KNOWN[name].name}: {KNOWN[name].install}"
