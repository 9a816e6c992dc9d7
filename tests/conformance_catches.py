"""How tests show that the conformance kit rejects deliberately wrong backends.

Every mutant is a class of the test file that names it. `caught` asserts that a named test of the
kit fails for the mutant and passes for the right class that the mutant derives from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moekit import Registry, registry
from moekit.testing import DispatcherConformance, ExpertsConformance


def suite(wrong: type, base: str, **declared: Any) -> Any:
    """Return the kit's tests for class ``wrong``, declared as ``base`` is but for ``declared``."""
    experts = base in registry().experts
    kit = ExpertsConformance if experts else DispatcherConformance
    origin = registry().expert(base) if experts else registry().dispatcher(base)
    spec = replace(
        origin, name="suspect", target=f"{wrong.__module__}:{wrong.__qualname__}", **declared
    )
    backends = Registry(plugins=registry().plugins)
    backends.register(spec)
    body = {"backend": "suspect", "backends": backends, "device": "cpu", "__module__": __name__}
    return type(f"Test{wrong.__name__}", (kit,), body)()


def caught(
    wrong: type, base: str, test: str, *args: Any, says: str, right: type, **declared: Any
) -> None:
    """Assert that ``test`` of the kit fails for ``wrong`` with a message like ``says``.

    The same test must pass for ``right`` with the base's declaration.
    """
    getattr(suite(right, base), test)(*args)
    with pytest.raises(Exception, match=says):  # a skip is no Exception
        getattr(suite(wrong, base, **declared), test)(*args)
