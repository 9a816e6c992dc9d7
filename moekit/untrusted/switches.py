"""Environment variables: switches, and where the user's folders are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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


def home_folder() -> Path:
    """Return the user's home; where there is none, a folder that this user cannot make.

    Containers run processes as users without a name, whose home nobody states.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder where the user's caches are. A relative XDG_CACHE_HOME is ignored.

    The XDG specification calls it invalid: a cache would be in every working directory.
    """
    environ = os.environ if environ is None else environ
    stated = Path(environ.get("XDG_CACHE_HOME", ""))
    return stated if stated.is_absolute() else home_folder() / ".cache"
