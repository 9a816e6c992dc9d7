"""Backends announce themselves here: hooks, specs, and a discovery that no plugin can break.

A plugin is a package named by an entry point of group ``moekit``. Its hooks return *specs*: frozen
records that say what a backend can do and where its class is. Listing specs imports no kernel and
no vendor library; a backend's module is imported when it is first created.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from moekit.activation import ACTIVATIONS
from moekit.errors import BackendBroken, BackendError, NameClash, UnknownBackend
from moekit.problem import DEVICE_PATTERN, DTYPES, ActivationFormat, MoEProblem
from moekit.quant import SCHEMES

if TYPE_CHECKING:
    from moekit.kernel import PermuteExpertsUnpermute, PrepareAndFinalize
    from moekit.topology import Footprint

GROUP = "moekit"
SWITCHES = ("MOEKIT_PLUGINS", "MOEKIT_BLOCK", "MOEKIT_STRICT")
hookimpl = pluggy.HookimplMarker(GROUP)
_hookspec = pluggy.HookspecMarker(GROUP)

# What a stranger's code may raise without taking moekit down: sys.exit() at import, too.
_FAULTS = (Exception, SystemExit)


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What dispatchers and experts both declare. All keyword-only, so fields can be added.

    name: what users type. target: ``"package.module:Class"``, imported on creation.
    format: the layout of dispatched tokens it produces or consumes.
    dtypes, schemes, devices: what it runs on. A device is ``"cpu"`` or another of torch's types
    (``"cuda"``: AMD's GPUs, too), ``"cuda>=9.0"`` or ``"cuda==9.0"`` (compute capability),
    ``"gfx942"`` (AMD's), or ``"any"``.
    requires: importable names it needs; looked up with find_spec, never imported to list.
    install_hint: the command that provides them.
    priority: the higher of two possible backends is chosen when no measurement says otherwise;
    scheme_priority: (scheme, priority) pairs where it differs by scheme.
    check: further reasons for a problem; must be pure and must not touch a device.
    graph_safe: calls can be captured in a CUDA graph (no host synchronization, static shapes).
    deterministic: equal inputs give equal bits.
    """

    name: str
    target: str
    format: ActivationFormat
    dtypes: frozenset[str] = frozenset(DTYPES)
    schemes: frozenset[str] = frozenset({"none"})
    devices: tuple[str, ...] = ("cpu", "cuda")
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    priority: int = 0
    scheme_priority: tuple[tuple[str, int], ...] = ()
    check: Callable[[MoEProblem], list[str]] | None = None
    graph_safe: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"name {self.name!r}: want lower-case letters, digits and _")
        if not re.fullmatch(r"[\w.]+:\w+", self.target):
            raise ValueError(f"{self.name}: target {self.target!r}: want 'package.module:Class'")
        if not isinstance(self.format, ActivationFormat):
            raise ValueError(f"{self.name}: format {self.format!r}: want an ActivationFormat")
        if not isinstance(self.priority, int):
            raise ValueError(f"{self.name}: priority {self.priority!r}: want an int")
        if unknown := sorted({scheme for scheme, _ in self.scheme_priority} - set(SCHEMES)):
            raise ValueError(f"{self.name}: scheme_priority names unknown schemes {unknown}")
        for what in ("devices", "requires"):
            if not isinstance(value := getattr(self, what), tuple):
                raise ValueError(f"{self.name}: {what} {value!r}: want a tuple of strings")
        for what in ("dtypes", "schemes", "wire_schemes", "activations"):
            value = getattr(self, what, frozenset())
            if not isinstance(value, (frozenset, set)):
                raise ValueError(f"{self.name}: {what} {value!r}: want a frozenset of strings")
        for what, known in (("dtypes", DTYPES), ("schemes", SCHEMES)):
            if unknown := sorted(getattr(self, what) - set(known)):
                raise ValueError(f"{self.name}: unknown {what} {unknown}; known: {sorted(known)}")
        for device in self.devices:
            if not DEVICE_PATTERN.fullmatch(device):
                raise ValueError(f"{self.name}: device {device!r}: want e.g. 'cpu', 'cuda>=9.0'")

    def priority_for(self, problem: MoEProblem) -> int:
        return dict(self.scheme_priority).get(problem.quant.name, self.priority)

    def unsupported(self, problem: MoEProblem) -> list[str]:
        """Every reason why this backend cannot do ``problem``; an empty list means it can."""
        reasons = [
            f"{name} is not installed" + (f" ({self.install_hint})" if self.install_hint else "")
            for name in self.requires
            if not importable(name)
        ]
        if not any(map(problem.device.meets, self.devices)):
            reasons.append(f"runs on {' or '.join(self.devices)}, not on {problem.device}")
        if problem.dtype_name not in self.dtypes:
            known = ", ".join(sorted(self.dtypes))
            reasons.append(f"dtype {problem.dtype_name} is not supported (has {known})")
        reasons += self._unsupported_features(problem)
        if self.check is not None:
            found = self.check(problem)
            if not isinstance(found, (list, tuple)):
                raise TypeError(f"check returned {found!r}, want a list of reasons")
            reasons += [str(reason) for reason in found]
        return reasons

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        return []

    def _load(self, interface: type[Any]) -> type[Any]:
        module_name, _, attribute = self.target.partition(":")
        try:
            loaded = getattr(importlib.import_module(module_name), attribute)
            if not (isinstance(loaded, type) and issubclass(loaded, interface)):
                raise TypeError(f"{loaded!r} is no {interface.__name__}")
            if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
                raise TypeError(f"{loaded!r} lacks {', '.join(missing)}")
        except _FAULTS as error:  # vendor packages fail in every imaginable way at import
            hint = f"; {self.install_hint}" if self.install_hint else ""
            raise BackendBroken(
                f"{_kind(type(self))} {self.name!r} ({self.target}) does not load: "
                f"{type(error).__name__}: {error}{hint}"
            ) from error
        return loaded


