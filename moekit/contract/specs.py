"""Specs: the facts that backends declare, validated when a spec is made.

A spec is a frozen record that says what a backend can do and where its class is. Making one imports
no kernel and no vendor library; the backend's module is imported when it is first created.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
from abc import ABC
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

from moekit.contract import sizes
from moekit.errors import BackendBroken, InvalidInput, InvalidProblem
from moekit.problem import DEVICE_PATTERN, DTYPES, ActivationFormat, MoEProblem
from moekit.problem.activation import ACTIVATIONS, DEFAULT_ACTIVATIONS
from moekit.problem.quant import NAME, SCHEMES, Schemes
from moekit.untrusted.arguments import (
    FLAG,
    FUNCTION,
    Kind,
    accept_fields,
    choice,
    instance,
    matching,
    optional,
    shown,
    size,
)
from moekit.untrusted.code import Fault, contained, printable

# A backend's reason begins with this if its `check` raises or returns no list of reasons.
CHECK_FAILED = "its check failed"


def _some_schemes(least: int = 1) -> Kind:
    """Return the kind of sets of schemes. Which names exist is known only after discovery."""

    def keep(value: Any) -> Set[str]:
        if isinstance(value, Schemes):
            return value
        if type(value) not in (frozenset, set) or len(value) < least:
            raise ValueError
        return frozenset(map(NAME.keep, value))

    return Kind(f"a frozenset of at least {least} of the schemes' names", keep)


def _some_of(known: Collection[str], least: int = 1) -> Kind:
    def keep(value: Any) -> frozenset[str]:
        if type(value) not in (frozenset, set) or len(value) < least or not value <= set(known):
            raise ValueError
        return frozenset(value)

    return Kind(f"a frozenset of at least {least} of: {', '.join(sorted(known))}", keep)


def _tuple_of(what: str, accepts: Callable[[str], object], least: int = 0) -> Kind:
    return matching(
        f"a tuple of {what}",
        lambda value: (
            type(value) is tuple
            and len(value) >= least
            and all(type(each) is str and len(each) <= 200 and accepts(each) for each in value)
        ),
    )


def _pattern(wanted: str, pattern: str) -> Kind:
    found = re.compile(pattern)
    return matching(
        wanted,
        lambda value: type(value) is str and len(value) <= 400 and found.fullmatch(value),
    )


def _reasons(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(str.strip(reason) for reason in value):
        raise ValueError
    return [printable(str.__str__(reason)) for reason in value]


def _two_multiples(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 2
        and all(type(n) is int and 0 < n <= sizes.MOST for n in value)
    )


_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_TARGET = _pattern("'package.module:Class'", rf"{_DOTTED}:[^\W\d]\w*")
_TEXT = matching("a string", lambda value: type(value) is str)
_PRIORITY = size(-1_000_000, 1_000_000)
# What the functions of a spec return.
REASONS = Kind("a list of reasons", _reasons)
_MULTIPLES = matching(f"two ints of 1 to {sizes.MOST}", _two_multiples)

# The kinds of the fields, by name or else by type; the other fields are functions.
_BY_NAME = {
    "name": NAME,
    "target": _TARGET,
    "training": optional(_TARGET),
    "adapters": optional(_TARGET),
    "adapters_training": optional(_TARGET),
    "format": instance("an ActivationFormat", ActivationFormat),
    "dtypes": _some_of(DTYPES),
    "schemes": _some_schemes(),
    "wire_schemes": _some_schemes(least=0),
    "activations": _some_of(ACTIVATIONS),
    "devices": _tuple_of(
        "strings such as 'cpu' or 'cuda>=9.0'",
        lambda device: len(device) <= 32 and DEVICE_PATTERN.fullmatch(device),
        least=1,
    ),
    "requires": _tuple_of("importable names", re.compile(_DOTTED).fullmatch),
    "install_hint": _TEXT,
    "priority": _PRIORITY,
    "ids_dtype": choice(("int32", "int64", "any")),
}
_BY_TYPE = {"bool": FLAG, "int | None": optional(size())}


class Backend(ABC):
    """Base of the classes that specs name in ``target``."""

    interface: ClassVar[str]


class Loadable:
    """A record whose ``target`` names a class that implements ``interface``."""

    name: str
    target: str
    install_hint: str
    kind: ClassVar[str]
    interface: ClassVar[str]

    def load(self) -> type[Any]:
        """Import and return the class. Raises BackendBroken with the import's error."""
        module_name, _, attribute = self.target.partition(":")
        what = f"{self.kind} {self.name!r} ({self.target})"
        try:
            with contained():
                loaded = getattr(importlib.import_module(module_name), attribute)
                if not (
                    isinstance(loaded, type)
                    and issubclass(loaded, Backend)
                    and loaded.interface == self.interface
                ):
                    raise TypeError(f"{shown(loaded)} does not derive from {self.interface}")
                if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
                    raise TypeError(f"{shown(loaded)} lacks {', '.join(missing)}")
        except Fault as fault:  # vendor packages may raise anything at import
            hint = f"; {self.install_hint}" if self.install_hint else ""
            raise BackendBroken(f"{what} does not load: {fault}{hint}") from fault.__cause__
        return loaded


