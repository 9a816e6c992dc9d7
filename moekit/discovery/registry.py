"""All backends that plugins announced, by name: the registry.

`moekit.contract.specs` says what a backend declares, and `moekit.discovery.entry_points` how
plugins are found and loaded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from moekit.contract.specs import BackendSpec, DispatcherSpec, ExpertsSpec, FormatSpec, SpecT
from moekit.discovery.entry_points import (
    SWITCHES,
    PluginState,
    mark_clashes,
    probe,
    probing,
    sources,
)
from moekit.errors import BackendError, NameClash, UnknownBackend
from moekit.problem import MoEProblem, QuantScheme
from moekit.problem.quant import Schemes
from moekit.untrusted.arguments import shown, switch

OfferT = TypeVar("OfferT", bound=BackendSpec | QuantScheme | FormatSpec)

_KINDS = DispatcherSpec, ExpertsSpec, QuantScheme, FormatSpec

logger = logging.getLogger("moekit")

# What the core reads; plugins read others.
_VARIABLES = (
    *SWITCHES, "MOEKIT_DISPATCHER", "MOEKIT_EXPERTS", "MOEKIT_TUNED", "MOEKIT_CALIBRATE",
)  # fmt: skip


@dataclass
class Registry:
    """All known backends. ``registry()`` is the process-wide one; tests may build their own.

    Environment: ``MOEKIT_PLUGINS=a,b`` loads only these plugins and the core's own backends (empty:
    no plugins), ``MOEKIT_BLOCK=a`` excludes some, ``MOEKIT_STRICT=1`` re-raises a plugin's own
    error at discovery. A plugin is known by its entry point's and its distribution's name.
    """

    plugins: tuple[PluginState, ...] = ()
    _added: list[BackendSpec | QuantScheme | FormatSpec] = field(default_factory=list)

    @classmethod
    def discover(cls, environ: Mapping[str, str] | None = None) -> Registry:
        environ = os.environ if environ is None else environ
        strict = switch("MOEKIT_STRICT", False, environ)
        for name in environ:
            if name not in _VARIABLES and (meant := get_close_matches(name, _VARIABLES, 1, 0.9)):
                logger.warning("moekit: %s is ignored: %s may be meant", name, meant[0])
        found, unknown = sources(environ)
        states = [
            source.state("blocked", blocked) if blocked else probe(source, strict)
            for source, blocked in found
        ]
        made = cls(plugins=(*mark_clashes(states), *unknown))
        for state in made.plugins:
            if state.state == "clash":
                logger.warning("moekit: plugin %s (clash): %s", state.name, state.reason)
        return made

    def copy(self) -> Registry:
        """Return a registry with the same backends; what one registers, the other lacks."""
        return Registry(self.plugins, list(self._added))

    def register(self, spec: DispatcherSpec | ExpertsSpec | QuantScheme | FormatSpec) -> None:
        """Add a backend, a scheme or a format at run time. Raises NameClash if its name is taken.

        Problems take the schemes of the process-wide registry.
        """
        kinds = [k for k in _KINDS if isinstance(spec, k)]
        if not kinds:
            raise BackendError(f"register() needs a spec or a QuantScheme, but got {shown(spec)}")
        if owners := [who for kind in kinds for who in self._owners(kind, spec.name)]:
            raise NameClash(
                f"{spec.kind} {spec.name!r} is already offered by "
                f"{' and '.join(dict.fromkeys(owners))}; choose another name"
            )
        self._added.append(spec)

    def unregister(self, spec: DispatcherSpec | ExpertsSpec | QuantScheme | FormatSpec) -> None:
        """Remove what `register` added. Raises UnknownBackend for any other."""
        if spec not in self._added:
            raise UnknownBackend(
                f"{spec.kind} {spec.name!r} was not registered in this process; "
                "to leave out a plugin's backends, name the plugin in MOEKIT_BLOCK"
            )
        self._added.remove(spec)

    def faults(self, *, blocked: bool = True) -> list[str]:
        """Return a line for each plugin that is not ok; ``blocked`` ones may be left out."""
        return [
            f"plugin {state.name} ({state.state}): {state.reason}"
            for state in self.plugins
            if state.state != "ok" and (blocked or state.state != "blocked")
        ]

    @property
    def dispatchers(self) -> Mapping[str, DispatcherSpec]:
        """Usable dispatchers by name, sorted."""
        return self._usable(DispatcherSpec)

    @property
    def experts(self) -> Mapping[str, ExpertsSpec]:
        """Usable experts by name, sorted."""
        return self._usable(ExpertsSpec)

    @property
    def schemes(self) -> Mapping[str, QuantScheme]:
        """Usable quantization schemes by name, sorted."""
        return self._usable(QuantScheme)

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """Usable checkpoint formats by their quant_method, sorted."""
        return self._usable(FormatSpec)

    def dispatcher(self, name: str) -> DispatcherSpec:
        """Return the named dispatcher; raise UnknownBackend or NameClash if there is none."""
        return self._find(DispatcherSpec, name)

    def expert(self, name: str) -> ExpertsSpec:
        """Return the named experts backend; raise UnknownBackend or NameClash if there is none."""
        return self._find(ExpertsSpec, name)

    def _specs(self, kind: type[OfferT]) -> Iterable[tuple[str, OfferT]]:
        for state in self.plugins:
            for spec in (*state.backends, *state.schemes, *state.formats):
                if isinstance(spec, kind):
                    yield state.owner, spec
        for added in self._added:
            if isinstance(added, kind):
                yield "this process (registry().register)", added

    def _owners(self, kind: type[OfferT], name: str) -> list[str]:
        return [owner for owner, spec in self._specs(kind) if spec.name == name]

    def _usable(self, kind: type[OfferT]) -> Mapping[str, OfferT]:
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
                if any(isinstance(s, kind) and s.name == name for s in state.backends)
            ]
            raise NameClash(
                f"{kind.kind} {name!r} is offered by {' and '.join(owners)}; uninstall one, or "
                f"leave it out with {' or '.join(f'MOEKIT_BLOCK={p}' for p in plugins)}"
            )
        text = f"no {kind.kind} named {name!r}; there are: {', '.join(usable) or 'none'}"
        other: type[BackendSpec] = ExpertsSpec if kind is DispatcherSpec else DispatcherSpec
        if name in self._usable(other):
            text += f" ({name!r} is known as: {other.kind})"
        from moekit.discovery.packages import offering

        package = offering("experts" if kind is ExpertsSpec else "dispatchers", name)
        if package is not None and not package.installed:
            text += f". {package.name} offers it: {package.install} (in a clone of its repository)"
        else:
            text += ". Correct the name, or install the package that offers it"
        raise UnknownBackend("\n  ".join([text, *self.faults()]))


def not_installed(problem: MoEProblem) -> Iterator[str]:
    """Yield lines on packages of moekit's repository that have backends for ``problem``."""
    from moekit.discovery import packages

    yield from packages.not_installed(problem)


_lock = threading.RLock()
# A process that forks while another thread discovers has a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_registry: Registry | None = None


def registry() -> Registry:
    """Return the process-wide registry, discovered on first use."""
    global _registry
    if probing():
        raise BackendError(
            "moekit.registry() was called by a plugin that is being discovered; "
            "call it where the backend is used, not at import"
        )
    with _lock:
        if _registry is None:
            _registry = Registry.discover()
        return _registry


def _installed(discover: bool) -> Registry | None:
    if probing():
        return None
    return registry() if discover else _registry


Schemes.installed = staticmethod(_installed)
