"""Show that the conformance kit rejects deliberately wrong backends (mutants).

A mutant is a class or a function with the decorator `killed_by`. A named test of the kit must fail
for it, and pass for the right class that it derives from. docs/kit_mutants*.md list the mutants.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
from right_experts import Plain, Skips, Values
from right_fused import acme_moe
from right_naive import Naive

from moekit import Registry, registry
from moekit.plugin import FusedKernel, TrainableDispatcher, TrainableExperts
from moekit.testing import (
    AdapterConformance,
    DispatcherConformance,
    DispatcherGradientConformance,
    ExpertsConformance,
    FusedConformance,
    FusedRanksConformance,
    GradientConformance,
    diagnose,
)


def suite(wrong: type, base: str, **declared: Any) -> Any:
    """Return the kit's tests for class ``wrong``, with the spec of ``base`` and ``declared``."""
    if issubclass(wrong, FusedKernel):
        kit, origin = FUSED[base], acme_moe.moekit_fused()[0]
    else:
        kit, origin = _kit(wrong, base)
    trains = issubclass(wrong, (TrainableExperts, TrainableDispatcher))
    adapts = getattr(wrong, "ADAPTS", False)
    kit = AdapterConformance if adapts else kit
    target = f"{wrong.__module__}:{wrong.__qualname__}"
    named = {"training" if trains else "target": target}
    if adapts:
        named = {"adapters": target, "adapters_training": target}
    spec = replace(origin, name="suspect", **named, **declared)
    backends = Registry(plugins=registry().plugins)
    backends.register(spec)
    body = {"backend": "suspect", "backends": backends, "device": "cpu", "__module__": __name__}
    return type(f"Test{wrong.__name__}", (kit,), body)()


# The kit for a base of fused kernels.
FUSED = {"on one rank": FusedConformance, "on ranks": FusedRanksConformance}


def _kit(wrong: type, base: str) -> tuple[Any, Any]:
    """Return the kit for a dispatcher or for experts, and the spec of ``base``."""
    experts = base in registry().experts
    trains = issubclass(wrong, (TrainableExperts, TrainableDispatcher))
    kits = GradientConformance, DispatcherGradientConformance
    kit = (kits if trains else (ExpertsConformance, DispatcherConformance))[not experts]
    return kit, registry().expert(base) if experts else registry().dispatcher(base)


def _declared(right: Any) -> dict[str, Any]:
    return getattr(right, "DECLARED", {})


@cache
def _passes(right: Any, test: str, args: tuple[Any, ...]) -> None:
    """Assert that ``test`` passes for the right class, once in a process."""
    try:
        getattr(suite(right, right.BASE, **_declared(right)), test)(*args)
    except pytest.skip.Exception as skipped:
        raise AssertionError(f"{test} skips {right.__name__}: {skipped}") from None


@dataclass(frozen=True)
class Mutant:
    """A wrong class, the kit test that must kill it, and what the failure must say.

    Attributes:
        declared: changes of the right class's spec that are part of the mistake. The right class
            has the spec of its `BASE`, changed by its `DECLARED`.
    """

    wrong: type
    test: str
    args: tuple[Any, ...]
    says: str
    declared: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join((self.wrong.__name__, self.kit_test))

    @property
    def kit_test(self) -> str:
        arguments = f"[{'-'.join(map(str, self.args))}]" if self.args else ""
        return f"{self.test}{arguments}"

    @property
    def right(self) -> type:
        return next(c for c in self.wrong.__mro__ if "BASE" in vars(c))

    def check_right(self) -> None:
        _passes(self.right, self.test, self.args)

    def check(self, capfd: object = None) -> None:
        """Assert that the kit's test passes for the right class and fails for this one."""
        args = (capfd,) if self.test == "test_prints_nothing" else self.args
        _passes(self.right, self.test, args)
        kit = suite(self.wrong, self.right.BASE, **{**_declared(self.right), **self.declared})
        # Naming the mistake takes most of a failure's time.
        with (
            mock.patch.object(diagnose, "diagnose", lambda *_: ""),
            pytest.raises(Exception, match=self.says),  # a skip is no Exception
        ):
            getattr(kit, self.test)(*args)


# The arguments of a mutant that is a function -> the method it overrides, if no keyword names it.
_OVERRIDES = {
    "weights": (Plain, "given"),
    "packed": (Plain, "stored"),
    "tokens": (Plain, "taken"),
    "y, tokens, weights": (Plain, "done"),
    "x, scale": (Plain, "quantized"),
    "ids, tokens": (Skips, "kept"),
    "x": (Values, "x"),
    "router": (Values, "router"),
    "x_TH": (Naive, "sent"),
    "routing": (Naive, "routed"),
    "handed": (Naive, "handed"),
}


def killed_by(
    test: str, *args: Any, says: str = "relative error too large", **declared: Any
) -> Callable[[Any], type]:
    """Make a class or a function a mutant that ``test`` of the kit, called with args, must kill.

    The class, or the one it derives from, has ``BASE``, the name of the backend whose spec it has.
    A function becomes a class that overrides one method: of `Local_`, for ``prepare=Local_``.
    Without such a keyword its arguments choose the method.
    """
    named = [(declared.pop(n), n) for n, value in list(declared.items()) if isinstance(value, type)]

    def register(wrong: Any) -> type:
        made = wrong if isinstance(wrong, type) else _class_of(wrong, *named)
        MUTANTS.append(Mutant(made, test, args, says, declared))
        return made

    return register


def _class_of(function: Callable[..., Any], overrides: tuple[type, str] | None = None) -> type:
    arguments = ", ".join(list(inspect.signature(function).parameters)[1:])
    base, method = overrides or _OVERRIDES[arguments]
    body = {method: function, "__doc__": function.__doc__, "__module__": function.__module__}
    return type(function.__name__, (base,), body)


def wrong(name: str, mistake: str, *parts: Any, of: type | None = None, **body: Any) -> None:
    """Define a mutant of the calling module whose mistake is one expression, or an attribute.

    Args:
        parts: a function as `killed_by` takes it, unless ``of`` is given; then what kills it.
        of: the class that the mutant derives from, with ``body`` as its attributes and methods.
    """
    module = sys._getframe(1).f_globals["__name__"]
    kills = list(parts)
    made: Any
    if of is None:
        made = kills.pop(0)
        made.__name__, made.__doc__ = name, mistake
    else:
        made = type(name, (of,), {**body, "__doc__": mistake, "__module__": module})
    for kill in reversed(kills):
        made = kill(made)
    setattr(sys.modules[module], name, made)


MUTANTS: list[Mutant] = []


def mutants_of(module: str) -> list[Any]:
    """Return a module's mutants as pytest parameters."""
    return [pytest.param(m, id=str(m)) for m in MUTANTS if m.wrong.__module__ == module]
