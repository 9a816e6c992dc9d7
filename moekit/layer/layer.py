"""`FusedMoE`, the layer that model authors use: router -> kernel, shared experts -> reduction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moekit.contract import PackedWeights, Routing
from moekit.errors import InvalidInput, InvalidProblem, MoekitError, WeightsError
from moekit.layer import ops
from moekit.layer.ranks import PLACEMENTS, LayerRanks, config_of_group, place
from moekit.layer.route import to_physical
from moekit.layer.router import Router, RoutingFunction
from moekit.problem import MoEProblem, ParallelConfig, partition
from moekit.problem.activation import NON_GATED, Activation
from moekit.problem.quant import QuantScheme
from moekit.problem.weights import ExpertWeights
from moekit.runtime.checks import (
    ID_DTYPES,
    check_function,
    check_shared,
    check_tensor,
    check_tokens,
)
from moekit.runtime.overlap import Beside
from moekit.selection.explanation import summary
from moekit.selection.select import compose
from moekit.untrusted.arguments import (
    FLAG,
    FUNCTION,
    GROUP,
    MAX_RANKS,
    NAME,
    TIMEOUT,
    accept,
    choice,
    first_line,
    instance,
    optional,
    shown,
    size,
)

if TYPE_CHECKING:
    from moekit.checkpoint import ExpertNames

Module = Callable[[Tensor], Tensor]

# The problem, the router and `parallel_config` judge the others.
_KINDS = {
    "is_act_and_mul": optional(FLAG),
    "shared_experts": optional(FUNCTION),
    "shared_experts_partial": FLAG,
    "tp_size": optional(size(1, MAX_RANKS)),
    "dp_size": size(1, MAX_RANKS),
    "enable_expert_parallel": FLAG,
    "parallel": optional(instance("a ParallelConfig", ParallelConfig)),
    "group": optional(GROUP),
    "is_sequence_parallel": FLAG,
    "expert_placement_strategy": choice(PLACEMENTS),
    "reduce_results": FLAG,
    "dispatcher": optional(NAME),
    "experts": optional(NAME),
    "checked": optional(FLAG),
    "peer_timeout": TIMEOUT,
    "prefix": optional(NAME),
}


class FusedMoE(nn.Module):
    """A Mixture-of-Experts layer for inference, by the field's names::

        layer = moekit.FusedMoE(128, 8, 2048, 768, device="cuda")
        layer.load_weights(moekit.ExpertWeights(w13, w2))
        out = layer(x, router_logits)

    num_experts, top_k, hidden_size, intermediate_size: of the whole model. params_dtype: of
    activations and unquantized weights. quant, activation (a name, or an `Activation` with its
    clamp), has_bias, apply_router_weight_on_input, max_num_tokens, num_redundant_experts: as in
    `MoEProblem`. is_act_and_mul=False: no gate ("silu" becomes "silu_no_mul").

    Routing, as in `moekit.route`: renormalize, scoring_func, e_score_correction_bias (read at
    every call, so it may be filled later, in place), num_expert_group with topk_group,
    routed_scaling_factor; or custom_routing_function(hidden_states, router_logits, top_k,
    renormalize) -> (weights, ids) in place of them.
    zero_expert_num: identity experts, ids num_experts and above, in logits and ids.

    shared_experts: (T, H) -> (T, H), added to every token's output; runs on a stream of its own
    while tokens travel. It stays its owner's: no submodule, not in state_dict, not moved.
    shared_experts_partial: its output is a slice of I's, to be summed over tensor-parallel ranks.

    tp_size, dp_size, enable_expert_parallel: see `moekit.parallel_config`; the rank is
    this one's in ``group``, the layer's ranks (default: all). tp_size defaults to 1, or to what
    dp_size leaves of a group that is given. Or ``parallel``, for any other split.
    is_sequence_parallel: ranks that hold the same tokens each dispatch a share of them, and gather
    the results.
    expert_placement_strategy: linear, or round_robin (expert e on rank e % ep_size).
    reduce_results: where nothing moves, sum the ranks' outputs; else the caller does.

    dispatcher, experts, checked, peer_timeout: as in `moekit.compose`. device: where it runs,
    for good. prefix: its name, unique among living layers.

    Weights are no parameters: `load_weights` packs them for the chosen backend, state_dict() is
    empty, and there is no backward pass. The layer cannot be moved, cast, copied or pickled.
    Without weights, or after loading failed, calling it raises WeightsError.

    Construction is collective where ranks exchange anything, and so are calls; ranks pass any
    number of tokens, 0 too. Raises InvalidProblem, GroupMismatch and what `moekit.compose` does.
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
        is_act_and_mul: bool | None = None,
        has_bias: bool = False,
        apply_router_weight_on_input: bool = False,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        e_score_correction_bias: Tensor | None = None,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        routed_scaling_factor: float = 1.0,
        custom_routing_function: RoutingFunction | None = None,
        zero_expert_num: int = 0,
        shared_experts: Module | None = None,
        shared_experts_partial: bool = False,
        tp_size: int | None = None,
        dp_size: int = 1,
        enable_expert_parallel: bool = False,
        parallel: ParallelConfig | None = None,
        group: dist.ProcessGroup | None = None,
        is_sequence_parallel: bool = False,
        expert_placement_strategy: str = "linear",
        num_redundant_experts: int = 0,
        reduce_results: bool = True,
        max_num_tokens: int | None = None,
        dispatcher: str | None = None,
        experts: str | None = None,
        checked: bool | None = None,
        peer_timeout: float = 60.0,
        device: torch.device | str | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__()
        accept(_KINDS, locals())
        self.prefix = ops.register(self, prefix)
        self.device = _device(device)
        if parallel is None:
            parallel = config_of_group(group, tp_size, dp_size, enable_expert_parallel)
        elif (tp_size, dp_size, enable_expert_parallel) != (None, 1, False):
            raise InvalidProblem(
                "parallel is given, so tp_size, dp_size and enable_expert_parallel must not be"
            )
        ranks = parallel.ep_size * parallel.tp_size
        self.problem = MoEProblem(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=params_dtype,
            activation=_gated(activation, is_act_and_mul),
            quant=quant,
            has_bias=has_bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            num_redundant_experts=num_redundant_experts,
            max_num_tokens=max_num_tokens,
            parallel=replace(parallel, dp_size=ranks) if is_sequence_parallel else parallel,
            device=self.device,
        )
        bias = e_score_correction_bias
        if isinstance(bias, Tensor) and not isinstance(bias, nn.Parameter):
            bias = bias.to(self.device)  # a parameter goes with its owner
        self.router = Router(
            num_experts=num_experts,
            zero_expert_num=zero_expert_num,
            top_k=top_k,
            renormalize=renormalize,
            scoring_func=scoring_func,
            e_score_correction_bias=bias,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            custom_routing_function=custom_routing_function,
        )
        if shared_experts_partial and (shared_experts is None or is_sequence_parallel):
            raise InvalidProblem(
                "shared_experts_partial is for shared_experts sliced over ranks that hold the same "
                "tokens: give shared_experts, without is_sequence_parallel"
            )
        # In a tuple: it is no submodule, as it is its owner's to move, save and load.
        self._shared, self._shared_partial = (shared_experts,), shared_experts_partial
        self.placement = place(self.problem, expert_placement_strategy)
        self.ranks = LayerRanks(
            self.problem,
            parallel,
            group,
            reduces=reduce_results,
            splits=is_sequence_parallel,
            common=f"{expert_placement_strategy}, reduce_results={reduce_results}, "
            f"is_sequence_parallel={is_sequence_parallel}, zero_expert_num={zero_expert_num}, "
            f"shared_experts={shared_experts is not None}, partial={shared_experts_partial}",
            timeout=peer_timeout,
        )
        self.kernel = compose(
            self.problem,
            dispatcher,
            experts,
            group=self.ranks.group,
            checked=checked,
            peer_timeout=peer_timeout,
        )
        specs = (self.kernel.dispatcher.spec, self.kernel.experts.spec)
        # Whether calls can be captured in a CUDA graph.
        self.graph_safe = all(s.graph_safe for s in specs) and not self.kernel.checked
        self.packed: PackedWeights | None = None
        self.to_physical: Callable[[Routing], Routing] | None = None
        if self.placement.physical_to_logical != tuple(range(num_experts)):
            self.set_replicas(self.placement.logical_to_physical(self.device))

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, names: ExpertNames | str | None, layer: int, **knobs: Any
    ) -> FusedMoE:
        """A layer with its weights from safetensors files, as `moekit.checkpoint.load_experts`.

        knobs: the constructor's arguments.
        """
        made = cls(**knobs)
        made.load_checkpoint(path, names, layer)
        return made

    # -- weights ----------------------------------------------------------------------------

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical experts of this rank's slots, in the order `load_weights` wants them."""
        return self.placement.on_rank(self.problem.parallel.ep_rank)

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Packs this rank's weights: its `local_experts`, and its slice of each, on any device.

        Raises WeightsError listing all that does not fit; the layer is then without weights.
        """
        self.packed = None
        if isinstance(weights, ExpertWeights):  # else pack() says what it wants
            weights = weights.to(self.device)
        self.packed = self.kernel.pack(weights)

    def load_checkpoint(
        self, path: str | Path, names: ExpertNames | str | None, layer: int, **options: Any
    ) -> None:
        """`load_weights` of what `moekit.checkpoint.load_experts` reads, with its ``options``."""
        from moekit.checkpoint import load_experts

        self.packed = None
        experts = self.local_experts
        self.load_weights(
            load_experts(path, names, layer, self.problem, experts=experts, **options)
        )

    @torch.no_grad()
    def warmup(self, num_tokens: int) -> None:
        """Calls the kernel with up to ``num_tokens`` (see `ModularKernel.warmup`): before serving,
        and before a graph is captured. Collective.
        """
        if self.packed is None:
            raise WeightsError(f"layer {self.prefix!r} has no weights: call load_weights() first")
        num_tokens = check_tokens(num_tokens)
        self.kernel.warmup(self.packed, min(num_tokens, self.problem.max_num_tokens or num_tokens))

    # -- replicas ---------------------------------------------------------------------------

    def set_replicas(self, table: Tensor, record: Callable[[Tensor], object] | None = None) -> None:
        """From now on ``table`` says where experts are, as `moekit.to_physical` takes it.

        It is kept, not copied: overwritten in place, it also changes captured graphs. record: is
        called with the logical ids (T, K) of every call, -1 where there is none.
        """
        check_tensor("replicas", table)
        shaped = table.dim() == 2 and table.shape[0] == self.problem.num_experts
        if not shaped or table.dtype not in ID_DTYPES:
            raise InvalidInput(
                f"replicas are {tuple(table.shape)} {table.dtype}, want "
                f"({self.problem.num_experts}, M) of int32 or int64: a row of physical ids for "
                "each expert"
            )
        if table.device != self.device:
            raise InvalidInput(f"replicas are on {table.device}, want {self.device}")
        end = self.problem.num_physical_experts
        if bool(((table < -1) | (table >= end)).any() | (table < 0).all(dim=1).any()):
            raise InvalidInput(
                f"replicas hold ids outside 0..{end - 1} (-1 past the last), or no id for an expert"
            )
        if record is not None:
            check_function("record", record)
        # Batches begin with different replicas; ranks with the same tokens choose the same ones.
        batch = self.ranks.rank if self.ranks.splits else self.ranks.rank // self.ranks.copies

        def to_replicas(routing: Routing) -> Routing:
            if record is not None:
                record(routing.topk_ids)
            return to_physical(routing, table, batch)

        self.to_physical = to_replicas

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
    ) -> Tensor:
        """x (..., H) in params_dtype -> the same shape.

        router_logits (..., E + zero experts), any float dtype; or topk_weights (..., K) float32
        and topk_ids (..., K) int, logical, -1 for none. is_padding (...) bool: tokens that go
        nowhere. max_tokens: the most tokens any rank passes to this call; saves ranks from asking
        each other when there is a max_num_tokens, which CUDA graphs over NCCL alone need.
        """
        grad_enabled = torch.is_grad_enabled()
        tensors = (x, router_logits, topk_weights, topk_ids, is_padding) if grad_enabled else ()
        grads = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        # Arguments of other types go to `run`, which says what is wrong with them.
        grads = grads and all(t is None or isinstance(t, Tensor) for t in tensors)
        grads = grads and (max_tokens is None or isinstance(max_tokens, int))
        if torch.compiler.is_compiling() or grads:
            operator = ops.fused_moe if self.graph_safe else ops.fused_moe_without_graphs
            return operator(
                x, router_logits, topk_weights, topk_ids, is_padding, max_tokens, self.prefix
            )
        with torch.no_grad() if grad_enabled else nullcontext():
            return self.run(x, router_logits, topk_weights, topk_ids, is_padding, max_tokens)

    @property
    def partial(self) -> bool:
        """Whether outputs are this rank's partial sums, which the caller adds up over the ranks."""
        return self.ranks.size > 1 and not (self.ranks.moves or self.ranks.sums)

    def run(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        topk_weights: Tensor | None,
        topk_ids: Tensor | None,
        is_padding: Tensor | None,
        max_tokens: int | None,
    ) -> Tensor:
        """`forward` below the operator. Where ranks exchange anything, all return or all raise."""
        call: _Call | None = None
        fault: Exception | None = None
        try:
            call = self._prepare(x, router_logits, topk_weights, topk_ids, is_padding, max_tokens)
        except Exception as error:  # whatever it is, no peer may wait for this rank
            fault = error
        if call is None:
            assert fault is not None
            if max_tokens is None:  # the other ranks ask
                self.ranks.num_chunks(0, None)
            self.kernel.abort(fault)
            raise fault
        chunks = self.ranks.num_chunks(call.x.shape[0], max_tokens)
        shared = self._fork_shared(call.x)
        out = self._routed(call, chunks, shared)
        self._add(out, call, shared)
        if self.ranks.splits:
            out = self.ranks.gather(out, call.num_tokens)
        return out if out.shape == x.shape else out.view(x.shape)

    def _prepare(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        topk_weights: Tensor | None,
        topk_ids: Tensor | None,
        is_padding: Tensor | None,
        max_tokens: int | None,
    ) -> _Call:
        if self.packed is None:
            raise WeightsError(f"layer {self.prefix!r} has no weights: call load_weights() first")
        check_tensor("x", x)
        if x.dim() < 2 or x.shape[-1] != self.problem.hidden_size:
            raise InvalidInput(
                f"x has shape {tuple(x.shape)}, want (..., {self.problem.hidden_size})"
            )
        leading = x.shape[:-1]
        flat = len(leading) == 1 and not self.ranks.splits
        x_TH = x if flat else x.flatten(0, len(leading) - 1)
        tokens = x_TH.shape[0]
        if max_tokens is not None and check_tokens(max_tokens, "max_tokens") < tokens:
            raise InvalidInput(f"max_tokens={max_tokens}, but this rank passes {tokens}")
        share = self.ranks.share(tokens)

        def mine(name: str, tensor: Tensor, *width: int) -> Tensor:
            check_tensor(name, tensor)
            if tensor.shape != (*leading, *width):
                raise InvalidInput(
                    f"{name} has shape {tuple(tensor.shape)}, want {(*leading, *width)} for x "
                    f"{tuple(x.shape)}"
                )
            if flat:
                return tensor
            rows = tensor.flatten(0, len(leading) - 1)
            return rows[share] if self.ranks.splits else rows

        if self.ranks.splits:
            x_TH = x_TH[share]
        padding = None if is_padding is None else mine("is_padding", is_padding)
        if router_logits is not None:
            if topk_weights is not None or topk_ids is not None:
                raise InvalidInput("give router_logits, or topk_weights and topk_ids, not both")
            logits = mine("router_logits", router_logits, self.router.width)
            routing = self.router(x_TH, logits, padding, self.kernel.checked)
        else:
            if topk_weights is None or topk_ids is None:
                raise InvalidInput("give router_logits, or both topk_weights and topk_ids")
            top_k = self.problem.top_k
            ids = mine("topk_ids", topk_ids, top_k)
            if padding is not None:
                ids = ids.masked_fill(padding[:, None], -1)
            routing = Routing(mine("topk_weights", topk_weights, top_k), ids)
        if self.kernel.checked and (self.router.zero_expert_num or self.to_physical is not None):
            self.router.check(routing)  # else the kernel does
        routing, identity = self.router.take_zero_experts(routing)
        if self.to_physical is not None:
            routing = self.to_physical(routing)
        return _Call(x_TH, routing, identity, tokens, self.packed)

    def _fork_shared(self, x_TH: Tensor) -> Beside | None:
        (function,) = self._shared
        # Of partial sums, one holds what is complete on every rank.
        if function is None or (self.partial and self.ranks.rank and not self._shared_partial):
            return None

        def checked(x_TH: Tensor) -> Tensor:
            return check_shared(function, x_TH)

        return Beside(checked, x_TH)

    def _routed(self, call: _Call, chunks: int, shared: Beside | None) -> Tensor:
        """The kernel's output for this rank's tokens, in as many calls as all ranks make."""
        meanwhile = None if shared is None else shared.run
        start = partial(self.kernel.start, weights=call.packed)
        if chunks == 1:
            return start(call.x, routing=call.routing, meanwhile=meanwhile).result()
        out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
        for chunk in range(chunks):
            span = partition(call.x.shape[0], chunks, chunk)
            rows = slice(span.start, span.stop)
            routing = Routing(call.routing.topk_weights[rows], call.routing.topk_ids[rows])
            start(call.x[rows], routing=routing, out=out[rows], meanwhile=meanwhile).result()
            meanwhile = None
        return out

    def _add(self, out_TH: Tensor, call: _Call, shared: Beside | None) -> None:
        """Adds, in place, what is neither routed nor complete, each once: see `partial`."""
        extra = None if shared is None else shared.join()
        if extra is not None and self._shared_partial:
            out_TH += self.ranks.sum_batch(extra) if self.ranks.moves else extra
            extra = None
        self.ranks.sum_all(out_TH)
        if extra is not None:
            out_TH += extra
        if call.identity is not None and not (self.partial and self.ranks.rank):
            own = torch.where(call.identity != 0, call.x.float() * call.identity, 0.0)
            out_TH.copy_(own.add_(out_TH))

    # -- the module -------------------------------------------------------------------------

    def extra_repr(self) -> str:
        p, zero = self.problem, self.router.zero_expert_num
        assert self.kernel.explanation is not None
        lines = [f"{self.prefix}: {summary(p)}" + (f", {zero} zero experts" if zero else "")]
        lines.append(f"{self.kernel.explanation.chosen} ({self.kernel.explanation.why})")
        if self.ranks.size > 1:
            held = ", ".join(map(str, self.local_experts[:4]))
            more = ", ..." if len(self.local_experts) > 4 else ""
            flow = "tokens move" if self.ranks.moves else "summed" if self.ranks.sums else "partial"
            at = f"rank {self.ranks.rank} of {self.ranks.size}"
            lines.append(f"{at}: experts {held}{more}; {flow}")
        state = "none yet" if self.packed is None else f"{self.packed.nbytes / 2**20:.1f} MiB"
        lines.append(f"weights: {state}")
        return "\n".join(lines)

    def destroy(self) -> None:
        """Frees the dispatcher's buffers, the weights and the name; idempotent."""
        self.packed = None
        self.kernel.destroy()
        ops.unregister(self.prefix)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedMoE:
        here = torch.empty(0, dtype=self.problem.dtype, device=self.device)
        there = fn(here)
        if there.device != here.device or there.dtype != here.dtype:
            raise MoekitError(
                f"layer {self.prefix!r} was composed for {here.dtype} on {here.device} and cannot "
                f"become {there.dtype} on {there.device}: build it with device and params_dtype "
                "as it shall run"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise MoekitError(
            f"layer {self.prefix!r} cannot be copied or pickled, as it holds buffers that ranks "
            "share: build another one and load its weights"
        )


@dataclass(frozen=True)
class _Call:
    """One call on one rank: its own tokens, physical ids, and what identity experts weigh.

    num_tokens: the caller's, of which sequence parallelism leaves this rank a share.
    """

    x: Tensor
    routing: Routing
    identity: Tensor | None
    num_tokens: int
    packed: PackedWeights


def _device(device: torch.device | str | None) -> torch.device:
    """The device to run on, with its index; raises InvalidProblem when there is none such here."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        if not isinstance(device, (str, torch.device)):
            raise RuntimeError("this is neither a name nor a torch.device")
        found = torch.device(device)
        if found.type != "cpu":
            module = torch.get_device_module(found)
            if not module.is_available():
                raise RuntimeError(f"torch sees no {found.type} device here")
            if found.index is None:
                found = torch.device(found.type, module.current_device())
    except Exception as error:  # each device type has its own
        raise InvalidProblem(
            f"device={shown(device)}: {first_line(error)}; want where the layer shall run, "
            "'cpu' or 'cuda', say"
        ) from error
    return found


def _gated(activation: Activation | str, is_act_and_mul: bool | None) -> Activation:
    found = Activation(activation) if isinstance(activation, str) else activation
    # MoEProblem refuses what is no Activation.
    if is_act_and_mul is None or not isinstance(found, Activation):
        return found
    if is_act_and_mul == found.gated:
        return found
    if not is_act_and_mul and f"{found.name}_no_mul" in NON_GATED:
        return replace(found, name=f"{found.name}_no_mul")
    raise InvalidProblem(
        f"activation {found.name!r} with is_act_and_mul={is_act_and_mul}: it "
        f"{'has a gate in it' if found.gated else 'has no gate'}; choose another activation, or "
        "leave is_act_and_mul out"
    )