_FORMAT = {
    "name": _pattern("lower-case letters, digits, - and _", "[a-z][a-z0-9_-]{0,63}"),
    "target": _TARGET,
    "install_hint": _TEXT,
}


@dataclass(frozen=True, kw_only=True)
class FormatSpec(Loadable):
    """A format of checkpoints that a plugin adds to moekit's.

    name: the ``quant_method`` in the config of a checkpoint.
    target: ``"package.module:Class"`` of a `moekit.checkpoint.Method`. It is imported when a config
        names the format, or when the config names none and no format of moekit fits the tensors.
    install_hint: the command that provides what the module needs.
    """

    name: str
    target: str
    install_hint: str = ""

    kind: ClassVar[str] = "checkpoint format"
    interface: ClassVar[str] = "Method"

    def __post_init__(self) -> None:
        accept_fields(self, _FORMAT, InvalidInput)


@dataclass(frozen=True, kw_only=True)
class BackendSpec(Loadable):
    """The facts that dispatchers and experts both declare. All are keyword-only.

    name: what users type.
    target: ``"package.module:Class"``, imported on creation.
    format: the layout of dispatched tokens that it produces or consumes.
    dtypes, schemes, devices: what it supports. Schemes may be of a plugin, and `SCHEMES` is all.
        A device is ``"cpu"`` or another of torch's types (``"cuda"`` includes AMD's GPUs),
        ``"cuda>=9.0"`` or ``"cuda==9.0"`` (compute capability), ``"gfx942"`` (AMD's), or ``"any"``.
    requires: importable names that it needs. They are looked up, but not imported, to list it.
    install_hint: the command that provides them.
    priority: without a measurement, the supported backend of the highest priority is chosen.
    prefer: returns the priority for a problem, where it depends on the problem; must be pure, as
        `check`. `priority` is what lists show.
    check: returns further reasons against a problem; must be pure and must not touch a device.
    describe: returns how it will run a problem, in a few words for `explain`, or "".
    graph_safe: calls can be captured in a CUDA graph (no host synchronization, static shapes).
    deterministic: equal inputs give equal bits.
    batch_invariant: does problems with ``batch_invariant``, whose docstring says what is promised.
        In these, experts do not weight or sum over K, and every dispatcher does: STANDARD experts
        get a spec with ``reduces=False`` and write (R, K', H), which `finalize` weights and sums
        in fp32 in the order of K (`moekit.plugin.weight_and_reduce`).
    training: the class in place of ``target`` that also has the backward, for problems with
        ``training``; None if there is no backward.
    weights_in_fp32: in fp16, an expert's output above 65504 stays finite until its router weight
        makes it smaller. Experts that reduce weight each output in fp32 before they round it.
        Others write a float32 ``y``, and dispatchers that apply the weights take one.
    """

    name: str
    target: str
    format: ActivationFormat
    dtypes: frozenset[str] = frozenset(DTYPES)
    schemes: Set[str] = frozenset({"none"})
    devices: tuple[str, ...] = ("cpu", "cuda")
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    priority: int = 0
    prefer: Callable[[MoEProblem], int] | None = None
    check: Callable[[MoEProblem], list[str]] | None = None
    describe: Callable[[MoEProblem], str] | None = None
    graph_safe: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    training: str | None = None
    weights_in_fp32: bool = False

    fused: ClassVar[bool] = False  # one backend is dispatcher and experts (`FusedSpec`)

    def __post_init__(self) -> None:
        try:
            kinds = {
                fact.name: _BY_NAME.get(fact.name)
                or _BY_TYPE.get(str(fact.type), optional(FUNCTION))
                for fact in fields(self)
            }
            accept_fields(self, kinds)
        except InvalidProblem as error:
            raise InvalidInput(f"{shown(self.name)}: {error}") from None
        object.__setattr__(self, "install_hint", printable(self.install_hint))

    def priority_for(self, problem: MoEProblem) -> int:
        """Return the priority for ``problem``, which this backend supports: `unsupported` reports
        a `prefer` that fails."""
        if self.prefer is None:
            return self.priority
        return int(self._asked("prefer", problem, _PRIORITY))

    def unsupported(self, problem: MoEProblem) -> list[str]:
        """Return every reason why this backend cannot do ``problem``; empty if it can."""
        reasons = [missing] if (missing := self.missing()) else []
        if not any(map(problem.device.meets, self.devices)):
            reasons.append(f"runs on {' or '.join(self.devices)}, not on {problem.device}")
        reasons += _lacks("dtype", problem.dtype_name, self.dtypes)
        if problem.batch_invariant and not self.batch_invariant:
            reasons.append(
                "is not batch-invariant: the bits of a token's result may depend on other tokens "
                "or on the number of ranks"
            )
        if problem.training and self.training is None:
            reasons.append("has no backward: it computes no gradients (training=True)")
        reasons += _lacks("quant scheme", problem.quant.name, self.schemes)
        reasons += self._unsupported_features(problem)
        try:
            self.priority_for(problem)
            return reasons + (self._asked("check", problem, REASONS) if self.check else [])
        except Fault as fault:
            return [*reasons, f"{CHECK_FAILED}: {fault}"]

    def for_training(self: SpecT) -> SpecT:
        """Return the spec of the class that also has the backward."""
        assert self.training is not None
        return replace(self, target=self.training)

    def padding(self, problem: MoEProblem) -> str:
        """Return which sizes of ``problem`` moekit pads for this backend, in words, or ""."""
        return ""

    def missing(self) -> str:
        """Return which required packages are not installed and how to install them, or ""."""
        names = [name for name in self.requires if not importable(name)]
        if not names:
            return ""
        listed = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
        hint = f" ({self.install_hint})" if self.install_hint else ""
        return f"{listed} {'are' if len(names) > 1 else 'is'} not installed{hint}"

    def description(self, problem: MoEProblem) -> str:
        """Return what `describe` returns for ``problem``, or how it failed."""
        try:
            return printable(self._asked("describe", problem, _TEXT)) if self.describe else ""
        except Fault as fault:
            return f"its description failed: {fault}"

    def _asked(self, fact: str, problem: MoEProblem, kind: Kind) -> Any:
        """Return what a function of this spec returns for ``problem``.

        Raises Fault if the function raises, or returns something that is not of ``kind``.
        """
        with contained():
            found = getattr(self, fact)(problem)
            try:
                return kind.keep(found)
            except Exception:
                text = f"{fact} returned {shown(found)}, expected {kind.wanted}"
                raise TypeError(text) from None

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        return []


