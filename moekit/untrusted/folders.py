"""Where the user's folders are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
