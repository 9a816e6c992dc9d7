"""moekit as an experts implementation of transformers.

    moekit.integrations.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moekit")

Models whose experts moekit cannot compute exactly are refused by name.

A layer is packed at its first call; `memory` returns how many bytes that takes. Weights that
change later (by load_state_dict, ``to``, an optimizer or a new parameter) are packed again at the
next call. torch does not record writes through ``parameter.data`` or to parameters made in
inference mode, and a CUDA graph that replays checks nothing: call `repack` after such changes.

Where gradients are enabled and something requires one, a layer reads its parameters in each call,
and gradients flow to them, the tokens and the router weights. Frozen experts stay packed, also
quantized ones. Where there is no gradient (quantized weights, batch invariance), the call runs and
``backward()`` raises the reason. Under torch.compile a layer is one operator; with gradients it
breaks the graph.

The experts take PEFT's adapters on their parameters (`target_parameters`) as an operand: the base
stays frozen and packed, in any scheme, and nobody computes the product of B and A. If moekit cannot
do so, it raises the reason. With ``batch_invariant``, PEFT adds the product to the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moekit.checkpoint.schema import TOP_K
from moekit.discovery.registry import registry
from moekit.errors import InvalidInput, MoekitError
from moekit.integrations import peft
from moekit.integrations.forward import experts_forward
from moekit.integrations.models import NAME, OWN, asking, asks_for_moekit, experts_in, settle
from moekit.integrations.packed_layer import Layer, Options
from moekit.kernel import ModularKernel
from moekit.layer.routes import RoutingLog
from moekit.problem.quant import scheme


def install(
    *,
    dispatcher: str | None = None,
    experts: str | None = None,
    quant: str = "none",
    free_original: bool = False,
    graph_tokens: int = 16,
    batch_invariant: bool = False,
) -> None:
    """Register ``experts_implementation="moekit"`` with transformers. Idempotent.

    If it is installed already with other options, every layer is packed again.

    Args:
        dispatcher: Name of the dispatcher. Default: MOEKIT_DISPATCHER, else the best one.
        experts: Name of the experts backend. Default: MOEKIT_EXPERTS, else the best one for each
            layer. Both variables are read whenever a layer is packed.
        quant: Quantize unquantized weights to this scheme when packing.
        free_original: If packing copies weights, drop the parameters that they were copied from.
            These become meta tensors, so the model cannot be saved, moved, trained or run by
            another implementation.
        graph_tokens: On CUDA, replay eager calls of at most this many tokens as CUDA graphs from
            the third call of a size on, if the backends allow it; 0 for none.
            `moekit.runtime.graphs.Graphed` documents what this requires of code on other streams.
        batch_invariant: The experts give a token the same bits in every call, as `MoEProblem`
            promises. The model's other modules are not included. Such calls have no backward.

    Raises:
        MoekitError: The installed transformers has no experts interface.
        UnknownBackend: There is no backend of that name.
        InvalidProblem: The scheme is unknown.
        WeightsError: Packing again is impossible, because the weights of a living model were
            freed.
    """
    found = scheme(quant)
    if dispatcher is not None:
        registry().dispatcher(dispatcher)
    if experts is not None:
        registry().expert(experts)
    options = Options(dispatcher, experts, found, free_original, graph_tokens, batch_invariant)
    if options != Layer.options:
        Layer.forget()
        Layer.options = options
    if not _undo:
        _patch()


def uninstall() -> None:
    """Undo `install` and drop packed weights; models then need another implementation.

    Raises:
        WeightsError: The weights of a living model were freed.
    """
    Layer.forget()
    Layer.options = Options()
    while _undo:
        _undo.pop()()


def kernels(model: nn.Module) -> dict[str, ModularKernel]:
    """Return the kernel of each experts module that has run, by module name.

    Layers with equal problems share a kernel.
    """
    return {name: kernel for name, x in Layer.find(model).items() if (kernel := x.kernel)}


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of expert weights of the layers that have run, on all devices.

    Attributes:
        parameters: The model's own parameters, unless they were freed.
        packed: What moekit holds in addition; 0 if the backend reads the parameters in place.
    """

    parameters: int
    packed: int

    @property
    def total(self) -> int:
        return self.parameters + self.packed


def memory(model: nn.Module) -> ExpertMemory:
    """Return the memory of the experts of ``model``. A layer counts from its first call on."""
    parameters: dict[int, int] = {}
    packed: dict[int, int] = {}
    for layer in Layer.find(model).values():
        own, held = layer.storages()
        parameters |= own
        packed |= held
    copies = [nbytes for storage, nbytes in packed.items() if storage not in parameters]
    return ExpertMemory(sum(parameters.values()), sum(copies))


