"""The base of both conformance kits.

It chooses problems and devices, skips with reasons, and refuses subclasses that override a test of
the kit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import pytest

from moekit.contract.specs import CHECK_FAILED, BackendSpec
from moekit.discovery.registry import Registry
from moekit.errors import UnknownBackend, Unsupported
from moekit.kernel import ModularKernel
from moekit.problem import DTYPES, DeviceSpec, MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.quant import SCHEMES
from moekit.runtime.workspace import Workspace
from moekit.selection.select import compose
from moekit.testing import cases
from moekit.testing.calls import kit_registry, unchanged_process

# Attributes that a subclass may set. It may redefine nothing else of the kit.
KNOBS = frozenset({"backend", "device", "backends", "world_sizes"})

# The value of a parameter of which the spec declares none: `test_undeclared` says so for all.
_UNDECLARED = "undeclared"
# Tests that need neither the backend's library nor its device.
WITHOUT_DEVICE = frozenset({
    "test_backend_runs_here",
    "test_class_fits_the_spec",
    "test_declared_is_reachable",
    "test_schemes_are_known",
    "test_undeclared",
    "test_undeclared_raises",
    "test_unsupported_answers_for_any_device",
})  # fmt: skip

# A spec's reason that names missing dependencies.
_MISSING = re.compile(r"[\w.]+(, [\w.]+)*( and [\w.]+)? (is|are) not installed")
# Devices on which a declared capability may be reachable.
_DEVICES = ("cpu", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "xpu")

Sizes = Mapping[str, int]

Test = TypeVar("Test", bound=Callable[..., None])


def sizes_of(num_experts: int, top_k: int, hidden: int, intermediate: int) -> Sizes:
    """Return these sizes as arguments of `MoEProblem`."""
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }


class Capability(NamedTuple):
    """Something that a spec may declare.

    Attributes:
        name: what `test_undeclared` calls it.
        changes: arguments of `MoEProblem` that need it.
        declared: whether the spec declares it. None: the spec need neither have it nor refuse it.
    """

    name: str
    changes: Mapping[str, Any]
    declared: bool | None


def over(name: str, values: Iterable[Any] | Callable[[], Iterable[Any]]) -> Callable[[Test], Test]:
    """Parametrize a test of the kit by those ``values`` that the spec declares.

    Undeclared values make no test; `test_undeclared_raises` shows that they are refused.

    Args:
        name: the parameter.
        values: or a function that returns them, which is called when tests are collected.
    """

    def mark(function: Test) -> Test:
        function.__dict__.setdefault("kit_values", {})[name] = values
        return function

    return mark


class _Collection:
    """A pytest plugin that drops tests whose value is undeclared, or whose device is missing."""

    @pytest.hookimpl(tryfirst=True)  # before pytest applies -m
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not self._dropped(item)]

    def _dropped(self, item: pytest.Item) -> bool:
        function = getattr(item, "function", None)
        if not getattr(function, "__module__", "").startswith("moekit.testing."):
            return False  # a subclass's own test
        callspec = getattr(item, "callspec", None)
        if callspec is not None and _UNDECLARED in callspec.params.values():
            return True
        test = getattr(item, "originalname", item.name)
        return test not in WITHOUT_DEVICE and bool(_cannot_run_here(getattr(item, "cls", None)))


@cache
def _cannot_run_here(kit: Any) -> str:
    return str(kit()._cannot_run_here())


class Conformance(ABC):
    """Base of the kits. A subclass names the backend; its spec decides what is tested.

    Attributes:
        backend: the backend's name in the registry.
        device: a DeviceSpec or its text. Default: this machine's accelerator if the backend runs
            there, else the CPU.
        backends: the registry that has the backend. Default: the process's.
    """

    backend: ClassVar[str] = ""
    device: ClassVar[DeviceSpec | str | None] = None
    backends: ClassVar[Registry | None] = None

    # -- no silent overrides ------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that changes more than it may."""
        super().__init_subclass__(**options)
        kit = [k for k in cls.__mro__ if k.__module__.startswith("moekit.testing.")]
        own = {n for k in kit for n in vars(k) if not n.startswith(("__", "_abc_"))} - KNOBS
        for name in sorted(own):
            owner = next(k for k in cls.__mro__ if name in vars(k))
            if owner not in kit:
                raise TypeError(
                    f"{owner.__qualname__} redefines {name}, which belongs to the conformance kit; "
                    "to leave out a test of the kit, call pytest with --deselect"
                )

    def _cannot_run_here(self) -> str:
        """Return why the spec's declared devices exclude this machine's, or ""."""
        spec, device = self._spec(), self._device()
        if any(map(device.meets, spec.devices)):
            return ""
        return f"{spec.name} runs on {' or '.join(spec.devices)}, not on {device}"

    @property
    def _interpreted(self) -> bool:
        """Return whether Triton's interpreter runs experts, one program after the other."""
        return False

    def test_backend_runs_here(self) -> None:
        """Skip with the reason; then the tests that need the device are not collected."""
        if reason := self._cannot_run_here():
            self._skip(reason)

    @pytest.fixture(autouse=True)
    def _say_the_seed(self) -> None:
        """Print how to repeat the test, which pytest shows if it fails."""
        print(f"repeat with {cases.SEED_VARIABLE}={cases.seed()}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        try:
            self._spec()
        except UnknownBackend as error:  # pytest prints this error without a traceback
            raise pytest.Collector.CollectError(f"{type(self).__name__}: {error}") from None
        if not metafunc.config.pluginmanager.has_plugin(_Collection.__name__):
            metafunc.config.pluginmanager.register(_Collection(), _Collection.__name__)
        for name, values in getattr(metafunc.function, "kit_values", {}).items():
            every = values() if callable(values) else values
            kept = [value for value in every if self._declares(name, value)]
            metafunc.parametrize(name, kept or [_UNDECLARED])

    # -- what the spec says ---------------------------------------------------------------------

    def test_class_fits_the_spec(self) -> None:
        loaded = self._class()
        assert issubclass(loaded, self._interface), f"{loaded} is no {self._interface.__name__}"
        abstract = getattr(loaded, "__abstractmethods__", ())
        assert not abstract, f"abstract: {sorted(abstract)}"

    def test_unsupported_answers_for_any_device(self) -> None:
        """Reasons are texts and the same twice, also for devices that this machine lacks."""
        spec = self._spec()
        for device in ("cpu", "sm80", "sm90", "sm100", "xpu"):
            for _, changes, declared in self._capabilities():
                wanted = {**self._main, **changes, "device": device}
                sizes = self._sizes(wanted["quant"], DeviceSpec.parse(device))[0]
                problem = MoEProblem(**{**sizes, **wanted})
                reasons = spec.unsupported(problem)
                assert not any(r.startswith(CHECK_FAILED) for r in reasons), reasons
                again = spec.unsupported(problem)
                assert reasons == again, f"asked twice, answers differ: {reasons}, {again}"
                refused = bool(reasons) or declared is not False
                assert refused, f"undeclared, but not refused: {problem!r}"
                described = "" if reasons else spec.description(problem)
                assert not described.startswith("its description failed"), described

    def test_declared_is_reachable(self) -> None:
        """`unsupported` must not refuse on all devices and sizes what the spec declares."""
        for name, changes, declared in self._capabilities():
            reasons = self._declared_but_unreachable(changes) if declared else []
            assert not reasons, f"{name} is declared, but always refused: {reasons}"

    def test_schemes_are_known(self) -> None:
        """A scheme that the spec names is moekit's, or an installed plugin's."""
        spec = self._spec()
        unknown = {*spec.schemes, *getattr(spec, "wire_schemes", ())} - {*SCHEMES}
        assert not unknown, f"no installed plugin offers the schemes {sorted(unknown)}"

    def test_undeclared_raises(self) -> None:
        """Composition raises for what `unsupported` refuses (`_find_problem` checks it)."""
        for _, changes, _ in self._capabilities():
            self._find_problem(**changes)

    def test_undeclared(self) -> None:
        """List what the kit does not test; `test_undeclared_raises` shows that it is refused."""
        undeclared = [name for name, _, declared in self._capabilities() if declared is False]
        if undeclared:
            self._skip(f"not declared, so refused: {', '.join(undeclared)}")

    # -- for the kits -------------------------------------------------------------------------

    _interface: ClassVar[type]

    @abstractmethod
    def _spec(self) -> BackendSpec: ...

    def _class(self) -> type:
        return self._spec().load()

    def _capabilities(self) -> list[Capability]:
        """Return what the spec may declare, and whether it does."""
        spec = self._spec()
        found = [
            Capability(f"dtype {n}", {"dtype": d}, n in spec.dtypes) for n, d in DTYPES.items()
        ]
        return [
            *found,
            Capability("batch_invariant", {"batch_invariant": True}, spec.batch_invariant),
        ]

    def _declares(self, name: str, value: Any) -> bool:
        """Return whether the spec declares this value of a parameter given to `over`."""
        raise NotImplementedError(name)

    @abstractmethod
    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        """Return problem sizes to try, those that find most first."""

    @abstractmethod
    def _names(self) -> dict[str, str]:
        """Return the arguments of `compose` that choose this backend."""

    def _registry(self) -> Registry:
        return self._known

    @cached_property  # a test asks about twenty times
    def _known(self) -> Registry:
        return kit_registry(self.backends)

    def _device(self) -> DeviceSpec:
        """Return `device`, else the accelerator if the backend runs there, else the CPU."""
        asked = self.device
        if asked is not None:
            return DeviceSpec.parse(asked) if isinstance(asked, str) else asked
        here = DeviceSpec.detect()
        return here if self._runs_on(here) else DeviceSpec("cpu")

    def _runs_on(self, device: DeviceSpec) -> bool:
        return any(
            not self._spec().unsupported(p)
            for sizes in self._sizes(self._main["quant"], device)
            for p in [MoEProblem(**{**self._main, **sizes, "device": device})]
        )

    @property
    def _main(self) -> dict[str, Any]:
        """The dtype, scheme and activation that the backend is mostly tested with."""
        spec = self._spec()
        activations = getattr(spec, "activations", ACTIVATIONS)
        return {
            "dtype": next(dtype for name, dtype in DTYPES.items() if name in spec.dtypes),
            "quant": next(name for name in SCHEMES if name in spec.schemes),
            "activation": "silu" if "silu" in activations else min(activations, default="silu"),
        }

    def _problem(self, *choices: Mapping[str, Any], **changes: Any) -> MoEProblem:
        """Return the first of the kit's problems with these changes that the backend does.

        If it does none of them, check that composition raises with the spec's reasons, and skip
        the test with these.

        Args:
            choices: changes of which the first that the backend does counts.
        """
        problem = self._find_problem(**(self._first(*choices, **changes) if choices else changes))
        if isinstance(problem, MoEProblem):
            return problem
        pytest.skip(problem)

    def _first(self, *choices: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Return the first of these changes of the problem that the backend does, or skip."""
        reasons: dict[str, None] = {}
        for choice in choices:
            found = self._find_problem(**{**choice, **changes})
            if isinstance(found, MoEProblem):
                return {**choice, **changes}
            reasons[found] = None
        self._skip("; ".join(reasons))

    def _find_problem(self, **changes: Any) -> MoEProblem | str:
        """Do as `_problem` does, but return the reasons instead of skipping."""
        wanted = {**self._main, "device": self._device(), **changes}
        reasons: dict[str, None] = {}
        for sizes in self._sizes(wanted["quant"], wanted["device"]):
            problem = MoEProblem(**{**sizes, **wanted})
            why = self._spec().unsupported(problem)
            if not why and (what := self._spec().padding(problem)):
                reasons[what] = None  # `test_cases` has these
                continue
            if not why:
                return problem
            if not reasons:
                self._check_refused(problem, why)
            reasons.update(dict.fromkeys(why))
        return "; ".join(reasons)

    def _check_refused(self, problem: MoEProblem, reasons: list[str]) -> None:
        """Assert that composition raises with every reason of `unsupported`."""
        try:
            self._compose(problem)
        except Unsupported as error:
            assert set(reasons) <= set(error.reasons), f"{error.reasons} lacks some of {reasons}"
            return
        raise AssertionError(f"unsupported() gives {reasons}, yet compose() made {problem!r}")

    def _compose(
        self, problem: MoEProblem, dispatcher: str | None = None, experts: str | None = None
    ) -> ModularKernel:
        """Compose a checked kernel of this backend with its own workspace."""
        names = self._names()
        with unchanged_process():
            return compose(
                problem,
                names.get("dispatcher", dispatcher),
                names.get("experts", experts),
                backends=self._registry(),
                workspace=Workspace(),
                checked=True,
            )

    def _skip(self, reason: str) -> NoReturn:
        pytest.skip(reason)

    def _needs(self, field: str) -> None:
        """Skip a test of what a field of the spec declares, if it does not."""
        if not getattr(self._spec(), field, False):
            self._skip(f"the spec does not declare {field}")

    def _declared_but_unreachable(self, changes: Mapping[str, Any]) -> list[str]:
        """Return why no device does ``changes``, or nothing if one does.

        Missing dependencies do not count: they say nothing about the declaration.
        """
        spec = self._spec()
        reasons: dict[str, None] = {}
        here = [self._device(), *(DeviceSpec.parse(d) for d in _DEVICES)]
        for device in here:
            wanted = {**self._main, "device": device, **changes}
            for sizes in self._sizes(wanted["quant"], device):
                why = spec.unsupported(MoEProblem(**{**sizes, **wanted}))
                left = [reason for reason in why if not _MISSING.match(reason)]
                if not left:
                    return []
                reasons.update(dict.fromkeys(left))
        return list(reasons)


class OfAnotherClass(Conformance):
    """A kit for a class that a spec names in the field ``_names_class``."""

    _names_class: ClassVar[str]
    _wants: ClassVar[dict[str, Any]]  # the fields of a problem that need the class

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if getattr(self._spec(), self._names_class) is None:
            raise pytest.Collector.CollectError(
                f"{type(self).__name__}: {self.backend}'s spec names no class for "
                f"{self._names_class}"
            )

    @property
    def _main(self) -> dict[str, Any]:
        return {**super()._main, **self._wants}

    def _capabilities(self) -> list[Capability]:
        """Return nothing: the kit of the main class checks the declared capabilities."""
        return []

    def _class(self) -> type:
        spec = self._spec()
        return replace(spec, target=getattr(spec, self._names_class)).load()
