"""Discovery of plugins through entry points. A broken plugin affects no other.

A plugin is a package named by an entry point of group ``moekit``. Its hooks return specs
(`moekit.contract.specs`). An exception of its code becomes the plugin's state, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from moekit.contract.fused import FusedSpec
from moekit.contract.specs import BackendSpec, DispatcherSpec, ExpertsSpec, FormatSpec
from moekit.errors import BackendError
from moekit.problem.quant import QuantScheme
from moekit.untrusted.arguments import shown
from moekit.untrusted.code import Fault, contained, printable
from moekit.version import __version__

GROUP = "moekit"
hookimpl = pluggy.HookimplMarker(GROUP)
"""Decorates the functions of a plugin: `moekit_dispatchers`, `moekit_experts` and so on."""
_hookspec = pluggy.HookspecMarker(GROUP)
SWITCHES = ("MOEKIT_PLUGINS", "MOEKIT_BLOCK", "MOEKIT_STRICT")
CORE = "core"
_BUILTIN = "moekit.backends.builtin"

_MOST_BACKENDS = 1000
_VALUE = re.compile(r"[\w.]+\s*(:\s*[\w.]+\s*)?(\[.*\]\s*)?")

Offer = tuple[str, str]  # kind and name

RecordT = TypeVar("RecordT", DispatcherSpec, ExpertsSpec, QuantScheme, FusedSpec, FormatSpec)

# What the hooks return, by their names without ``moekit_``.
_KINDS: Mapping[str, Any] = {
    "dispatchers": DispatcherSpec, "experts": ExpertsSpec, "schemes": QuantScheme,
    "fused": FusedSpec, "formats": FormatSpec,
}  # fmt: skip

_this_thread = threading.local()


class MoekitSpecs:
    """The hooks a plugin may implement."""

    @_hookspec
    def moekit_dispatchers(self) -> list[DispatcherSpec]:  # type: ignore[empty-body]
        """Return the dispatchers that this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_dispatchers():
                return [moekit.DispatcherSpec(name="acme", target="acme_moe.dispatcher:Acme", ...)]
        """

    @_hookspec
    def moekit_experts(self) -> list[ExpertsSpec]:  # type: ignore[empty-body]
        """Return the experts backends that this plugin offers.

        Example::

            @moekit.hookimpl
            def moekit_experts():
                return [moekit.ExpertsSpec(name="acme", target="acme_moe.experts:Acme", ...)]
        """

    @_hookspec
    def moekit_schemes(self) -> list[QuantScheme]:  # type: ignore[empty-body]
        """Return the quantization schemes that this plugin adds, see docs/backends.md."""

    @_hookspec
    def moekit_fused(self) -> list[FusedSpec]:  # type: ignore[empty-body]
        """Return the fused kernels that this plugin offers, see docs/backends.md."""

    @_hookspec
    def moekit_formats(self) -> list[FormatSpec]:  # type: ignore[empty-body]
        """Return the formats of checkpoints that this plugin reads, see docs/backends.md."""


@dataclass(frozen=True)
class PluginState:
    """The result of loading one entry point: its state is ok, blocked, broken or clash.

    dispatchers, experts, schemes, fused, formats: what it offers, without the core's own names.
    """

    name: str
    distribution: str
    version: str
    state: str
    reason: str = ""
    dispatchers: tuple[DispatcherSpec, ...] = ()
    experts: tuple[ExpertsSpec, ...] = ()
    schemes: tuple[QuantScheme, ...] = ()
    fused: tuple[FusedSpec, ...] = ()
    formats: tuple[FormatSpec, ...] = ()

    @property
    def backends(self) -> tuple[DispatcherSpec | ExpertsSpec, ...]:
        return (*self.dispatchers, *self.experts, *self.fused)

    @property
    def owner(self) -> str:
        """The distribution and its version; empty where no such plugin is installed."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def offers(self) -> tuple[Offer, ...]:
        records = *self.backends, *self.schemes, *self.formats
        return tuple(chain.from_iterable(map(_offers, records)))


