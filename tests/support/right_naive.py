"""`naive` as the right control of mutants that move tokens."""

from __future__ import annotations

from typing import Any

from conformance_catches import caught
from moekit_naive.dispatcher import NaiveDispatcher


class Naive_(NaiveDispatcher):
    """The right control where tokens move."""


def caught_naive(wrong: type, test: str, *args: Any, says: str, **declared: Any) -> None:
    """Do `caught` for a mutant of `naive`."""
    caught(wrong, "naive", test, *args, says=says, right=Naive_, **declared)