def repack(model: nn.Module) -> None:
    """Drop packed weights, so that the next call packs the current parameters of ``model``.

    Raises:
        WeightsError: Parameters were freed.
    """
    Layer.forget(Layer.find(model).values())


def routing_log(model: nn.Module, max_tokens: int) -> RoutingLog:
    """Return a log of the experts that a model's routers choose. They use it until `detach()`.

    Any experts implementation works. The log has no layers whose experts depend only on the token
    (hash routing of DeepSeek-V4). torch.compile breaks its graph at each MoE block. Raises
    InvalidInput if the model has no MoE layer, or if moekit does not know how a layer routes.
    """
    blocks: dict[str, Any] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for path, module, owner in experts_in(model, model):
        block: Any = model.get_submodule(path.rpartition(".")[0])
        block = module if hasattr(module, "router") else block
        if hasattr(block, "gradient_checkpointing"):  # its forward checkpoints, so go inside
            block = getattr(block, "router", None)
        if hasattr(getattr(block, "gate", None), "tid2eid"):
            continue
        config = owner.config.get_text_config()
        config = getattr(config, "ffn_config", config)
        ks = [k for n in (*TOP_K, "moe_top_k") if isinstance(k := getattr(config, n, None), int)]
        experts = getattr(module, "total_experts", getattr(module, "num_experts", None))
        if block is None or experts is None or not ks:
            raise InvalidInput(f"layer {path!r}: its router, number of experts or top_k is unknown")
        blocks[path], sizes[path] = block, (experts, ks[0])
    log = RoutingLog(sizes, max_tokens, next(model.parameters()).device)
    disable: Any = torch.compiler.disable
    for path, block in blocks.items():
        if isinstance(block.forward, _Logged):
            block.forward.log.detach()
        log.undo.append(partial(setattr, block, "forward", block.forward))
        block.forward = _Logged(disable(log[path].run), block.forward)
        block.forward.block, block.forward.log = block, log
    return log


class _Logged(partial[Any]):
    block: Any
    log: RoutingLog

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo[id(self.block)].forward  # a copy of a block has no log


# -- patches of transformers -----------------------------------------------------------

_undo: list[Callable[[], object]] = []


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and remember how to undo it."""
    if name in vars(owner):
        before = vars(owner)[name]
        _undo.append(lambda: setattr(owner, name, before))
    else:
        _undo.append(lambda: delattr(owner, name))
    setattr(owner, name, value)


def _import(name: str) -> Any:
    return importlib.import_module(f"transformers.{name}")


def _patch() -> None:
    try:
        interface = _import("integrations.moe").ExpertsInterface
        fp8 = _import("integrations.finegrained_fp8").FP8ExpertsInterface
    except (ImportError, AttributeError) as error:
        raise MoekitError(
            "no transformers with the experts interface (transformers.integrations.moe) is "
            f"installed: pip install 'moekit[hf]' ({type(error).__name__}: {error})"
        ) from error
    for each in (interface, fp8):
        each.register(NAME, experts_forward)
        _undo.append(partial(each._global_mapping.pop, NAME, None))
    for (model, name), ours in OWN.items():
        with suppress(ImportError, AttributeError):  # another transformers may lack the model
            own = getattr(_import(f"models.{model}.modeling_{model}"), name)
            _set(own, "forward", asking(own.forward, ours))
            _set(own, "config", None)
    with suppress(ImportError):
        peft.patch(_set, _takes_adapters, lambda module: Layer.forget([Layer.of(module)]))
    base = _import("modeling_utils").PreTrainedModel
    _set(base, "post_init", _settling(base.post_init))
    _set(base, "set_experts_implementation", _switching(base.set_experts_implementation))
    quantizer = _import("quantizers.base").HfQuantizer
    _set(quantizer, "preprocess_model", _settling(quantizer.preprocess_model))


def _takes_adapters(module: nn.Module) -> bool:
    return asks_for_moekit(module) and not Layer.options.batch_invariant


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what a model calls once its modules exist, or what quantizes the modules of a model."""

    def settled(self: Any, *args: Any, **given: Any) -> Any:
        result = original(self, *args, **given)
        model = given.get("model", args[0] if args else self)
        if NAME in model.get_experts_implementation().values():
            settle(model)
        return result

    return settled


def _switching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the choice for a model that exists, which transformers ignores for some models."""

    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        asked, before = experts_implementation, self.get_experts_implementation()
        original(self, asked)
        if NAME in (*before.values(), *(asked.values() if isinstance(asked, dict) else [asked])):
            self.config._experts_implementation = asked
            settle(self)

    return set_experts_implementation
