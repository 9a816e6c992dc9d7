"""`FusedMoE`, the layer that model authors use. `moekit.layer.flow` computes its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moekit.contract import PackedWeights, Routing
from moekit.errors import MoekitError
from moekit.layer import ops, parameters
from moekit.layer.flow import LayerFlow, LayerInputs
from moekit.layer.parallelism import LayerParallelism
from moekit.layer.ranks import LayerRanks
from moekit.layer.replicas import Placement, check_replicas, to_physical
from moekit.layer.router import Router, RoutingConfig
from moekit.lora.stack import Stack
from moekit.problem import AdapterSlots, MoEProblem
from moekit.problem.activation import Activation
from moekit.problem.device import DeviceSpec
from moekit.problem.problem import summary
from moekit.problem.quant import QuantScheme
from moekit.problem.weights import ExpertWeights
from moekit.runtime.checks import check_tokens
from moekit.runtime.device import on_device
from moekit.selection.select import compose

if TYPE_CHECKING:
    from moekit.checkpoint import Checkpoint, ExpertNames

_SHOWN = 4  # experts of a rank in the layer's repr


class FusedMoE(nn.Module):
    """A Mixture-of-Experts layer with vLLM's argument names, for inference and for training::

        layer = moekit.FusedMoE(128, 8, 2048, 768, device="cuda")
        layer.load_weights(moekit.ExpertWeights(w13, w2))
        out = layer(x, router_logits)

    For inference, weights are no parameters: `load_weights` packs them for the chosen backend,
    state_dict() is empty, and there is no backward. With ``trainable=True``, this rank's experts
    are the parameters ``w13``, ``w2``, ``w13_bias`` and ``w2_bias``, and gradients also flow to x
    and to what routes. A layer runs where it was made: it cannot be moved, copied or pickled.

    Construction is collective where ranks exchange anything, and so are calls. Each rank may pass
    any number of tokens, also none.

    Args:
        num_experts, intermediate_size: Of the whole model.
        params_dtype: Dtype of activations and unquantized weights.
        quant, has_bias, apply_router_weight_on_input: As in `MoEProblem`.
        activation: A name, or an `Activation` with its clamp; "silu_no_mul" has no gate.
        max_num_tokens: Capacity of a kernel call. Calls with more tokens run in chunks.
        batch_invariant: A token's output has the same bits in every call, as `MoEProblem` promises.
            Routing is included; a custom routing function, shared experts and the caller's logits
            must be invariant themselves.
        trainable: Make the weights parameters, with the values that `torch.nn.Linear` begins with.
            Calls compute in params_dtype, in autocast's dtype, or in the one that FSDP casts to.
        adapters: Room for adapters (LoRA). ``layer.adapters``, a `moekit.lora.Stack`, holds them.
            In a trainable layer their matrices may require gradients, and the weights must not.
        shared_experts: (T, H) -> (T, H), added to every token's output. It runs on a separate
            stream while tokens travel, and stays its owner's: it is no submodule of the layer.
        dispatcher, experts, checked, peer_timeout: As in `moekit.compose`.
        device: Where the layer runs. Default: this machine's accelerator, else the CPU.
        prefix: The layer's name, for people.
        keywords: Fields of `RoutingConfig`, which say how experts are chosen, such as
            ``renormalize`` or ``num_expert_group``; and of `LayerParallelism`, which spread the
            layer over ranks, such as ``tp_size`` or ``reduce_results``.

    Raises:
        InvalidProblem: Arguments do not fit each other.
        GroupMismatch: The process group does not fit, or ranks passed different arguments.
        BackendError: No backend can run the problem; see `moekit.compose`.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        params_dtype: torch.dtype = torch.bfloat16,
        quant: QuantScheme | str = "none",
        activation: Activation | str = "silu",
        has_bias: bool = False,
        apply_router_weight_on_input: bool = False,
        max_num_tokens: int | None = None,
        batch_invariant: bool = False,
        trainable: bool = False,
        adapters: AdapterSlots | None = None,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
        dispatcher: str | None = None,
        experts: str | None = None,
        checked: bool | None = None,
        peer_timeout: float = 60.0,
        device: torch.device | str | None = None,
        prefix: str | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        routing = RoutingConfig(**_taken(RoutingConfig, keywords))
        parallelism = LayerParallelism(**_taken(LayerParallelism, keywords))
        if keywords:
            raise TypeError(f"FusedMoE got an unexpected keyword argument {next(iter(keywords))!r}")
        self.number, self.device = ops.register(self), _indexed(device)
        self.prefix = prefix or f"fused_moe.{self.number}"
        parallel, sequence = parallelism.config(), parallelism.is_sequence_parallel
        self.problem = MoEProblem(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=params_dtype,
            activation=activation,
            quant=quant,
            has_bias=has_bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            num_redundant_experts=parallelism.num_redundant_experts,
            max_num_tokens=max_num_tokens,
            batch_invariant=batch_invariant,
            training=trainable,
            adapters=adapters,
            parallel=replace(parallel, dp_size=parallel.num_ranks) if sequence else parallel,
            device=self.device,
        )
        if trainable:
            parameters.check(self.problem, parallelism)
        self.router = Router(routing.on(self.device), num_experts, top_k, batch_invariant)
        strategy = parallelism.expert_placement_strategy
        self.placement = Placement.default(self.problem, strategy)
        common = (
            f"{strategy}, reduce_results={parallelism.reduce_results}, "
            f"is_sequence_parallel={sequence}, zero_expert_num={routing.zero_expert_num}, "
            f"shared_experts={shared_experts is not None}"
        )
        with on_device(self.device):
            self.ranks = LayerRanks(self.problem, parallel, parallelism, common, peer_timeout)
            self._compose = partial(
                compose,
                dispatcher=dispatcher,
                experts=experts,
                group=self.ranks.group,
                checked=checked,
                peer_timeout=peer_timeout,
            )
            self.kernel = self._compose(self.problem)
        specs = (self.kernel.dispatcher.spec, self.kernel.experts.spec)
        # Whether calls can be captured in a CUDA graph.
        self.graph_safe = all(s.graph_safe for s in specs) and not self.kernel.checked
        self.packed: PackedWeights | None = None
        self.adapters: Stack | None = None
        if adapters is not None:
            self.adapters = Stack(self.problem, self.device, self.local_experts)
        if trainable:
            parameters.add(self, self.problem, self.device)
            # Not a decorator: it imports dynamo.
            torch.compiler.assume_constant_result(ops.prepare)  # type: ignore[no-untyped-call]
        self.flow = LayerFlow(self.prefix, self.router, self.ranks, self.kernel, shared_experts)
        self._flows = {self.problem.dtype: self.flow}
        if self.placement.physical_to_logical != tuple(range(num_experts)):
            self.set_replicas(self.placement.logical_to_physical(self.device))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path | Checkpoint,
        layer: int,
        *,
        names: ExpertNames | None = None,
        dequantize: bool = False,
        **arguments: Any,
    ) -> FusedMoE:
        """Construct a layer as a checkpoint describes it, and load its experts.

        Sizes, scheme, activation, biases and routing come from config.json and the tensors. For
        several layers pass an open `Checkpoint`, whose headers are then read once::

            with moekit.checkpoint.Checkpoint(folder) as checkpoint:
                layers = {
                    n: moekit.FusedMoE.from_checkpoint(checkpoint, n)
                    for n in moekit.checkpoint.detect(checkpoint).layers
                }

        Args:
            path: A file, a folder, or an open `Checkpoint`.
            layer: The layer's number in the checkpoint.
            names: What the tensors are called, as in `detect`.
            dequantize: Convert the weights to the model's dtype.
            arguments: Arguments of the constructor, which replace what the checkpoint says.

        Raises:
            WeightsError: The checkpoint does not fit, or its routing is not known and not given.
        """
        from moekit.checkpoint import layer_arguments

        parallelism = LayerParallelism(**_taken(LayerParallelism, dict(arguments)))
        tp_size = parallelism.config().tp_size
        found = layer_arguments(path, layer, names, dequantize, tp_size, arguments)
        made = cls(**{**found, **arguments})
        made.load_checkpoint(path, names, layer, dequantize=dequantize)
        return made

    # -- weights ----------------------------------------------------------------------------

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert of each of this rank's physical experts, as `load_weights` expects."""
        return self.placement.on_rank(self.problem.parallel.ep_rank)

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Pack this rank's weights: its `local_experts`, and its slice of each, on any device.

        Raises WeightsError, which lists all that does not fit. The layer is then without weights.
        """
        self.packed = None
        if isinstance(weights, ExpertWeights):  # pack() refuses other types
            weights = weights.to(self.device)
        if self.problem.training:
            return parameters.fill(self, weights, self.problem)
        self.packed = self.kernel.pack(weights)

    def repack_(
        self,
        new: ExpertWeights | PackedWeights,
        *,
        experts: Sequence[int] | Tensor | None = None,
        checksum: str | None = None,
    ) -> None:
        """Write new weights into the memory of the packed ones, as `ModularKernel.repack_` does.

        experts: positions in `local_experts`, if ``new`` has only some. In a trainable layer,
        `load_weights` fills the parameters in place instead.
        """
        packed = self.flow.require(self.packed)
        self.kernel.repack_(packed, new, experts=experts, checksum=checksum, name=self.prefix)

    def load_checkpoint(
        self,
        path: str | Path | Checkpoint,
        names: ExpertNames | str | None,
        layer: int,
        **options: Any,
    ) -> None:
        """Load what `moekit.checkpoint.load_experts` reads with the same arguments."""
        from moekit.checkpoint import load_experts

        self.packed = None
        experts = self.local_experts
        self.load_weights(
            load_experts(path, names, layer, self.problem, experts=experts, **options)
        )

    @torch.no_grad()
    def warmup(self, num_tokens: int) -> None:
        """Call the kernel with up to ``num_tokens``, before serving or capturing a CUDA graph.

        Collective; see `ModularKernel.warmup`.
        """
        packed, num_tokens = self.packed, check_tokens(num_tokens)
        if self.problem.training:
            packed = self.kernel.pack(parameters.of(self))
        packed = self.flow.require(packed)
        self.kernel.warmup(packed, min(num_tokens, self.problem.max_num_tokens or num_tokens))

    # -- replicas ---------------------------------------------------------------------------

    def set_replicas(self, table: Tensor, record: Callable[[Tensor], object] | None = None) -> None:
        """Route tokens to the physical experts in ``table`` from the next call on.

        Args:
            table: (E, M) as `moekit.to_physical` takes it. It is kept, not copied: writing to it
                in place also changes captured CUDA graphs.
            record: Called with the logical ids (T, K) of every call, -1 where there is none.

        Raises:
            InvalidInput: The table does not fit the layer.
        """
        check_replicas(table, self.problem, self.device)
        # Ranks that hold the same tokens must choose the same replicas; other batches start
        # with different ones.
        batch = self.ranks.rank if self.ranks.splits else self.ranks.rank // self.ranks.copies

        def to_replicas(routing: Routing) -> Routing:
            if record is not None:
                record(routing.topk_ids)
            return to_physical(routing, table, batch)

        self.flow.to_physical = to_replicas

    # -- calls ------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        router_logits: Tensor | None = None,
        *,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        is_padding: Tensor | None = None,
        max_tokens: int | None = None,
        token_ids: Tensor | None = None,
        adapter_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer's output. Pass router_logits, or topk_weights and topk_ids.

        Args:
            x: (..., H) in params_dtype.
            router_logits: (..., E + zero experts), any float dtype.
            topk_weights: (..., K) float32.
            topk_ids: (..., K) int32 or int64, logical; -1 for no expert.
            is_padding: (...) bool. Marked tokens go to no expert.
            max_tokens: The most tokens that any rank passes to this call. With max_num_tokens it
                saves an all-reduce, and CUDA graphs need it where the group has no CPU backend.
                Ranks replay graphs together that were captured with one max_tokens.
            token_ids: (...) int32 or int64, the rows of the routing's hash_table if it has one.
            adapter_ids: (...) int32, slots of `adapters`, -1 for none. With one slot it may be left
                out: every token then has the slot.

        Returns:
            (..., H) in params_dtype.

        Raises:
            InvalidInput: A tensor does not fit; the other ranks then raise PeerFailed.
            WeightsError: The layer has no weights.
        """
        inputs = LayerInputs(
            x, router_logits, topk_weights, topk_ids, is_padding, max_tokens, token_ids,
            adapter_ids,
        )  # fmt: skip
        if self.problem.training:
            return self._train(inputs)
        grad_enabled = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or (grad_enabled and ops.tracks(inputs)):
            # torch.compile would replay a rank's graph while another rank runs Python, and waits.
            graphs = self.graph_safe and not self.ranks.moves and self.router.log is None
            operator = ops.operators.plain if graphs else ops.operators.without_graphs
            return operator(*inputs, self.number)
        with torch.no_grad() if grad_enabled else nullcontext():
            return self.run(inputs)

    def _train(self, inputs: LayerInputs) -> Tensor:
        """Compute in autocast's dtype, else in the parameters' dtype, as FSDP casts them."""
        device, dtype = self.device.type, None
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs = inputs._replace(x=inputs.x.to(dtype))
        weights = parameters.of(self, dtype)
        if torch.compiler.is_compiling() and weights.w13.dtype != self.problem.dtype:
            ops.prepare(self.number, weights.w13.dtype)
        with on_device(inputs.x):
            flow = self._flow_in(weights.w13.dtype)
            if self.adapters is None:
                return flow(weights, inputs)
            kernel: Any = flow.kernel  # a TrainableKernel
            frozen, adapters = kernel.frozen(weights), self.adapters.adapters
            return flow(replace(frozen, adapters=adapters.to(weights.w13.dtype)), inputs)

    def _flow_in(self, dtype: torch.dtype) -> LayerFlow:
        """Return the flow of calls in a dtype. The first of a dtype is made by all ranks."""
        if dtype not in self._flows:
            made = self._flows[dtype] = copy(self.flow)
            made.kernel = self._compose(self.problem.replace(dtype=dtype))
        found = self._flows[dtype]
        if found.to_physical is not self.flow.to_physical:  # torch.compile traces no mutation
            found.to_physical = self.flow.to_physical
        return found

    @property
    def partial(self) -> bool:
        """Whether outputs are partial sums, which the caller adds up over the ranks."""
        return self.ranks.partial

    def run(self, inputs: LayerInputs) -> Tensor:
        """Compute `forward` without the operator."""
        with on_device(inputs.x):
            return self.flow(self._adapted(self.packed), inputs)

    def _adapted(self, packed: PackedWeights | None) -> PackedWeights | None:
        return packed if packed is None or self.adapters is None else self.adapters.on(packed)

    # -- the module -------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Return a line each for the sizes, the combination, the routing, ranks and weights."""
        explanation, ranks, parallel = self.kernel.explanation, self.ranks, self.problem.parallel
        assert explanation is not None
        lines = [
            f"{self.prefix}: {summary(self.problem)}",
            f"kernel: {explanation.chosen} ({explanation.why})",
            f"routing: {self.router.config}",
        ]
        if ranks.size > 1:
            held = self.local_experts
            experts = ", ".join(map(str, held[:_SHOWN])) + ", ..." * (len(held) > _SHOWN)
            outputs = "outputs are summed" if ranks.sums else "outputs are partial sums"
            traffic = "tokens move between ranks" if ranks.moves else outputs
            batches = ranks.size // ranks.copies
            lines.append(
                f"parallelism: rank {ranks.rank} of {ranks.size} (ep_size={parallel.ep_size}, "
                f"tp_size={parallel.tp_size}), {batches} token batch{'es' * (batches > 1)}, "
                f"experts {experts}; {traffic}"
            )
        nbytes = [] if self.packed is None else [self.packed.nbytes]
        nbytes += [parameter.nbytes for parameter in self.parameters(recurse=False)]
        loaded = f"{sum(nbytes) / 2**20:.1f} MiB" if nbytes else "not loaded"
        return "\n".join([*lines, f"weights: {loaded}"])

    def destroy(self) -> None:
        """Free the dispatcher's buffers and the weights; idempotent."""
        self.packed = None
        for flow in self._flows.values():
            flow.kernel.destroy()

    def __getstate__(self) -> dict[str, Any]:
        raise MoekitError(
            f"layer {self.prefix!r} cannot be copied or pickled, because it holds buffers that "
            "ranks share: build another one and load its weights"
        )


def _taken(kind: type[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that are fields of ``kind``, which leave ``keywords``."""
    return {f.name: keywords.pop(f.name) for f in fields(kind) if f.name in keywords}


def _indexed(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; None means this machine's accelerator, else the CPU."""
    found = torch.device(DeviceSpec.detect().type if device is None else device)
    DeviceSpec.of(found)  # raises where there is none
    if found.type == "cpu" or found.index is not None:
        return found
    return torch.device(found.type, torch.get_device_module(found).current_device())
