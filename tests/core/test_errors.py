"""Callers can catch errors by their kind: ValueError is for wrong arguments only."""

from __future__ import annotations

import pytest

from moekit import errors

ARGUMENTS = {
    "InvalidProblem", "InvalidInput", "CapacityExceeded", "WeightsError", "UnknownBackend",
    "NameClash", "Unsupported", "GroupMismatch",
}  # fmt: skip
CIRCUMSTANCES = {"BackendBroken", "NoBackend", "PeerFailed"}
BASES = {"MoekitError", "BackendError"}


def test_every_error_is_sorted() -> None:
    defined = {
        n
        for n, e in vars(errors).items()
        if isinstance(e, type) and e.__module__ == errors.__name__
    }
    assert defined == ARGUMENTS | CIRCUMSTANCES | BASES


@pytest.mark.parametrize("name", sorted(ARGUMENTS | CIRCUMSTANCES | BASES))
def test_only_wrong_arguments_are_value_errors(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.MoekitError)
    assert issubclass(error, ValueError) == (name in ARGUMENTS)
    assert issubclass(error, RuntimeError) == (name in CIRCUMSTANCES)
