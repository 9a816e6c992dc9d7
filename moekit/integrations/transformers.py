"""moekit as an experts implementation of transformers.

    import moekit.integrations.transformers

    moekit.integrations.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moekit")

This works for models whose experts use transformers' experts interface, and for Llama 4, whose
experts do not. Models that moekit cannot compute exactly are refused by name.

A layer is packed at its first call; `memory` returns how many bytes that takes. Weights that
change later (by load_state_dict, ``to``, an optimizer or a new parameter) are packed again at the
next call. torch does not record writes through ``parameter.data`` or to parameters made in
inference mode, and a CUDA graph that replays checks nothing: call `repack` after such changes.

There is no backward pass: layers run with gradients enabled, but ``backward()`` raises. Under
torch.compile a layer is one operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moekit.checkpoint.schema import EXPERTS
from moekit.discovery.registry import registry
from moekit.errors import InvalidProblem, MoekitError, Unsupported
from moekit.integrations.forward import experts_forward
from moekit.integrations.packed_layer import Layer, Options
from moekit.kernel import ModularKernel
from moekit.problem.quant import scheme
from moekit.untrusted import arguments as validate
from moekit.untrusted.arguments import FLAG, accept, instance, optional, size

NAME = "moekit"


_KINDS = {
    "dispatcher": optional(validate.NAME),
    "experts": optional(validate.NAME),
    "free_original": FLAG,
    "graph_tokens": size(0, 2**16),
    "batch_invariant": FLAG,
}
_MODEL = {"model": instance("a torch.nn.Module", nn.Module)}


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
            layer.
        quant: Quantize unquantized weights to this scheme when packing.
        free_original: If packing copies weights, drop the parameters that they were copied from.
            These become meta tensors, so the model cannot be saved, moved or run by another
            implementation.
        graph_tokens: On CUDA, replay eager calls of at most this many tokens as CUDA graphs from
            the third call of a size on, if the backends allow it; 0 for none.
            `moekit.runtime.graphs.Graphed` documents what this requires of code on other streams.
        batch_invariant: The experts give a token the same bits in every call, as `MoEProblem`
            promises. The model's other modules are not included.

    Raises:
        MoekitError: The installed transformers has no experts interface.
        UnknownBackend: There is no backend of that name.
        InvalidProblem: The scheme is unknown, or needs activation scales from a checkpoint.
        WeightsError: Packing again is impossible, because the weights of a living model were
            freed.
    """
    accept(_KINDS, locals())
    found = scheme(quant)
    if found.activation is not None and found.activation.static:
        raise InvalidProblem(
            f"quant={quant!r} needs activation scales from a checkpoint; choose a dynamic scheme"
        )
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
    accept(_MODEL, locals())
    found = {name: layer.kernel for name, layer in Layer.find(model).items()}
    return {name: kernel for name, kernel in found.items() if kernel is not None}


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
        """The sum of both."""
        return self.parameters + self.packed


def memory(model: nn.Module) -> ExpertMemory:
    """Return the memory of the experts of ``model``. A layer counts from its first call on."""
    accept(_MODEL, locals())
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
    accept(_MODEL, locals())
    Layer.forget(Layer.find(model).values())


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
        base = _import("modeling_utils").PreTrainedModel
        choose = base.get_correct_experts_implementation
    except (ImportError, AttributeError) as error:
        raise MoekitError(
            "no transformers with the experts interface (transformers.integrations.moe) is "
            f"installed: pip install 'moekit[hf]' ({type(error).__name__}: {error})"
        ) from error
    _register(interface)
    fp8 = _import("integrations.finegrained_fp8")
    if hasattr(fp8, "FP8ExpertsInterface"):
        _register(fp8.FP8ExpertsInterface)
    _set(base, "get_correct_experts_implementation", _choosing(choose))
    llama4 = _import("models.llama4.modeling_llama4")
    _set(llama4.Llama4TextMoe, "forward", _llama4_block(llama4.Llama4TextMoe.forward))
    _set(llama4.Llama4PreTrainedModel, "_can_set_experts_implementation", _yes)
    _set(llama4.Llama4PreTrainedModel, "_grouped_mm_can_dispatch", _not_llama4)


def _register(interface: Any) -> None:
    interface.register(NAME, experts_forward)
    _undo.append(lambda: interface._global_mapping.pop(NAME, None))


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's check of the requested implementation.

    transformers accepts any registered one, even if the model's experts would not use it.
    """

    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        if requested_experts != NAME:
            return original(self, requested_experts)
        counts = {name: getattr(self.config, name, None) for name in EXPERTS}
        routed = {n: c for n, c in counts.items() if isinstance(c, int) and c > 1}
        if routed and not self._can_set_experts_implementation():
            reason = (
                f"{type(self).__name__} has experts ({routed}) that do not go through "
                "transformers' experts interface"
            )
            raise Unsupported(
                f"experts_implementation={NAME!r}: {reason}; leave the argument out", [reason]
            )
        return NAME

    return get_correct_experts_implementation


_yes = classmethod(lambda cls: True)


def _not_llama4(self: Any) -> bool:
    raise ValueError(f"{type(self).__name__} supports its own experts and moekit's only")


def _llama4_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Llama 4's block, which computes all experts for every token."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if self.shared_expert.config._experts_implementation != NAME:
            return original(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        topk_weights, ids = scores.topk(self.top_k, dim=1)
        routed = experts_forward(self.experts, x, ids, topk_weights, weight_on_input=True)
        return self.shared_expert(x).add_(routed), logits

    return forward
