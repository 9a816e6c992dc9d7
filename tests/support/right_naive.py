"""`naive` as the right control of mutants that move tokens."""

from __future__ import annotations

from typing import Any

import pytest
from conformance_catches import suite
from moekit_naive.dispatcher import NaiveDispatcher


class Naive_(NaiveDispatcher):
    """The right control where tokens move."""


_right: set[tuple[Any, ...]] = set()


def caught_naive(wrong: type, test: str, *args: Any, says: str, **declared: Any) -> None:
    """`caught` for mutants of `naive`; a kit test runs once for the right control."""
    if (test, *args) not in _right:
        getattr(suite(Naive_, "naive"), test)(*args)
        _right.add((test, *args))
    with pytest.raises(Exception, match=says):
        getattr(suite(wrong, "naive", **declared), test)(*args)
