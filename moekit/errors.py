"""moekit's errors. Each says what was given, what was expected, and what to do.

Errors about arguments are ValueErrors too; errors about this machine, its plugins or other ranks
are RuntimeErrors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MoekitError(Exception):
    """Base class of every error that moekit raises for its users."""


class InvalidProblem(MoekitError, ValueError):
    """A problem contradicts itself, for example by a ``top_k`` above ``num_experts``."""


class InvalidInput(MoekitError, ValueError):
    """An argument of a call has the wrong type, shape, dtype, device or values."""


class CapacityExceeded(InvalidInput):
    """A call has more tokens than the dispatcher's buffers were sized for."""


class WeightsError(MoekitError, ValueError):
    """Expert weights are missing, misshapen, unreadable, or packed for another backend."""


class BackendError(MoekitError):
    """Base class of errors about the choice of a backend."""


class UnknownBackend(BackendError, ValueError):
    """No installed plugin offers a backend of that name."""


class NameClash(BackendError, ValueError):
    """Two distributions offer the same name, so the name does not say which one is meant."""


class BackendBroken(BackendError, RuntimeError):
    """A plugin or backend is installed but fails to load; the original error is its cause."""


class Unsupported(BackendError, ValueError):
    """A backend that was asked for by name cannot do the problem.

    ``reasons`` holds every reason, not just the first.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class NoBackend(BackendError, RuntimeError):
    """No installed combination of backends can do the problem.

    ``reasons`` maps each candidate's name to all of its reasons.
    """

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.reasons = {name: tuple(why) for name, why in reasons.items()}


class GroupMismatch(MoekitError, ValueError):
    """The process group does not match the problem's ParallelConfig, or ranks disagree."""


class PeerFailed(MoekitError, RuntimeError):
    """Another rank of the group failed or did not come, so this rank's call ends as well."""
