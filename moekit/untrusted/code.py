"""Run foreign code, and describe its failure in one printable line.

Plugins and the libraries that they import raise anything: SystemExit, exceptions that derive from
BaseException only (pyo3's PanicException, pytest's Skipped), exceptions whose text cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONGEST = 2000


class Fault(Exception):
    """Foreign code raised an exception, which is ``__cause__``; the text describes it."""


@contextmanager
def contained() -> Iterator[None]:
    """Turn every exception of the block into a `Fault`, except the user's KeyboardInterrupt."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Fault(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return ``Type: message``, whatever the exception's own methods do."""
    kind, said = text_of(lambda: type(error).__name__), message(error)
    return f"{printable(kind, 100)}: {said}" if said else printable(kind, 100)


def message(error: BaseException) -> str:
    """Return the exception's text, whatever its own methods do."""
    return printable(text_of(lambda: str(error)))


def first_line(error: BaseException) -> str:
    """Return the first line of the exception's text, whatever its own methods do."""
    return printable(text_of(lambda: str(error)).partition("\n")[0])


def printable(text: str, most: int = _LONGEST) -> str:
    r"""Return at most ``most`` characters of ``text`` as one line that is safe for a terminal.

    Control characters, line breaks, marks that change the writing direction and lone surrogates are
    escaped: ``\x1b``, ``\n``, ``\u202e`` and ``\ud800``.
    """
    if (left := len(text) - most) > 0:
        text = f"{text[:most]}... ({left} characters more)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def text_of(make: Callable[[], str]) -> str:
    """Return what ``make`` returns, or that it raised."""
    try:
        return str.__str__(make())  # a plain str, also of a subclass
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"(no text: reading it raised {type.__dict__['__name__'].__get__(type(error))})"