@dataclass(frozen=True, kw_only=True)
class DispatcherSpec(BackendSpec):
    """The facts that a PrepareAndFinalize declares.

    moves_tokens: exchanges tokens between ranks. Other dispatchers support only ranks that all
        hold the same tokens.
    wire_schemes: schemes whose activations it can send quantized. Tokens of other schemes are
        quantized when they arrive.
    needs_capacity: its buffers have a size that depends on ``problem.max_num_tokens``.
    ids_dtype: dtype of the ids that it is given: int32, int64, or any. With any, ids have either
        dtype, which may differ between ranks and calls, and `ModularKernel.warmup` passes both.
    spans_hosts: its ranks may be on several hosts.
    sliced_experts: experts may be sliced over ranks (tp_size above 1).
    shared_tokens: consecutive ranks may hold the same tokens (dp_size below the number of ranks).
    uneven_experts: the number of experts need not be a multiple of ep_size.
    most_top_k, most_ranks: limits; None for none.
    aborts: if a rank of an unchecked kernel fails, `abort` makes the other ranks raise.
    """

    kind = "dispatcher"
    interface = "PrepareAndFinalize"

    moves_tokens: bool
    wire_schemes: Set[str] = frozenset()
    needs_capacity: bool = False
    ids_dtype: str = "int64"
    spans_hosts: bool = False
    aborts: bool = False
    sliced_experts: bool = True
    shared_tokens: bool = True
    uneven_experts: bool = True
    most_top_k: int | None = None
    most_ranks: int | None = None
    schemes: Set[str] = SCHEMES

    def unsupported(self, problem: MoEProblem) -> list[str]:
        reasons, slots = super().unsupported(problem.dispatched), problem.adapters
        if slots is None:
            return reasons
        if problem.dispatched is not problem:
            plain = super().unsupported(problem.replace(adapters=None))
            times = (
                f"each expert counts {slots.count + 1} times, for tokens with and without adapters"
            )
            reasons = [why if why in plain else f"{why} ({times})" for why in reasons]
        if self.format is ActivationFormat.BATCHED:
            reasons.append("batched tokens have no room for the ids of adapters (LoRA)")
        elif problem.dispatched is not problem and (
            problem.num_physical_experts % problem.parallel.ep_size
        ):
            reasons.append(
                f"ids of adapters (LoRA) travel only where {problem.num_physical_experts} experts "
                f"are a multiple of ep_size={problem.parallel.ep_size}; add redundant experts"
            )
        return reasons

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        reasons, parallel = [], problem.parallel
        if parallel.moves_tokens and not self.moves_tokens:
            reasons.append(f"tokens must move between {parallel.dp_size} ranks, and it moves none")
        if parallel.moves_tokens and parallel.nodes > 1 and not self.spans_hosts:
            reasons.append(
                f"the {parallel.num_ranks} ranks are on {parallel.nodes} hosts, and it serves one"
            )
        if self.needs_capacity and problem.max_num_tokens is None:
            reasons.append("its buffers have a fixed size: set max_num_tokens in the problem")
        if parallel.moves_tokens and self.moves_tokens:
            reasons += self._unsupported_ranks(problem)
        return reasons

    def _unsupported_ranks(self, problem: MoEProblem) -> list[str]:
        p, ranks, dp = problem.parallel, problem.parallel.num_ranks, problem.parallel.dp_size
        experts, reasons = problem.num_physical_experts, []
        if p.tp_size > 1 and not self.sliced_experts:
            reasons.append(f"tensor parallelism is not supported (tp_size={p.tp_size})")
        elif dp != ranks and not self.shared_tokens:
            reasons.append(
                "every rank must have a batch of tokens: dp_size must equal the number of ranks "
                f"(dp_size={dp}, {ranks} ranks)"
            )
        if experts % p.ep_size and not self.uneven_experts:
            reasons.append(
                f"{experts} experts must be a multiple of ep_size={p.ep_size}; add redundant "
                "experts"
            )
        if self.most_top_k is not None and problem.top_k > self.most_top_k:
            reasons.append(f"top_k={problem.top_k} exceeds {self.most_top_k}")
        if self.most_ranks is not None and ranks > self.most_ranks:
            reasons.append(f"{ranks} ranks exceed {self.most_ranks}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(BackendSpec):
    """The facts that a PermuteExpertsUnpermute declares.

    activations: the kinds that it computes, of `moekit.plugin.ACTIVATIONS`. The default leaves out
        situ, swiglustep and relu2_and_mul, which were added later.
    silu_clamp: it also computes silu with a clamp limit.
    bias: it adds w13_bias and w2_bias.
    reduces: its output rows are weighted by the router and summed over K. BATCHED experts never
        reduce, because they do not see the weights.
    takes_quantized, takes_unquantized: the inputs that it accepts for a scheme that quantizes
        activations. If it takes both, tokens are quantized before the transfer if the dispatcher
        can send them quantized, and by the experts otherwise.
    emulates: it multiplies dequantized weights by unquantized activations. This is more exact than
        a scheme that quantizes activations, and static input scales are not used.
    movable: packed weights are expert-major, so experts can migrate between ranks.
    multiples: returns, for a problem, the numbers that its kernels need the hidden size and a
        rank's intermediate size to be multiples of. moekit then pads weights, tokens and output
        with zeros, which costs a copy of the tokens and of the output if the hidden size is padded,
        and creates the backend for the padded problem, which `check` sees.
    adapters, adapters_training: the classes that replace ``target`` and ``training`` for problems
        with adapters (LoRA). They derive from `AdapterExperts`. None: it does not take adapters.
    """

    kind = "experts backend"
    interface = "PermuteExpertsUnpermute"

    activations: frozenset[str] = DEFAULT_ACTIVATIONS
    silu_clamp: bool = True
    bias: bool = True
    reduces: bool
    takes_quantized: bool = True
    takes_unquantized: bool = True
    emulates: bool = False
    movable: bool = True
    multiples: Callable[[MoEProblem], tuple[int, int]] | None = None
    adapters: str | None = None
    adapters_training: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduces and self.format is ActivationFormat.BATCHED:
            raise InvalidInput(
                f"{self.name}: BATCHED experts see no router weights to reduce with: set "
                "reduces=False"
            )
        if not (self.takes_quantized or self.takes_unquantized):
            raise InvalidInput(
                f"{self.name}: takes neither quantized nor unquantized input: set takes_quantized "
                "or takes_unquantized"
            )

    def made_for(self, problem: MoEProblem) -> ExpertsSpec:
        """Return the spec as it holds for ``problem``: batch-invariant experts do not reduce."""
        reduces = self.reduces and not problem.batch_invariant
        return self if reduces == self.reduces else replace(self, reduces=reduces)

    def target_for(self, problem: MoEProblem) -> str | None:
        """Return the class that the backend has for ``problem``, or None if it has none."""
        if problem.adapters is None:
            return self.training if problem.training else self.target
        return self.adapters_training if problem.training else self.adapters

    def padded(self, problem: MoEProblem) -> MoEProblem:
        """Return the problem that the backend is created for: sizes are rounded up as it needs."""
        try:
            return sizes.padded(problem, self._multiples(problem))
        except Fault:  # `unsupported` reports it
            return problem

    def padding(self, problem: MoEProblem) -> str:
        return sizes.words(problem, self.padded(problem))

    def unsupported(self, problem: MoEProblem) -> list[str]:
        made = self.padded(problem)
        reasons = super().unsupported(made)
        if problem.training and made != problem:
            reasons.append(f"{self.padding(problem)}, which has no backward")
        elif problem.adapters is not None and made != problem:
            reasons.append(f"{self.padding(problem)}, which takes no adapters")
        try:
            return reasons + sizes.faults(problem, made, self._multiples(problem))
        except Fault as fault:
            return [*reasons, f"{CHECK_FAILED}: {fault}"]

    def _multiples(self, problem: MoEProblem) -> sizes.Multiples:
        """Return what `multiples` returns for ``problem``. Raises Fault if it fails."""
        if self.multiples is None:
            return 1, 1
        found: sizes.Multiples = self._asked("multiples", problem, _MULTIPLES)
        return found

    def needs_bridge(self, format: ActivationFormat) -> bool:
        """Return whether moekit converts between dispatched tokens of ``format`` and this one's."""
        return self.format is not format

    def bridged_to(self, format: ActivationFormat) -> ExpertsSpec:
        """Return the spec that a dispatcher of ``format`` sees, a bridge included."""
        if not self.needs_bridge(format):
            return self
        standard = format is ActivationFormat.STANDARD
        # Experts that reduce see weights of 1 behind a bridge, and round before the real ones.
        wide = self.weights_in_fp32 and not self.reduces
        return replace(self, format=format, reduces=standard, weights_in_fp32=wide)

    def native_to(self, format: ActivationFormat) -> ExpertsSpec:
        """Return the spec to create for a dispatcher of ``format``; a bridge does the rest."""
        return self

    def unsupported_behind(self, format: ActivationFormat) -> list[str]:
        """Return every reason why this backend cannot serve dispatchers of ``format``."""
        return []

    def notes(self, problem: MoEProblem) -> list[str]:
        """Return what users should know about the way this backend computes ``problem``."""
        notes = []
        if what := self.padding(problem):
            notes.append(f"{self.name}: {what}")
        if how := self.description(self.padded(problem)):
            notes.append(f"{self.name}: {how}")
        return notes

    def _unsupported_features(self, problem: MoEProblem) -> list[str]:
        reasons = _lacks("activation", problem.activation.name, self.activations)
        if problem.activation.clamped and not self.silu_clamp:
            reasons.append(f"does not clamp silu (limit={problem.activation.limit})")
        if problem.has_bias and not self.bias:
            reasons.append("has no bias support")
        if problem.adapters is not None and self.target_for(problem) is None:
            backward = " of which gradients are wanted (training=True)" if problem.training else ""
            reasons.append(f"does not take adapters (LoRA){backward}")
        if problem.batch_invariant and problem.quant.shared_scale and not self.takes_unquantized:
            reasons.append(
                f"takes quantized tokens only, and {problem.quant.name} has one scale for all "
                "tokens of a call, so results are not batch-invariant"
            )
        return reasons


def _lacks(what: str, name: str, known: Collection[str]) -> list[str]:
    if name in known:
        return []
    return [f"{what} {name} is not supported (has {', '.join(sorted(known))})"]


SpecT = TypeVar("SpecT", bound=BackendSpec)


def importable(name: str) -> bool:
    """Return whether ``import name`` would find a module, without importing anything.

    Results are cached for each sys.path.
    """
    return _importable(name, tuple(sys.path))


@cache
def _importable(name: str, _path: tuple[str, ...]) -> bool:
    return find_module(name) is not None


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find what ``import name`` would import, without importing it or a parent package."""
    try:
        with contained():  # finders on sys.meta_path are strangers' code
            top, *parts = name.split(".")
            spec = importlib.util.find_spec(top)
            for part in parts:
                if spec is None:
                    return None
                inside = spec.submodule_search_locations or []
                spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", inside)
            return spec
    except Fault:
        return None
