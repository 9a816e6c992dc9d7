"""Environment variables that turn something on or off."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moekit.errors import InvalidInput


def switch(name: str, default: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether variable ``name`` is 1; ``default`` where it is unset or empty.

    Raises InvalidInput for any other value than 0 and 1.
    """
    environ = os.environ if environ is None else environ
    value = environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise InvalidInput(
            f"{name}={value!r}: expected 0 or 1; set one of them, or unset the variable for "
            f"{int(default)}"
        )
    return value == "1" if value else default
