"""Variables of the process that a library reads while it is called."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping


class ProcessVariables:
    """A context that sets environment variables.

    Threads may be inside at once: the first one sets the variables, and the last one puts back what
    was before.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = {name: os.environ.get(name) for name in self._values}
                os.environ.update(self._values)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            for name, value in {} if self._inside else self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
