"""Match regular expressions of quantization configs in bounded time.

Python's `re` has no time limit, and a hostile expression could occupy it forever. So the most steps
that an expression can take are counted first. Most expressions name modules, as in
``.*experts[.]\\d+[.](gate|up)_proj$``, and take few.
"""

from __future__ import annotations

import re
from math import comb

_MAX_PATTERN = 1000
_MAX_STEPS = 50_000_000  # most take a few nanoseconds each, and none over a microsecond

# An escape or a set stands for one character.
_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_OPENED = re.compile(r"\(\?(?:[:=!]|P<\w+>)")
_REPEATED = re.compile(r"(?:[*+]|\{[^{}]*\})[?+]?")
_GROUP = re.compile(r"\(([^()]*)\)")
_CHOOSES = "\0"  # stands for a group that can match in several ways


class Matcher:
    """Matches expressions that together take a bounded number of steps."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def matches(self, pattern: str, subject: str) -> bool:
        """Return ``bool(re.match(pattern, subject))``.

        Raises:
            ValueError: The pattern is not supported, or can take more steps than earlier calls
                have left.
        """
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"it must have at most {_MAX_PATTERN} characters (got {len(pattern)})")
        self._left -= _most_steps(pattern, len(subject))
        if self._left < 0:
            raise ValueError(
                "it has so many repetitions and choices that matching could take forever"
            )
        try:
            return re.match(pattern, subject) is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not supported ({error})") from error


def _most_steps(pattern: str, length: int) -> int:
    """Return the most ways in which the parts of a pattern can share a subject.

    Each repetition ends at one of the subject's positions, in order; a choice takes one of its
    alternatives, and an optional part is there or not. Groups that choose are not repeated.
    """
    text = _OPENED.sub("(", _CHARACTER.sub("x", pattern))
    if "(?" in text:
        raise ValueError("flags, comments, conditions and lookbehind are not supported")
    text, repetitions = _REPEATED.subn("*", text)
    steps = comb(length + repetitions, repetitions) << text.count("?")
    while group := _GROUP.search(text):
        steps *= _choices(group[1])
        chooses = any(sign in group[1] for sign in ("*", "?", "|", _CHOOSES))
        text = text[: group.start()] + (_CHOOSES if chooses else "x") + text[group.end() :]
    return steps * _choices(text)


def _choices(text: str) -> int:
    if f"{_CHOOSES}*" in text:
        raise ValueError("to repeat a group that has repetitions or choices is not supported")
    return text.count("|") + 1
