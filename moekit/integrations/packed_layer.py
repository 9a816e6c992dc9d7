"""The kernel and the packed weights of a transformers experts module, kept between calls."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moekit.contract import PackedWeights, Routing
from moekit.errors import MoekitError, Unsupported, WeightsError
from moekit.integrations.experts_module import converted, read, weights_of
from moekit.integrations.peft import operands_of, slots_of, stack_of
from moekit.kernel import ModularKernel
from moekit.problem import AdapterSlots, MoEProblem
from moekit.problem.quant import QuantScheme, scheme
from moekit.runtime import graphs
from moekit.selection.select import SWITCHES, compose

logger = logging.getLogger("moekit")

ATTRIBUTE = "_moekit_layer"  # of an experts module: its Layer
# Only one thread at a time packs weights or drops packed ones.
_lock = threading.RLock()
# A child process has no thread that would release it. typeshed does not know the method.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_weak: Any = StorageWeakRef  # torch declares no types for it


@dataclass(frozen=True)
class Options:
    """The arguments of `install`."""

    dispatcher: str | None = None
    experts: str | None = None
    quant: QuantScheme = field(default_factory=lambda: scheme("none"))
    free_original: bool = False
    graph_tokens: int = 16
    batch_invariant: bool = False


class Form(NamedTuple):
    """The properties of a call that a module is packed for, besides its parameters.

    dtype: of the tokens. autocast: the dtype to compute in, if not the weights'.
    training: the call has gradients. adapters: the room that the call's adapters (LoRA) need.
    """

    dtype: torch.dtype
    top_k: int
    on_input: bool
    autocast: torch.dtype | None = None
    training: bool = False
    adapters: AdapterSlots | None = None


@dataclass(frozen=True)
class Packed:
    """A packed module. A call keeps its Packed even if another thread repacks."""

    seen: tuple[Any, ...]  # the state of the parameters; see `_seen`
    storages: list[StorageWeakRef]  # keep identities in `seen` from being given to other storages
    kernel: ModularKernel
    weights: PackedWeights
    eager: Callable[..., Tensor]  # computes a call
    graphed: graphs.Graphed | None  # the same, and replays small calls as CUDA graphs
    interleaved: bool  # gate and up alternate in the parameters


@dataclass(frozen=True)
class Trained:
    """The kernel of a module with trainable weights, and what it was chosen for."""

    seen: tuple[Any, ...]  # what the kernel was chosen for
    kernel: ModularKernel
    interleaved: bool  # gate and up alternate


class Layer:
    """The kernel and packed weights of one module. Copies of the module start without one."""

    options = Options()
    numbered: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
    _kernels: dict[tuple[Any, ...], ModularKernel] = {}  # by the problem and what chose for it
    _count = itertools.count()

    def __init__(self, module: nn.Module) -> None:
        self.number = next(self._count)
        self.packed: Packed | None = None
        self._trained: Trained | None = None
        self._refused: tuple[Any, str] | None = None  # a state without gradients, and the reason
        # Whether calls can be captured in a CUDA graph: a plain value, which dynamo guards.
        self.graph_safe = False
        self._module = weakref.ref(module)
        self.numbered[self.number] = self

    @property
    def kernel(self) -> ModularKernel | None:
        """The kernel, if the module has run."""
        used = self.packed or self._trained
        return None if used is None else used.kernel

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @classmethod
    def of(cls, module: nn.Module) -> Layer:
        """Return the module's layer, which the first call creates."""
        layer: Layer | None = vars(module).get(ATTRIBUTE)
        if layer is None or layer._module() is not module:
            with _lock:
                layer = vars(module).get(ATTRIBUTE)
                if layer is None or layer._module() is not module:
                    layer = vars(module)[ATTRIBUTE] = cls(module)
        return layer

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, Layer]:
        """Return the layers of ``model`` that have run by their modules' names."""
        found = {name: vars(m).get(ATTRIBUTE) for name, m in model.named_modules()}
        return {name: x for name, x in found.items() if x is not None and x.kernel is not None}

    @classmethod
    def forget(cls, layers: Iterable[Layer] | None = None) -> None:
        """Drop the packed weights of ``layers``; None drops all of them, and all kernels. Raises
        WeightsError if a living module has no other weights."""
        with _lock:
            chosen = list(cls.numbered.values() if layers is None else layers)
            lost = [x for x in chosen if x.packed is not None and _freed(x._module())]
            if lost:
                raise WeightsError(
                    f"{len(lost)} layer(s) of a model have only packed weights, because of "
                    "install(free_original=True), and would lose them: delete that model first"
                )
            for layer in chosen:
                layer._drop()
                layer._trained = layer._refused = None
            if layers is None:
                cls._kernels.clear()

    def run(
        self, x: Tensor, ids: Tensor, topk_weights: Tensor, on_input: bool, replays: bool = False
    ) -> Tensor:
        """Compute a call, (T, H) -> (T, H), and pack the module first if needed.

        replays: the call may replay a CUDA graph, which shares its output (see `Graphed`).
        """
        packed = self.prepare(Form(x.dtype, ids.shape[1], on_input))
        call = packed.graphed if replays and packed.graphed is not None else packed.eager
        return call(x, ids, topk_weights)

    def differentiate(self, x: Tensor, ids: Tensor, topk_weights: Tensor, on_input: bool) -> Tensor:
        """Compute a call with gradients to the inputs and to parameters that require one.

        Where moekit has no gradients, the call is computed and its backward raises the reason.
        """
        module, device = self._module(), x.device.type
        assert module is not None
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        form = Form(x.dtype, ids.shape[1], on_input, autocast, training=True)
        state, refused = (_seen(module, form), _trainable(module)), self._refused
        if refused is None or refused[0] != state:
            try:
                call = self._differentiable(module, form)
            except MoekitError as error:
                refused = state, f"moekit cannot train {type(module).__name__}: {error}"
                self._refused = refused
            else:
                return call(x, ids, topk_weights)
        with torch.no_grad():
            out = self.run(x, ids, topk_weights, on_input)
        return _without_backward(refused[1], out, x, topk_weights, *_parameters(module))

    def adapt(self, x: Tensor, ids: Tensor, topk_weights: Tensor, on_input: bool) -> Tensor:
        """Compute a call with the adapters of this forward, over frozen weights.

        Raises MoekitError if moekit cannot take the adapters.
        """
        module, device = self._module(), x.device.type
        assert module is not None
        if any(p.requires_grad for p in _parameters(module)):
            raise WeightsError("the weights below the adapters require a gradient: freeze them")
        operands = operands_of(module)
        inputs = [x, topk_weights, *(p for o in operands.values() for p in o.parameters)]
        training = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        form = Form(x.dtype, ids.shape[1], on_input, autocast, training, slots_of(operands))
        packed = self.prepare(form)
        problem = packed.kernel.problem
        stack = stack_of(operands, problem, packed.interleaved, x.device)
        weights = replace(packed.weights, adapters=stack)
        sentinels = _has_sentinels(module, on_input)
        return _compute(packed.kernel, weights, sentinels, x, ids, topk_weights)

    def _differentiable(self, module: nn.Module, form: Form) -> Callable[..., Tensor]:
        """Return what computes a call. Only frozen weights are packed."""
        if not _trainable(module):
            return self.prepare(form).eager
        (weights, _), trained = weights_of(module), self._trained
        seen = form, [(t.shape, t.dtype, t.device) for t in weights.tensors().values()]
        if trained is None or trained.seen != seen:
            with _lock, torch.no_grad():
                problem, found = read(
                    module, form.dtype, form.top_k, self.options.quant, form.on_input
                )
                if problem.quant.weight is not None:
                    raise WeightsError(
                        f"its parameters require a gradient, and weights in {problem.quant.name} "
                        "have none: freeze them (requires_grad_(False)), or train them unquantized"
                    )
                kernel = self._kernel(problem, weights.w13.device, form)
                trained = self._trained = Trained(seen, kernel, found.interleaved)
        if self.packed is not None:
            with _lock:
                self._drop()  # which the next step of an optimizer would outdate
        kernel, problem = trained.kernel, trained.kernel.problem
        weights = converted(replace(weights, interleaved=trained.interleaved), problem)
        weights = weights.canonical(problem)._map(Tensor.contiguous)
        return partial(_compute, kernel, weights, _has_sentinels(module, form.on_input))

    def _drop(self) -> None:
        packed, self.packed = self.packed, None
        if packed is not None and packed.kernel.problem.device.type != "cpu":
            device = _tensors(packed.weights)[0].device
            torch.get_device_module(device).synchronize(device)  # any stream may still read them

    # -- packing --------------------------------------------------------------------------------

    def prepare(self, form: Form) -> Packed:
        """Return the packed module; pack it unless its parameters are unchanged."""
        module, packed = self._module(), self.packed
        assert module is not None
        if not _serves(packed, module, form):
            with _lock:
                packed = self.packed  # another thread may have packed it while this one waited
                if not _serves(packed, module, form):
                    packed = None
                    packed = self.packed = self._pack(module, form)
                    self.graph_safe = not graphs.unsupported(packed.kernel)
        assert packed is not None
        return packed

    def _kernel(self, problem: MoEProblem, device: torch.device, form: Form) -> ModularKernel:
        """Return the kernel for a problem that `read` returned, which equal layers share."""
        options = self.options
        problem = problem.replace(
            dtype=form.autocast or problem.dtype,
            batch_invariant=options.batch_invariant,
            training=form.training,
            adapters=form.adapters,
        )
        key = problem, device, *map(os.environ.get, SWITCHES)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = compose(problem, options.dispatcher, options.experts)
            self._kernels[key] = kernel
            if options.graph_tokens and (reasons := graphs.unsupported(kernel)):
                logger.debug("moekit: small calls use no CUDA graphs: %s", "; ".join(reasons))
        return kernel

    def _pack(self, module: nn.Module, form: Form) -> Packed:
        options = self.options
        with torch.inference_mode(False), torch.no_grad():
            problem, weights = read(module, form.dtype, form.top_k, options.quant, form.on_input)
            kernel = self._kernel(problem, weights.w13.device, form)
            self._drop()  # before packing, so that there is only one packed copy
            problem, interleaved = kernel.problem, weights.interleaved
            weights = converted(weights.detach(), problem)
            try:
                packed = kernel.pack(weights)
            except WeightsError as error:
                what = f"{type(module).__name__} in {problem.quant.name}"
                raise WeightsError(f"moekit cannot run {what}: {error}") from error
            del weights
            if options.free_original:
                _free(module, packed)
        eager, graphed = (
            partial(_compute, kernel, packed, _has_sentinels(module, form.on_input)),
            None,
        )
        if options.graph_tokens and not graphs.unsupported(kernel):
            graphed = graphs.Graphed(eager, options.graph_tokens)
        storages = [_weak(p.untyped_storage()) for p in _parameters(module)]
        return Packed(_seen(module, form), storages, kernel, packed, eager, graphed, interleaved)

    def storages(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return bytes by storage, of the parameters and of the packed weights."""
        module = self._module()
        assert module is not None
        packed = [] if self.packed is None else _tensors(self.packed.weights)
        return _storages(_parameters(module)), _storages(packed)


def _serves(packed: Packed | None, module: nn.Module, form: Form) -> bool:
    """Return whether a packed module serves a call."""
    seen = _seen(module, form)
    if packed is None or packed.seen[1:] != seen[1:]:
        return False
    if form.adapters not in (None, packed.kernel.problem.adapters):
        return False
    trains = packed.kernel.problem.training
    if packed.seen[0] == seen[0] and trains == form.training:
        return True
    # Inputs are converted where nothing else can be packed. In train mode, calls without
    # gradients (of checkpointed layers) do not replace what the next one with gradients needs.
    keeps = trains > form.training and module.training
    return keeps or (trains >= form.training and _freed(module))


def _has_sentinels(module: nn.Module, on_input: bool) -> bool:
    """Return whether transformers gives experts of other ranks an id past the last one.

    Versions without the flag may do so whenever there are several ranks.
    """
    spread = dist.is_available() and dist.is_initialized()
    return bool(getattr(module, "_is_expert_parallel", spread)) and not on_input


def _compute(
    kernel: ModularKernel,
    weights: Any,
    sentinels: bool,
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return the module's output (T, H) in x's dtype.

    weights: packed, or ExpertWeights for a kernel that trains.
    sentinels: ids past the last expert mean that this rank has no expert for the assignment.
    """
    problem = kernel.problem
    if sentinels:
        ids = ids.masked_fill(ids >= problem.num_experts, -1)
    routing = Routing(topk_weights.float(), ids)
    converts = x.dtype != problem.dtype
    given, into = (x.to(problem.dtype), None) if converts else (x, out)
    made = kernel(given, weights, routing, out=into)
    if not converts:
        return made
    return made.to(x.dtype) if out is None else out.copy_(made)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _trainable(module: nn.Module) -> bool:
    """Return whether a parameter requires a gradient, or is computed in each forward (LoRA)."""
    return hasattr(module, "parametrizations") or any(p.requires_grad for p in _parameters(module))


class _WithoutBackward(torch.autograd.Function):
    """The output of a call that moekit cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, reason: str, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.reason = reason
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise Unsupported(ctx.reason, [ctx.reason])


_without_backward: Callable[..., Tensor] = _WithoutBackward.apply  # which torch does not type


def _tensors(weights: PackedWeights) -> list[Tensor]:
    return [*weights.experts.values(), *weights.shared.values()]


def _seen(module: nn.Module, form: Form) -> tuple[Any, ...]:
    """Return a value that changes if a parameter is replaced, moved, reallocated or written."""
    seen: list[Any] = [(form.dtype, form.autocast), form.top_k]
    for p in _parameters(module):
        version = 0 if p.is_inference() else p._version
        # A view of the same memory is another parameter.
        seen.append((p.untyped_storage()._cdata, p.data_ptr(), p.shape, p.stride(), version))
    return tuple(seen)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of every storage that has data, by its identity."""
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return {s._cdata: s.nbytes() for s in storages}


# -- freed parameters --------------------------------------------------

_FREED = "the experts' parameters were freed after packing (install(free_original=True))"


def _freed(module: nn.Module | None) -> bool:
    return module is not None and any(p.is_meta for p in _parameters(module))


def _free(module: nn.Module, weights: PackedWeights) -> None:
    """Replace the parameters that ``weights`` does not share by meta tensors."""
    kept = _storages(_tensors(weights))
    for name, p in module._parameters.items():
        if p is not None and p.untyped_storage()._cdata not in kept:
            empty = torch.empty_like(p, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    if _freed(module) and _refuse_to_save not in module._state_dict_pre_hooks.values():
        hooked: Any = module  # torch declares no types for these
        hooked.register_state_dict_pre_hook(_refuse_to_save)
        hooked.register_load_state_dict_pre_hook(_refuse_to_fill)


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if _freed(module):
        raise WeightsError(f"{prefix.rstrip('.')} has no weights to save: {_FREED}")


def _refuse_to_fill(module: nn.Module, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
    if _freed(module) and not metadata.get("assign_to_params_buffers", False):
        raise WeightsError(
            f"{prefix.rstrip('.')} has no parameters to load into: {_FREED}; pass assign=True to "
            "load_state_dict()"
        )
