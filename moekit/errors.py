"""moekit's errors. Every one names the value at fault, what was wanted, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MoekitError(ValueError):
    """Base class of every error a user of moekit can meet."""


class InvalidProblem(MoekitError):
    """A problem description that contradicts itself (``top_k`` above ``num_experts``, say)."""


class InvalidInput(MoekitError):
    """A tensor of a call has the wrong shape, dtype, device or values."""


class CapacityExceeded(InvalidInput):
    """More tokens than the dispatcher's buffers were sized for."""


class WeightsError(MoekitError):
    """Expert weights that are missing, misshapen, unreadable, or packed for another backend."""


class BackendError(MoekitError):
    """Base class of errors about which backend can be used."""


class UnknownBackend(BackendError):
    """No installed plugin offers a backend of that name."""


class NameClash(BackendError):
    """Two distributions offer the same name, so the name alone does not say which is meant."""


class BackendBroken(BackendError):
    """A plugin or backend is installed but fails to load; the original error is its cause."""


class Unsupported(BackendError):
    """A backend asked for by name cannot do the problem.

    ``reasons`` holds every reason, not just the first.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class NoBackend(BackendError):
    """No installed pair of backends can do the problem.

    ``reasons`` maps each candidate's name to all of its reasons.
    """

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.reasons = {name: tuple(why) for name, why in reasons.items()}


class GroupMismatch(MoekitError):
    """The process group does not match the problem's ParallelConfig, or ranks disagree."""


class PeerFailed(MoekitError, RuntimeError):
    """Another rank of the group reported an error in this call, so this rank's call ends too."""
