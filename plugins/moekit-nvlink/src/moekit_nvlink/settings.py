"""Settings that users choose by environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moekit.errors import InvalidInput

PROGRAMS_VARIABLE = "MOEKIT_NVLINK_SMS"
_MOST_PROGRAMS = 1024


@dataclass(frozen=True)
class Settings:
    """programs: of a kernel that moves many tokens; each occupies one multiprocessor.

    most_multiprocessors: that a kernel for many tokens occupies. None: a dispatch has twice as many
        programs, which are half as large, and the kernel that sums over K takes all of the GPU.
    """

    programs: int = 64
    most_multiprocessors: int | None = None

    @classmethod
    def read(cls) -> Settings:
        """Return the settings of the environment. Raises InvalidInput."""
        given = os.environ.get(PROGRAMS_VARIABLE)
        programs = str(cls.programs) if given is None else given.strip()
        if not (programs.isdecimal() and 1 <= int(programs) <= _MOST_PROGRAMS):
            raise InvalidInput(
                f"{PROGRAMS_VARIABLE}={programs!r}: expected a number from 1 to {_MOST_PROGRAMS}; "
                f"set one, or unset the variable for {cls.programs}"
            )
        return cls(int(programs), None if given is None else int(programs))