@dataclass(frozen=True)
class Source:
    """One entry point before it is loaded. value: ``package.module:object``, empty if broken."""

    name: str
    distribution: str
    version: str
    load: Callable[[], object]
    value: str = ""

    @classmethod
    def broken(cls, name: str, distribution: str, version: str, why: str) -> Source:
        """Return a source that raises BackendError when it is loaded."""
        return cls(name, distribution, version, partial(_raise, BackendError(why)))

    @property
    def names(self) -> set[str]:
        """The names that the environment variables may use for it."""
        return {_canonical(self.name), _canonical(self.distribution)}

    def state(self, state: str, reason: str) -> PluginState:
        return PluginState(self.name, self.distribution, self.version, state, reason)


def sources(environ: Mapping[str, str]) -> tuple[list[tuple[Source, str]], list[PluginState]]:
    """Return all plugins, the core first, and a state for each unknown name in the environment.

    A plugin comes with the reason why it is blocked, or "". The environment variables are
    ``MOEKIT_PLUGINS`` and ``MOEKIT_BLOCK``.
    """
    allowed = environ.get("MOEKIT_PLUGINS")
    allow = None if allowed is None else _names(allowed)
    block = _names(environ.get("MOEKIT_BLOCK", ""))
    core = Source(CORE, "moekit", __version__, partial(importlib.import_module, _BUILTIN))
    others = sorted(entry_points(), key=lambda source: (source.name, source.distribution))
    found = [(core, _blocked(core, None, block))]
    found += [(source, _blocked(source, allow, block)) for source in others]
    present = {name for source, _ in found for name in source.names}
    missing = "but no such plugin is installed"
    unknown = [
        PluginState(printable(name, 80), "", "", "broken", f"named in {variable}, {missing}")
        for variable, names in (("MOEKIT_PLUGINS", allow or set()), ("MOEKIT_BLOCK", block))
        for name in sorted(names - present)
    ]
    return found, unknown


def _blocked(source: Source, allow: set[str] | None, block: set[str]) -> str:
    if source.names & block:
        return "named in MOEKIT_BLOCK"
    return "not named in MOEKIT_PLUGINS" if allow is not None and not source.names & allow else ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(text: str) -> set[str]:
    return {_canonical(name.strip()) for name in text.split(",") if name.strip()}


def entry_points(group: str = GROUP) -> Iterator[Source]:
    """Yield the entry points of ``group``, of equal distributions on the path the first one's.

    `importlib.metadata.entry_points` is not used because one unreadable file ends it.
    """
    seen = set()
    for dist in _distributions():
        mentioned = False
        try:
            with contained():
                mentioned = group in (dist.read_text("entry_points.txt") or "")
                if not mentioned:
                    continue
                if not dist.name:
                    raise ValueError("it names no distribution")
                name, version = dist.name, dist.version or "?"
                points = [p for p in dist.entry_points if p.group == group]
                points.sort(key=lambda point: point.name)
        except Fault as fault:  # truncated or hand-edited
            where = printable(str(getattr(dist, "_path", "?")))
            if mentioned:  # else nobody knows whether it is a plugin
                yield Source.broken(Path(where).stem, "?", "?", f"metadata in {where}: {fault}")
            continue
        if _canonical(name) not in seen:
            seen.add(_canonical(name))
            for point, same in groupby(points, key=lambda point: point.name):
                known = printable(point, 80), printable(name, 80), printable(version, 80)
                yield _source(*known, {each.value: each for each in same})


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions; a foreign finder that raises ends the list."""
    found = iter(importlib.metadata.distributions())
    while True:
        try:
            with contained():
                dist = next(found, None)
        except Fault:
            return
        if dist is None:
            return
        yield dist


def _source(
    name: str, distribution: str, version: str, points: Mapping[str, importlib.metadata.EntryPoint]
) -> Source:
    """Return the source of a plugin.

    points: the entry points of that name by their values; more than one is a fault.
    """
    broken = partial(Source.broken, name, distribution, version)
    if _canonical(name) == CORE:
        return broken(f"its entry point is called {CORE!r}, as moekit's own: rename it")
    if len(points) > 1:
        values = " and ".join(shown(value) for value in sorted(points))
        return broken(f"its distribution names the entry point twice, for {values}: keep one")
    ((value, point),) = points.items()
    if not _VALUE.fullmatch(value):
        return broken(
            f"entry point for {shown(value)}: expected 'package' or 'package.module:object'"
        )
    return Source(name, distribution, version, point.load, value)


def _raise(error: Exception) -> None:
    raise error


def probe(source: Source, strict: bool = False) -> PluginState:
    """Load one plugin in a separate plugin manager, so that its faults affect no other.

    strict: raise what the plugin raises.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(MoekitSpecs)
    _this_thread.probing = True
    try:
        with nullcontext() if strict else contained():
            manager.register(source.load(), name=source.name)
            manager.check_pending()
            plugin = manager.get_plugin(source.name)
            if not manager.get_hookcallers(plugin):
                raise TypeError(
                    "it implements no moekit hook; decorate a function such as moekit_experts with "
                    "moekit.hookimpl"
                )
            offered: Any = {
                name: _records(getattr(manager.hook, f"moekit_{name}"), kind)
                for name, kind in _KINDS.items()
            }
            found = replace(source.state("ok", ""), **offered)
            if twice := [offer for offer in found.offers if found.offers.count(offer) > 1]:
                raise ValueError(f"it offers the {twice[0][0]} {twice[0][1]!r} twice")
    except Fault as fault:
        return source.state("broken", str(fault))
    finally:
        _this_thread.probing = False
    return found


