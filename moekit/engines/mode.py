"""The variable that turns moekit on in an engine, and moekit's lines in the engine's log."""

from __future__ import annotations

import enum
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches

from moekit.errors import MoekitError
from moekit.untrusted.code import describe as reason_of


class Mode(enum.Enum):
    """The use of moekit in an engine.

    OFF: nothing. ON: it takes the layers that it can compute, and leaves the others to the engine.
    REQUIRE: the engine refuses to start if a layer would be left to it.
    """

    OFF = "off"
    ON = "on"
    REQUIRE = "require"


@dataclass(frozen=True, eq=False)
class Engine:
    """An inference engine that moekit enters.

    Attributes:
        name: The engine's name in messages.
        variable: The environment variable that holds the mode.
        log: The name of a logger below the engine's, whose handlers the engine configures.
        first, last: The oldest and the newest version that moekit's package supports.
        said: The messages that this process has logged.
    """

    name: str
    variable: str
    log: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    said: set[str] = field(default_factory=set)

    def mode(self) -> Mode:
        """Return the mode that the environment asks for; the default is ON."""
        for name in get_close_matches(self.variable, os.environ, 3, 0.9):
            if name != self.variable:
                said = f"moekit: {name} is ignored: {self.variable} may be meant"
                self.say_once(said, logging.WARNING)
        value = os.environ.get(self.variable, "").strip().lower() or Mode.ON.value
        try:
            return Mode(value)
        except ValueError:
            known = ", ".join(mode.value for mode in Mode)
            raise MoekitError(f"{self.variable} must be one of {known} (got {value!r})") from None

    def unsupported(self, version: str | None) -> list[str]:
        """Return why moekit's package does not work with a version; empty if it does."""
        first, last = (".".join(map(str, v)) for v in (self.first, self.last))
        known = f"moekit-{self.name.lower()} supports {first} to {last}"
        if version is None:
            return [f"{self.name} is not installed ({known})"]
        numbers = re.match(r"\d+(\.\d+)*", version)
        found = tuple(map(int, numbers[0].split("."))) if numbers else ()
        if not found or not self.first <= found[: len(self.first)] <= self.last:
            return [f"this is {self.name} {version}, and {known}"]
        return []

    def enter(
        self,
        mode: Mode,
        version: str | None,
        missing: Callable[[], list[str]],
        register: Callable[[], None],
    ) -> bool:
        """Call ``register`` if this version is supported and nothing is ``missing``.

        Return whether it succeeded; if not, log why, or raise MoekitError if the mode is REQUIRE.
        """
        try:
            if not (reasons := self.unsupported(version) or missing()):
                register()
                return True
            why = "; ".join(reasons)
        except (MoekitError, KeyboardInterrupt):
            raise
        except BaseException as error:  # importing an engine may raise SystemExit
            why = f"{self.name} has other modules than expected ({reason_of(error)})"
        self.decline(mode, "every MoE layer", why)
        return False

    def decline(self, mode: Mode, what: str, reason: str) -> None:
        """Log once that the engine keeps ``what``; raise MoekitError if the mode is REQUIRE."""
        said = f"{what} stays with {self.name}: {reason}"
        if mode is Mode.REQUIRE:
            raise MoekitError(
                f"moekit: {self.variable}=require, but {said}; set {self.variable}=on to let "
                f"{self.name} compute it"
            )
        self.say_once(f"moekit: {said}", logging.WARNING)

    def say_once(self, message: str, level: int = logging.INFO) -> None:
        """Log a message unless this process has logged it before."""
        if message not in self.said:
            self.said.add(message)
            logging.getLogger(self.log).log(level, message)
