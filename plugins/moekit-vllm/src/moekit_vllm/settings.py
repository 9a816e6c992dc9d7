"""The variable MOEKIT_VLLM, and how moekit speaks in vLLM's log."""

from __future__ import annotations

import enum
import logging
import os

from moekit.errors import MoekitError

VARIABLE = "MOEKIT_VLLM"

# vLLM configures the handlers of "vllm" and of all loggers below it.
logger = logging.getLogger("vllm.moekit")


class Mode(enum.Enum):
    """The use of moekit in vLLM.

    OFF: nothing. ON: it takes the layers that it can compute, and leaves the others to vLLM.
    REQUIRE: the engine refuses to start if a layer would be left to vLLM.
    """

    OFF = "off"
    ON = "on"
    REQUIRE = "require"

    @classmethod
    def read(cls) -> Mode:
        """Return the mode that the environment asks for; the default is ON."""
        value = os.environ.get(VARIABLE, "").strip().lower() or cls.ON.value
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(mode.value for mode in cls)
            raise MoekitError(f"{VARIABLE} must be one of {known} (got {value!r})") from None

    def decline(self, what: str, reason: str) -> None:
        """Log once that vLLM keeps ``what``; raise MoekitError if the mode is REQUIRE."""
        said = f"{what} stays with vLLM: {reason}"
        if self is Mode.REQUIRE:
            raise MoekitError(
                f"moekit: {VARIABLE}=require, but {said}; set {VARIABLE}=on to let vLLM compute it"
            )
        say_once(f"moekit: {said}", logging.WARNING)


_said: set[str] = set()


def say_once(message: str, level: int = logging.INFO) -> None:
    """Log a message unless this process has logged it before."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