def probing() -> bool:
    """Return whether this thread is loading a plugin."""
    return getattr(_this_thread, "probing", False)


def _records(hook: pluggy.HookCaller, kind: type[RecordT]) -> tuple[RecordT, ...]:
    results = hook()  # without the Nones
    if len(results) < len(hook.get_hookimpls()):
        raise TypeError(f"{hook.name} returned None, expected a list of {kind.__name__}")
    records: dict[str, RecordT] = {}
    for record in chain.from_iterable(r if isinstance(r, Iterable) else [r] for r in results):
        if type(record) is not kind:
            raise TypeError(
                f"{hook.name} returned {shown(record)}, expected a list of {kind.__name__}"
            )
        if record.name in records:
            raise ValueError(f"{hook.name} offers {shown(record.name)} twice")
        if len(records) == _MOST_BACKENDS:
            raise ValueError(f"{hook.name} offers more than {_MOST_BACKENDS}")
        records[record.name] = replace(record)  # validates changes since it was made
    return tuple(records.values())


def mark_clashes(states: Sequence[PluginState]) -> list[PluginState]:
    """Return ``states``, the core's first; those that offer the same names have a reason.

    The core keeps its names, and a plugin that offers one of them loses that backend.
    """
    marked = []
    shared = clashes([(state.owner, state.offers) for state in states])
    for state, (reason, lost) in zip(states, shared, strict=True):
        if reason:
            kept: Any = {
                name: tuple(s for s in getattr(state, name) if lost.isdisjoint(_offers(s)))
                for name in _KINDS
            }
            state = replace(state, state="clash", reason=reason, **kept)
        marked.append(state)
    return marked


def _offers(record: BackendSpec | QuantScheme | FormatSpec) -> list[Offer]:
    """Return the kinds and names that a record takes; a fused kernel takes two."""
    fused = isinstance(record, FusedSpec)
    kinds = [DispatcherSpec.kind, ExpertsSpec.kind] if fused else [record.kind]
    return [(kind, record.name) for kind in kinds]


def clashes(owners: Sequence[tuple[str, Collection[Offer]]]) -> list[tuple[str, set[Offer]]]:
    """Return a reason and the lost offers for each owner.

    The reason names the offers that an owner shares with others, or is "". Offers are lost to the
    first owner, the core, which shares nothing.
    """
    core = set(owners[0][1])
    found: list[tuple[str, set[Offer]]] = [("", set())]
    for place, (_, offers) in enumerate(owners[1:], 1):
        reasons, lost = [], core.intersection(offers)
        for offer in offers:
            what, own = f"{offer[0]} {offer[1]!r}", offer[0].split()[-1]
            rivals = [
                who for i, (who, theirs) in enumerate(owners) if i != place and offer in theirs
            ]
            if offer in lost:
                reasons.append(
                    f"{what} is a name of moekit's own {own}, which stays in use: rename it"
                )
            elif rivals:
                reasons.append(f"{what} is also offered by {', '.join(rivals)}")
        found.append(("; ".join(reasons), lost))
    return found