@dataclass(frozen=True, kw_only=True)
class DispatcherSpec(BackendSpec):
    """A PrepareAndFinalize.

    moves_tokens: exchanges tokens between ranks. One that does not can serve only ranks that all
    hold the same tokens.
    wire_schemes: schemes whose activations it can send quantized; others travel unquantized and
    are quantized on arrival.
    needs_capacity: works with buffers sized from ``problem.max_num_tokens``.
    ids_dtype: dtype of the ids it is given: int32 or int64.
    overlaps: `prepare` returns before tokens have arrived, and they take no room on the current
    stream; so does `finalize` where the library can.
    spans_hosts: its ranks may be on several hosts; without, they share one.
    aborts: `abort` makes the other ranks raise where one rank of an unchecked kernel fails.
    footprint: what it takes on a rank, told without creating it; None: it does not tell.
    """

    moves_tokens: bool
    wire_schemes: frozenset[str] = frozenset()
    needs_capacity: bool = False
    ids_dtype: str = "int64"
    overlaps: bool = False
    spans_hosts: bool = False
    aborts: bool = False
    footprint: Callable[[MoEProblem], Footprint] | None = None
    schemes: frozenset[str] = frozenset(SCHEMES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := sorted(self.wire_schemes - set(SCHEMES)):
            raise ValueError(f"{self.name}: unknown wire_schemes {unknown}")
        if self.ids_dtype not in ("int32", "int64"):
            raise ValueError(f"{self.name}: ids_dtype {self.ids_dtype!r}: want 'int32' or 'int64'")

    @property
    def applies_weights(self) -> bool:
        """Combine weights and sums: slab rows come back raw, STANDARD ones weighted and summed."""
        return self.format is ActivationFormat.BATCHED

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        reasons = []
        if problem.quant.name not in self.schemes:
            reasons.append(f"quant scheme {problem.quant.name} is not supported")
        if problem.parallel.moves_tokens and not self.moves_tokens:
            reasons.append(
                f"tokens must move between {problem.parallel.dp_size} ranks, and it moves none"
            )
        parallel = problem.parallel
        if parallel.moves_tokens and parallel.nodes > 1 and not self.spans_hosts:
            reasons.append(
                f"the {parallel.num_ranks} ranks are on {parallel.nodes} hosts, and it serves one"
            )
        if self.needs_capacity and problem.max_num_tokens is None:
            reasons.append("its buffers have a fixed size: set max_num_tokens in the problem")
        return reasons

    def load(self) -> type[PrepareAndFinalize]:
        """Imports and returns the class; raises BackendBroken with the import's error."""
        from moekit.kernel import PrepareAndFinalize

        return self._load(PrepareAndFinalize)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(BackendSpec):
    """A PermuteExpertsUnpermute.

    activations: kinds it computes (`moekit.activation.ACTIVATIONS`); silu_clamp: also silu with a
    clamp limit; bias: adds w13_bias and w2_bias.
    reduces: its output rows are weighted by the router and summed over K. BATCHED experts never
    reduce: they do not see the weights.
    takes_quantized, takes_unquantized: which inputs it accepts for a scheme that quantizes
    activations. When it takes both, tokens are quantized before they travel if the dispatcher can
    send them so, and by the experts otherwise.
    emulates: multiplies dequantized weights by activations as they arrive: finer than a scheme that
    quantizes them, and static input scales are not used.
    movable: packed weights are expert-major, so experts can migrate between ranks.
    """

    activations: frozenset[str] = ACTIVATIONS
    silu_clamp: bool = True
    bias: bool = True
    reduces: bool
    takes_quantized: bool = True
    takes_unquantized: bool = True
    emulates: bool = False
    movable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := sorted(self.activations - ACTIVATIONS):
            raise ValueError(f"{self.name}: unknown activations {unknown}")
        if self.reduces and self.format is ActivationFormat.BATCHED:
            raise ValueError(f"{self.name}: BATCHED experts see no router weights to reduce with")
        if not (self.takes_quantized or self.takes_unquantized):
            raise ValueError(f"{self.name}: takes neither quantized nor unquantized input")

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        reasons = []
        if problem.quant.name not in self.schemes:
            known = ", ".join(sorted(self.schemes))
            reasons.append(f"quant scheme {problem.quant.name} is not supported (has {known})")
        if problem.activation.name not in self.activations:
            reasons.append(f"activation {problem.activation.name} is not supported")
        if problem.activation.clamped and not self.silu_clamp:
            reasons.append(f"does not clamp silu (limit={problem.activation.limit})")
        if problem.has_bias and not self.bias:
            reasons.append("has no bias support")
        return reasons

    def load(self) -> type[PermuteExpertsUnpermute]:
        """Imports and returns the class; raises BackendBroken with the import's error."""
        from moekit.kernel import PermuteExpertsUnpermute

        return self._load(PermuteExpertsUnpermute)


class MoekitSpecs:
    """The hooks a plugin may implement."""

    @_hookspec
    def moekit_dispatchers(self) -> list[DispatcherSpec]:  # type: ignore[empty-body]
        """Dispatchers this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_dispatchers():
                return [moekit.DispatcherSpec(name="acme", target="acme_moe.dispatcher:Acme", ...)]
        """

    @_hookspec
    def moekit_experts(self) -> list[ExpertsSpec]:  # type: ignore[empty-body]
        """Expert GEMM backends this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_experts():
                return [moekit.ExpertsSpec(name="acme", target="acme_moe.experts:Acme", ...)]
        """


@dataclass(frozen=True)
class PluginState:
    """What became of one entry point: state is ok, blocked, broken or clash."""

    name: str
    distribution: str
    version: str
    state: str
    reason: str = ""
    dispatchers: tuple[DispatcherSpec, ...] = ()
    experts: tuple[ExpertsSpec, ...] = ()

    @property
    def backends(self) -> tuple[DispatcherSpec | ExpertsSpec, ...]:
        return (*self.dispatchers, *self.experts)


@dataclass(frozen=True)
class _Source:
    """One plugin before it is loaded."""

    name: str
    distribution: str
    version: str
    load: Callable[[], object]

    @property
    def names(self) -> set[str]:
        """What the environment variables may call it."""
        return {_canonical(self.name), _canonical(self.distribution)}

    def state(self, state: str, reason: str) -> PluginState:
        return PluginState(self.name, self.distribution, self.version, state, reason)


SpecT = TypeVar("SpecT", bound=BackendSpec)


@dataclass
class Registry:
    """All known backends. ``registry()`` is the process-wide one; tests may build their own.

    Environment: ``MOEKIT_PLUGINS=a,b`` loads only these plugins besides the core's own backends
    (empty: none), ``MOEKIT_BLOCK=a`` leaves some out, ``MOEKIT_STRICT=1`` re-raises a plugin's own
    error at discovery. Plugins go by the name of their entry point or of their distribution.
    """

    plugins: tuple[PluginState, ...] = ()
    _added: list[BackendSpec] = field(default_factory=list)

    @classmethod
    def discover(cls, environ: Mapping[str, str] = os.environ) -> Registry:
        allowed = environ.get("MOEKIT_PLUGINS")
        allow = None if allowed is None else _names(allowed)
        block = _names(environ.get("MOEKIT_BLOCK", ""))
        strict = environ.get("MOEKIT_STRICT", "") == "1"
        core = _builtin()
        sources = [core, *sorted(_entry_points(), key=lambda s: (s.name, s.distribution))]
        states = []
        for source in sources:
            if source.names & block:
                states.append(source.state("blocked", "named in MOEKIT_BLOCK"))
            elif allow is not None and source is not core and not source.names & allow:
                states.append(source.state("blocked", "not named in MOEKIT_PLUGINS"))
            else:
                states.append(_probe(source, strict))
        present = {name for source in sources for name in source.names}
        for variable, names in (("MOEKIT_PLUGINS", allow or set()), ("MOEKIT_BLOCK", block)):
            for name in sorted(names - present):
                reason = f"named in {variable}, but no such plugin is installed"
                states.append(PluginState(name, "", "", "broken", reason))
        return cls(plugins=tuple(_mark_clashes(states)))

    def register(self, spec: DispatcherSpec | ExpertsSpec) -> None:
        """Adds a backend at run time; raises NameClash when its name is taken."""
        if self._owners(type(spec), spec.name):
            raise NameClash(
                f"{_kind(type(spec))} {spec.name!r} is already offered by "
                f"{' and '.join(self._owners(type(spec), spec.name))}; choose another name"
            )
        self._added.append(spec)

    def unregister(self, spec: DispatcherSpec | ExpertsSpec) -> None:
        """Takes back what `register` added; raises UnknownBackend for anything else."""
        if spec not in self._added:
            raise UnknownBackend(
                f"{_kind(type(spec))} {spec.name!r} was not registered in this process; "
                "to leave out a plugin's backends, name the plugin in MOEKIT_BLOCK"
            )
        self._added.remove(spec)

    def faults(self) -> list[str]:
        """A line for each plugin that is not ok, and why."""
        return [
            f"plugin {state.name} is {state.state}: {state.reason}"
            for state in self.plugins
            if state.state != "ok"
        ]

    @property
    def dispatchers(self) -> Mapping[str, DispatcherSpec]:
        """Usable dispatchers by name, sorted."""
        return self._usable(DispatcherSpec)

    @property
    def experts(self) -> Mapping[str, ExpertsSpec]:
        """Usable experts by name, sorted."""
        return self._usable(ExpertsSpec)

    def dispatcher(self, name: str) -> DispatcherSpec:
        """The named dispatcher; raises UnknownBackend or NameClash."""
        return self._find(DispatcherSpec, name)

    def expert(self, name: str) -> ExpertsSpec:
        """The named experts backend; raises UnknownBackend or NameClash."""
        return self._find(ExpertsSpec, name)

    def _specs(self, kind: type[SpecT]) -> Iterable[tuple[str, SpecT]]:
        for state in self.plugins:
            for spec in state.backends:
                if isinstance(spec, kind):
                    yield f"{state.distribution} {state.version}", spec
        for added in self._added:
            if isinstance(added, kind):
                yield "this process (registry().register)", added

    def _owners(self, kind: type[SpecT], name: str) -> list[str]:
        return [owner for owner, spec in self._specs(kind) if spec.name == name]

    def _usable(self, kind: type[SpecT]) -> Mapping[str, SpecT]:
        specs = sorted((spec for _, spec in self._specs(kind)), key=lambda s: s.name)
        names = [s.name for s in specs]
        return MappingProxyType({s.name: s for s in specs if names.count(s.name) == 1})

    def _find(self, kind: type[SpecT], name: str) -> SpecT:
        usable = self._usable(kind)
        if name in usable:
            return usable[name]
        if owners := self._owners(kind, name):
            plugins = [
                state.distribution
                for state in self.plugins
                if any(type(s) is kind and s.name == name for s in state.backends)
            ]
            raise NameClash(
                f"{_kind(kind)} {name!r} is offered by {' and '.join(owners)}; uninstall one, or "
                f"leave it out with {' or '.join(f'MOEKIT_BLOCK={p}' for p in plugins)}"
            )
        text = f"no {_kind(kind)} named {name!r}; there are: {', '.join(usable) or 'none'}"
        other: type[BackendSpec] = ExpertsSpec if kind is DispatcherSpec else DispatcherSpec
        if name in self._usable(other):
            text += f" ({name!r} is known as: {_kind(other)})"
        text += ". Correct the name, or install the package that offers it"
        raise UnknownBackend("\n  ".join([text, *self.faults()]))


_lock = threading.RLock()
_registry: Registry | None = None
_discovering = False


def registry() -> Registry:
    """The process-wide registry, discovered on first use."""
    global _registry, _discovering
    with _lock:
        if _registry is None:
            if _discovering:
                raise BackendError(
                    "moekit.registry() was called by a plugin that is being discovered; "
                    "call it where the backend is used, not at import"
                )
            _discovering = True
            try:
                _registry = Registry.discover()
            finally:
                _discovering = False
        return _registry


def _kind(kind: type[BackendSpec]) -> str:
    return "dispatcher" if kind is DispatcherSpec else "experts backend"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(text: str) -> set[str]:
    return {_canonical(name.strip()) for name in text.split(",") if name.strip()}


def _builtin() -> _Source:
    from moekit import __version__

    return _Source("core", "moekit", __version__, lambda: importlib.import_module("moekit.builtin"))


def _entry_points() -> Iterator[_Source]:
    """Every distribution's entry points, the first of equal distributions on the path only.

    `importlib.metadata.entry_points` is not used because one unreadable file ends it.
    """
    seen = set()
    for dist in importlib.metadata.distributions():
        try:
            mentioned = GROUP in (dist.read_text("entry_points.txt") or "")
        except (OSError, ValueError):  # not text: nobody's plugin, as far as one can tell
            continue
        if not mentioned:
            continue
        try:
            if not dist.name:
                raise ValueError("it names no distribution")
            name, version = dist.name, dist.version
            points = [p for p in dist.entry_points if p.group == GROUP]
        except Exception as error:  # truncated or hand-edited
            where = getattr(dist, "_path", "?")
            fault = BackendError(f"metadata in {where}: {type(error).__name__}: {error}")
            yield _Source(Path(where).stem, "?", "?", partial(_raise, fault))
            continue
        if _canonical(name) not in seen:
            seen.add(_canonical(name))
            for point in points:
                yield _Source(point.name, name, version, point.load)


def _raise(error: Exception) -> None:
    raise error


def _probe(source: _Source, strict: bool) -> PluginState:
    """Loads one plugin in a plugin manager of its own, so that its faults stay its own."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(MoekitSpecs)
    try:
        manager.register(source.load(), name=source.name)
        manager.check_pending()
        plugin = manager.get_plugin(source.name)
        if not manager.get_hookcallers(plugin):
            raise TypeError(
                "it implements no moekit hook; decorate moekit_dispatchers or moekit_experts "
                "with moekit.hookimpl"
            )
        dispatchers = _records(manager.hook.moekit_dispatchers, DispatcherSpec)
        experts = _records(manager.hook.moekit_experts, ExpertsSpec)
    except _FAULTS as error:  # a stranger's code: anything may come out of it
        if strict:
            raise
        return source.state("broken", f"{type(error).__name__}: {error}")
    return replace(source.state("ok", ""), dispatchers=dispatchers, experts=experts)


def _records(hook: pluggy.HookCaller, kind: type[SpecT]) -> tuple[SpecT, ...]:
    results = hook()  # without the Nones
    if len(results) < len(hook.get_hookimpls()):
        raise TypeError(f"{hook.name} returned None, want a list of {kind.__name__}")
    records: list[SpecT] = []
    for result in results:
        if not isinstance(result, Iterable):
            raise TypeError(f"{hook.name} returned {result!r}, want a list of {kind.__name__}")
        for record in result:
            if type(record) is not kind:
                raise TypeError(f"{hook.name} returned {record!r} for a {kind.__name__}")
            if any(record.name == other.name for other in records):
                raise ValueError(f"{hook.name} offers {record.name!r} twice")
            records.append(record)
    return tuple(records)


def _mark_clashes(states: list[PluginState]) -> list[PluginState]:
    offers: dict[tuple[type, str], list[PluginState]] = {}
    for state in states:
        for spec in state.backends:
            offers.setdefault((type(spec), spec.name), []).append(state)
    marked = []
    for state in states:
        shared = [
            f"{_kind(kind)} {name!r} is also offered by "
            + ", ".join(f"{s.distribution} {s.version}" for s in owners if s is not state)
            for (kind, name), owners in offers.items()
            if len(owners) > 1 and any(s is state for s in owners)
        ]
        marked.append(replace(state, state="clash", reason="; ".join(shared)) if shared else state)
    return marked


def importable(name: str) -> bool:
    """Whether ``import name`` would find something; imports nothing, not even a parent package.

    Looked up once for every sys.path.
    """
    return _importable(name, tuple(sys.path))


@cache
def _importable(name: str, _path: tuple[str, ...]) -> bool:
    try:
        top, *parts = name.split(".")
        spec = importlib.util.find_spec(top)
        for part in parts:
            if spec is None:
                return False
            inside = spec.submodule_search_locations or []
            spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", inside)
    except (ImportError, ValueError):
        return False
    return spec is not None
