"""Where the user's folders are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder where the user's caches are. A relative XDG_CACHE_HOME is ignored.

    The XDG specification calls it invalid: a cache would be in every working directory.
    """
    environ = os.environ if environ is None else environ
    stated = Path(environ.get("XDG_CACHE_HOME", ""))
    if stated.is_absolute():
        return stated
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user has no name: return a folder that nobody can make
        return Path("/nonexistent/.cache")
