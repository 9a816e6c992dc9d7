"""moekit as one of transformers' experts implementations.

    import moekit.integrations.transformers

    moekit.integrations.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moekit")

Models run whose experts go through transformers' experts interface, and Llama 4, whose do not;
what moekit cannot compute exactly is refused by name. A layer is packed at its first call;
`memory` says what that costs. Weights that change later (load_state_dict, ``to``, an optimizer's
step, a new parameter) are packed again at the next call. Torch keeps no record of writes through
``parameter.data`` and to parameters made in inference mode, and nothing is looked at when a CUDA
graph replays: call `repack` after those.

There is no backward pass: layers run with gradients enabled, but ``backward()`` raises. Under
torch.compile a layer is one operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moekit.discovery.registry import registry
from moekit.errors import InvalidProblem, MoekitError, Unsupported
from moekit.integrations.packed_layer import Layer, Options, experts_forward
from moekit.kernel import ModularKernel
from moekit.problem.quant import scheme
from moekit.untrusted import arguments as validate
from moekit.untrusted.arguments import FLAG, accept, instance, optional, size

NAME = "moekit"

# Config fields by which a model says that it has routed experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


_KINDS = {
    "dispatcher": optional(validate.NAME),
    "experts": optional(validate.NAME),
    "free_original": FLAG,
    "graph_tokens": size(0, 2**16),
}
_MODEL = {"model": instance("a torch.nn.Module", nn.Module)}


def install(
    *,
    dispatcher: str | None = None,
    experts: str | None = None,
    quant: str = "none",
    free_original: bool = False,
    graph_tokens: int = 16,
) -> None:
    """Makes ``experts_implementation="moekit"`` known to transformers. Idempotent.

    dispatcher, experts: backends to insist on (default: MOEKIT_DISPATCHER, MOEKIT_EXPERTS, else
    the best for each layer). quant: quantize unquantized weights to this scheme when packing.
    free_original: where packing copies weights, drop the parameters they were copied from (they
    become meta tensors): such a model cannot be saved, moved or run by another implementation.
    graph_tokens: on CUDA, eager calls of so many tokens at most are replayed as CUDA graphs from
    their third time on, where the backends allow it; 0: none are. See `moekit.runtime.graphs.Graphed` for
    what that asks of code on other streams.
    Installed again with other options, every layer is packed anew.

    Raises MoekitError without a transformers that has the experts interface; UnknownBackend;
    InvalidProblem for a scheme that is unknown or needs activation scales from a checkpoint;
    WeightsError if packing anew is impossible, as the weights of a living model were freed.
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
    options = Options(dispatcher, experts, found, free_original, graph_tokens)
    if options != Layer.options:
        Layer.forget()
        Layer.options = options
    if not _undo:
        _patch()


def uninstall() -> None:
    """Undoes `install` and drops packed weights: give models another implementation.

    Raises WeightsError if the weights of a living model were freed.
    """
    Layer.forget()
    Layer.options = Options()
    while _undo:
        _undo.pop()()


def kernels(model: nn.Module) -> dict[str, ModularKernel]:
    """The kernel of each experts module that has run, by module name. Equal layers share one."""
    accept(_MODEL, locals())
    found = {name: layer.kernel for name, layer in Layer.find(model).items()}
    return {name: kernel for name, kernel in found.items() if kernel is not None}


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of expert weights, on all devices, of the layers that have run.

    parameters: the model's own, unless freed. packed: what moekit holds besides them; 0 where the
    backend reads the parameters in place.
    """

    parameters: int
    packed: int

    @property
    def total(self) -> int:
        return self.parameters + self.packed


def memory(model: nn.Module) -> ExpertMemory:
    """What the experts of ``model`` occupy. A layer is packed, and counted, from its first call."""
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
    """Drops packed weights: the next call packs the parameters of ``model`` as they are now.

    Raises WeightsError where they were freed.
    """
    accept(_MODEL, locals())
    Layer.forget(Layer.find(model).values())


# -- what changes in transformers -----------------------------------------------------------

_undo: list[Callable[[], object]] = []


def _set(owner: Any, name: str, value: Any) -> None:
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
    """A model's check of the implementation it is given. transformers takes any registered one,
    used or not."""

    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        if requested_experts != NAME:
            return original(self, requested_experts)
        counts = {name: getattr(self.config, name, None) for name in _COUNTS}
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
    raise ValueError(f"{type(self).__name__} runs its own experts, or moekit's, not grouped_mm")


def _llama4_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """Llama 4's own block runs every expert on every token, scaled by 0 where not chosen."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if self.shared_expert.config._experts_implementation != NAME:
            return original(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        topk_weights, ids = scores.topk(self.top_k, dim=1)
        routed = experts_forward(self.experts, x, ids, topk_weights, weight_on_input=True)
        return self.shared_expert(x).add_(routed), logits

    return forward
