"""An experts module of transformers, run by a moekit kernel on weights packed once.

`experts_forward` is a call. What moekit keeps between calls is a `Layer`, on the module itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moekit.contract import PackedWeights, Routing
from moekit.errors import MoekitError, Unsupported, WeightsError
from moekit.integrations.experts_module import read
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.problem.quant import QuantScheme, scheme
from moekit.runtime import graphs
from moekit.selection.select import compose

logger = logging.getLogger("moekit")

_ATTRIBUTE = "_moekit_layer"
# One thread at a time packs, and drops what was packed.
_lock = threading.RLock()
_weak: Any = StorageWeakRef  # untyped


@dataclass(frozen=True)
class Options:
    """What `install` was told."""

    dispatcher: str | None = None
    experts: str | None = None
    quant: QuantScheme = field(default_factory=lambda: scheme("none"))
    free_original: bool = False
    graph_tokens: int = 16


@dataclass(frozen=True)
class Packed:
    """A module as it was packed: a call takes one, and stays with it whatever other threads do.

    seen: of the parameters, see `_seen`. storages: while these live, no other storage can be taken
    for one in ``seen``. graphed: replays small calls, where that is possible.
    """

    seen: tuple[Any, ...]
    storages: list[StorageWeakRef]
    kernel: ModularKernel
    weights: PackedWeights
    eager: Callable[..., Tensor]
    graphed: graphs.Graphed | None


class Layer:
    """A module's kernel and packed weights. Copies of the module start without one."""

    options = Options()
    _all: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
    _kernels: dict[tuple[MoEProblem, torch.device], ModularKernel] = {}
    _count = itertools.count()

    def __init__(self, module: nn.Module) -> None:
        self.number = next(self._count)
        self.packed: Packed | None = None
        self._module = weakref.ref(module)
        self._all[self.number] = self

    @property
    def kernel(self) -> ModularKernel | None:
        return None if self.packed is None else self.packed.kernel

    @property
    def weights(self) -> PackedWeights | None:
        return None if self.packed is None else self.packed.weights

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @classmethod
    def of(cls, module: nn.Module) -> Layer:
        layer: Layer | None = vars(module).get(_ATTRIBUTE)
        if layer is None or layer._module() is not module:
            with _lock:
                layer = vars(module).get(_ATTRIBUTE)
                if layer is None or layer._module() is not module:
                    layer = vars(module)[_ATTRIBUTE] = cls(module)
        return layer

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, Layer]:
        """The layers of ``model`` that are packed, by their modules' names."""
        found = {name: vars(m).get(_ATTRIBUTE) for name, m in model.named_modules()}
        return {name: x for name, x in found.items() if x is not None and x.packed is not None}

    @classmethod
    def forget(cls, layers: Iterable[Layer] | None = None) -> None:
        """Drops the packed weights of ``layers`` (None: of all, and their kernels too).

        Raises WeightsError where no others are left of a living module.
        """
        with _lock:
            chosen = list(cls._all.values() if layers is None else layers)
            if lost := sum(layer.packed is not None and layer.freed for layer in chosen):
                raise WeightsError(
                    f"{lost} layer(s) of a model have packed weights only, and would lose them "
                    "(install(free_original=True)): delete that model first"
                )
            for layer in chosen:
                layer._drop()
            if layers is None:
                cls._kernels.clear()

    def run(
        self, x: Tensor, ids: Tensor, topk_weights: Tensor, on_input: bool, replays: bool = False
    ) -> Tensor:
        """replays: it may be a replay, whose output is not the caller's alone (see `Graphed`)."""
        packed = self.prepare(x.dtype, ids.shape[1], on_input)
        call = packed.graphed if replays and packed.graphed is not None else packed.eager
        return call(x, ids, topk_weights)

    def _drop(self) -> None:
        packed, self.packed = self.packed, None
        if packed is not None and (device := packed.kernel.problem.device.type) != "cpu":
            torch.get_device_module(device).synchronize()  # any stream may still read the weights

    # -- packing --------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype, top_k: int, on_input: bool) -> Packed:
        """Packs, unless the module's parameters are packed as they are now."""
        module, packed = self._module(), self.packed
        assert module is not None
        if packed is None or packed.seen != _seen(module, dtype, top_k):
            with _lock:
                packed = self.packed  # by another thread, perhaps, while this one waited
                if packed is None or packed.seen != _seen(module, dtype, top_k):
                    self._drop()  # no two packed copies at a time
                    del packed
                    packed = self.packed = self._pack(module, dtype, top_k, on_input)
        return packed

    def _pack(self, module: nn.Module, dtype: torch.dtype, top_k: int, on_input: bool) -> Packed:
        options = self.options
        with torch.inference_mode(False), torch.no_grad():
            problem, weights = read(module, dtype, top_k, options.quant, on_input)
            key = problem, weights.w13.device
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = compose(problem, options.dispatcher, options.experts)
                self._kernels[key] = kernel
                if options.graph_tokens and (reasons := graphs.unsupported(kernel)):
                    logger.debug("moekit: no CUDA graphs of small calls: %s", "; ".join(reasons))
            packed = kernel.pack(weights)
            del weights
            if options.free_original:
                _free(module, packed)
        # transformers' expert parallelism gives experts of other ranks ids beyond the last; a
        # version without the flag may do so wherever there are ranks.
        spread = dist.is_available() and dist.is_initialized()
        sentinels = bool(getattr(module, "_is_expert_parallel", spread)) and not on_input
        eager, graphed = partial(_compute, kernel, packed, sentinels), None
        if options.graph_tokens and not graphs.unsupported(kernel):
            graphed = graphs.Graphed(eager, options.graph_tokens)
        storages = [_weak(p.untyped_storage()) for p in _parameters(module)]
        return Packed(_seen(module, dtype, top_k), storages, kernel, packed, eager, graphed)

    @property
    def freed(self) -> bool:
        """Whether a parameter of the module has no data."""
        module = self._module()
        return module is not None and _freed(module)

    def storages(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes by storage: the parameters', and those of the packed weights."""
        module = self._module()
        assert module is not None and self.packed is not None
        return _storages(_parameters(module)), _storages(_tensors(self.packed.weights))


def _compute(
    kernel: ModularKernel,
    weights: PackedWeights,
    sentinels: bool,
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The module's output (T, H) in x's dtype; sentinels: ids beyond the last stand for none."""
    problem = kernel.problem
    if sentinels:
        ids = ids.masked_fill(ids >= problem.num_experts, -1)
    routing = Routing(topk_weights.float(), ids)
    converts, index = x.dtype != problem.dtype, x.device.index
    given, into = (x.to(problem.dtype), None) if converts else (x, out)
    if index is None or index == torch.accelerator.current_device_index():
        made = kernel(given, weights, routing, out=into)
    else:
        with torch.accelerator.device_index(index):  # a model spread over devices
            made = kernel(given, weights, routing, out=into)
    if not converts:
        return made
    return made.to(x.dtype) if out is None else out.copy_(made)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _tensors(weights: PackedWeights) -> list[Tensor]:
    return [*weights.experts.values(), *weights.shared.values()]


def _seen(module: nn.Module, dtype: torch.dtype, top_k: int) -> tuple[Any, ...]:
    """Differs once a parameter has been replaced, moved, reallocated or written to."""
    return (
        dtype,
        top_k,
        *[
            (p.untyped_storage()._cdata, p.data_ptr(), 0 if p.is_inference() else p._version)
            for p in module._parameters.values()
            if p is not None
        ],
    )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of every storage that has data, by its identity."""
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return {s._cdata: s.nbytes() for s in storages}


# -- parameters that were copied and freed --------------------------------------------------

_FREED = "the experts' parameters were freed after packing (install(free_original=True))"


def _freed(module: nn.Module) -> bool:
    return any(p.device.type == "meta" for p in _parameters(module))


def _free(module: nn.Module, weights: PackedWeights) -> None:
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
        raise WeightsError(f"{prefix.rstrip('.')} has no weights to give: {_FREED}")


def _refuse_to_fill(module: nn.Module, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
    if _freed(module) and not metadata.get("assign_to_params_buffers", False):
        raise WeightsError(f"{prefix.rstrip('.')} cannot be written to: {_FREED}; pass assign=True")


# -- a call ---------------------------------------------------------------------------------


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weight_on_input: bool = False,
) -> Tensor:
    """What transformers calls: hidden_states (T, H), ids and weights (T, K) -> (T, H)."""
    needs_grad: list[Tensor] = []
    if torch.is_grad_enabled():
        inputs = (hidden_states, top_k_weights, *self.parameters(recurse=False))
        needs_grad = [t for t in inputs if t.requires_grad]
    if needs_grad or torch.compiler.is_compiling():
        top_k = int(top_k_index.shape[1])
        if _BINDS_MODULES or not torch.compiler.is_compiling():
            _bind(self, hidden_states.dtype, top_k, weight_on_input)
        elif getattr(self, _ATTRIBUTE, None) is None:
            raise Unsupported(f"this layer has not run yet: {_RUN_FIRST}", [_RUN_FIRST])
        else:
            number = getattr(self, _ATTRIBUTE).number
            _prepare(number, hidden_states.dtype, top_k, weight_on_input)
        # Read from the module, so that compiled code is bound to it by a guard.
        number = getattr(self, _ATTRIBUTE).number
        out: Tensor = _operator(
            hidden_states, top_k_index, top_k_weights, needs_grad, number, weight_on_input
        )
        return out
    layer = Layer.of(self)
    return layer.run(hidden_states, top_k_index, top_k_weights, weight_on_input, replays=True)


# Whether dynamo evaluates functions of modules while it compiles; 2.11 was seen not to.
_BINDS_MODULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_RUN_FIRST = "before torch 2.13, run the model once before torch.compile sees it"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _bind(module: nn.Module, dtype: torch.dtype, top_k: int, on_input: bool) -> None:
    """While code is compiled: gives the module its Layer, packed before any graph is captured."""
    with suppress(MoekitError):  # the call will raise it
        Layer.of(module).prepare(dtype, top_k, on_input)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare(number: int, dtype: torch.dtype, top_k: int, on_input: bool) -> None:
    """The same for a module that has its Layer."""
    with suppress(MoekitError):
        Layer._all[number].prepare(dtype, top_k, on_input)


@torch.library.custom_op("moekit::transformers_experts", mutates_args=())
def _operator(
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    needs_grad: Sequence[Tensor],
    number: int,
    on_input: bool,
) -> Tensor:
    """A layer as one operator: for torch.compile, and to refuse a gradient where it is asked for.

    number: the Layer's. needs_grad: what the gradient would flow to.
    """
    return Layer._all[number].run(x, ids, topk_weights, on_input)


@_operator.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    needs_grad: Sequence[Tensor],
    number: int,
    on_input: bool,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _no_backward(ctx: Any, grad: Tensor) -> Any:
    reason = "moekit has no backward pass"
    raise Unsupported(
        f"{reason}: train with model.set_experts_implementation('eager'), and run moekit "
        "under torch.inference_mode() or torch.no_grad()",
        [reason],
    )


_operator.register_autograd(_no_backward)
