"""Match regular expressions of quantization configs in bounded time.

Python's `re` has no time limit, so a hostile expression could occupy it forever. Here an
expression is compiled to a small program, and `matches` follows all alternatives at once: it
visits each (instruction, position) at most once, whatever the expression is. Expressions and work
are bounded. References to groups, lookbehind and flags are not supported and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from moekit.untrusted.files import shown

_MAX_PATTERN = 1000
_MAX_PROGRAM = 20_000
_MAX_DEPTH = 50
MAX_STEPS = 1_000_000

# (instruction, argument). "char" tests one character; "split" continues at several instructions,
# relative to this one, and "jump" at one; "look" has (program, whether it must match); "at" tests
# the position.
_Program = list[tuple[str, Any]]
_CLASSES: dict[str, Callable[[str], Any]] = {
    kind: re.compile(f"\\{kind}").fullmatch for kind in "dDwWsS"
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")


def matches(pattern: str, subject: str, steps: list[int]) -> bool:
    """Return ``bool(re.match(pattern, subject))``.

    Args:
        steps: A list of one number: the steps that are left. This call subtracts its own.

    Raises:
        ValueError: The pattern is not supported, or takes more steps than are left.
    """
    program = _Parser(pattern).program()
    steps[0] -= len(program)
    return _run(program, subject, 0, steps)


def _run(program: _Program, subject: str, start: int, steps: list[int]) -> bool:
    todo, seen = [(0, start)], set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        steps[0] -= 1
        if steps[0] < 0:
            raise ValueError("it takes too many steps to match")
        at, position = state
        if at == len(program):
            return True
        what, argument = program[at]
        if what == "split":
            todo += [(at + step, position) for step in argument]
        elif what == "jump":
            todo.append((at + argument, position))
        elif what == "char":
            if position < len(subject) and argument(subject[position]):
                todo.append((at + 1, position + 1))
        elif what == "at":
            if argument(subject, position):
                todo.append((at + 1, position))
        elif _run(argument[0], subject, position, steps) == argument[1]:
            todo.append((at + 1, position))
    return False


class _Parser:
    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"it must have at most {_MAX_PATTERN} characters (got {len(pattern)})")
        self.text, self.at, self.depth = pattern, 0, 0

    def program(self) -> _Program:
        made = self._alternatives()
        if self.at < len(self.text):
            raise self._unknown()
        return made

    def _alternatives(self) -> _Program:
        made = self._sequence()
        while self._take("|"):
            other = self._sequence()
            made = [("split", (1, len(made) + 2)), *made, ("jump", len(other) + 1), *other]
        return made

    def _sequence(self) -> _Program:
        made: _Program = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            made += self._repeated(self._atom())
            if len(made) > _MAX_PROGRAM:
                raise ValueError("its repetitions are too many")
        return made

    def _repeated(self, atom: _Program) -> _Program:
        if self._take("*"):
            least, most = 0, None
        elif self._take("+"):
            least, most = 1, None
        elif self._take("?"):
            least, most = 0, 1
        elif (count := _COUNT.match(self.text, self.at)) and (count[1] or count[3]):
            self.at = count.end()
            least = int(count[1] or 0)
            most = least if not count[2] else int(count[3]) if count[3] else None
        else:
            return atom
        self._take("?")  # laziness does not change whether it matches
        if self._peek("*+?") or _COUNT.match(self.text, self.at):
            raise self._unknown()
        copies = max(least, most or 0) + 1
        if copies * (len(atom) + 2) > _MAX_PROGRAM or (most is not None and most < least):
            raise ValueError("its repetitions are too many")
        made = atom * least
        if most is None:
            return [*made, ("split", (1, len(atom) + 2)), *atom, ("jump", -len(atom) - 1)]
        return made + [("split", (1, len(atom) + 1)), *atom] * (most - least)

    def _atom(self) -> _Program:
        char = self.text[self.at]
        if char == "(":
            return self._group()
        self.at += 1
        if char == "[":
            return [("char", self._set())]
        if char == ".":
            return [("char", lambda c: c != "\n")]
        if char == "^":
            return [("at", lambda subject, position: position == 0)]
        if char == "$":
            return [("at", lambda s, p: p == len(s) or (p == len(s) - 1 and s[p] == "\n"))]
        if char == "\\":
            return [self._escape()]
        if char in "*+?":
            self.at -= 1
            raise self._unknown()
        return [("char", char.__eq__)]

    def _group(self) -> _Program:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError("its groups are nested too deeply")
        opened = re.compile(r"\((\?(:|=|!|P<\w+>))?(?!\?)").match(self.text, self.at)
        if not opened:
            raise self._unknown()
        self.at = opened.end()
        made = self._alternatives()
        if not self._take(")"):
            raise self._unknown()
        self.depth -= 1
        return [("look", (made, opened[2] == "="))] if opened[2] in ("=", "!") else made

    def _escape(self) -> tuple[str, Any]:
        char = self._next()
        if char in _CLASSES:
            return ("char", _CLASSES[char])
        if char in "AZ":
            return ("at", lambda s, p: p == (0 if char == "A" else len(s)))
        if char in "bB":
            return ("at", lambda s, p: _at_word_end(s, p) == (char == "b"))
        return ("char", self._literal(char).__eq__)

    def _literal(self, escaped: str) -> str:
        if escaped.isalnum() and escaped not in _ESCAPES:
            self.at -= 2
            raise self._unknown()
        return _ESCAPES.get(escaped, escaped)

    def _set(self) -> Callable[[str], Any]:
        tests: list[Callable[[str], Any]] = []
        negated, first = self._take("^"), True
        while first or not self._peek("]"):
            first = False
            low = self._member()
            if not isinstance(low, str):
                tests.append(low)
            elif self._peek("-") and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member()
                if not isinstance(high, str) or high < low:
                    raise self._unknown()
                tests.append(_between(low, high))
            else:
                tests.append(low.__eq__)
        self.at += 1
        return lambda c: any(test(c) for test in tests) != negated

    def _member(self) -> str | Callable[[str], Any]:
        if (char := self._next()) != "\\":
            return char
        char = self._next()
        return _CLASSES[char] if char in _CLASSES else self._literal(char)

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise self._unknown()
        self.at += 1
        return self.text[self.at - 1]

    def _peek(self, chars: str) -> bool:
        return self.text[self.at : self.at + 1] in tuple(chars)

    def _take(self, char: str) -> bool:
        self.at += (taken := self._peek(char))
        return taken

    def _unknown(self) -> ValueError:
        return ValueError(f"{shown(self.text[self.at :])} is not supported there")


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda char: low <= char <= high


def _at_word_end(subject: str, position: int) -> bool:
    around = subject[max(position - 1, 0) : position], subject[position : position + 1]
    before, after = (bool(c and _CLASSES["w"](c)) for c in around)
    return before != after
