"""One call of a layer: route -> kernel -> shared experts -> sums over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moekit.contract import PackedWeights, Routing
from moekit.contract.fused import FusedSpec
from moekit.contract.fused_kernel import RouterLogits
from moekit.errors import InvalidInput, WeightsError
from moekit.kernel import ModularKernel
from moekit.layer.ranks import LayerRanks
from moekit.layer.router import Router
from moekit.problem import partition
from moekit.problem.weights import ExpertWeights
from moekit.runtime.checks import check_ids, check_shared, check_tensor, check_tokens
from moekit.runtime.overlap import ConcurrentExperts


class LayerInputs(NamedTuple):
    """The arguments of `FusedMoE.forward`."""

    x: Tensor
    router_logits: Tensor | None
    topk_weights: Tensor | None
    topk_ids: Tensor | None
    is_padding: Tensor | None
    max_tokens: int | None
    token_ids: Tensor | None = None
    adapter_ids: Tensor | None = None


class LayerFlow:
    """The data flow of a layer, for calls from any thread."""

    def __init__(
        self,
        name: str,
        router: Router,
        ranks: LayerRanks,
        kernel: ModularKernel,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.name, self.router, self.ranks = name, router, ranks
        self.kernel, self.shared = kernel, shared
        how, spec = router.config, kernel.experts.spec
        foreign = how.custom_routing_function is not None or how.hash_table is not None
        ids = foreign or how.zero_expert_num or kernel.problem.apply_router_weight_on_input
        self._kernel_routes = (
            isinstance(spec, FusedSpec) and not ids and not spec.unsupported_routing(how)
        )
        self.to_physical: Callable[[Routing], Routing] | None = None
        # Says what to do for a call without weights.
        self.advice: Callable[[], str] = lambda: "call load_weights()"

    def require(self, weights: PackedWeights | None) -> PackedWeights:
        """Return ``weights``; raise WeightsError for None."""
        if weights is None:
            raise WeightsError(f"layer {self.name!r} has no packed weights: {self.advice()}")
        return weights

    def __call__(
        self, weights: PackedWeights | ExpertWeights | None, inputs: LayerInputs
    ) -> Tensor:
        """Compute `FusedMoE.forward`. If ranks exchange anything, all return or all raise."""
        max_tokens = inputs.max_tokens
        try:
            held = weights if isinstance(weights, ExpertWeights) else self.require(weights)
            rows = TokenRows(inputs.x, self.kernel.problem.hidden_size, max_tokens, self.ranks)
            routing, identity = self._route(rows, inputs)
        except Exception as error:  # of any kind: the other ranks must not wait for this one
            self.kernel.abort(error, self.ranks.most_tokens(0, max_tokens))
            raise
        most = self.ranks.most_tokens(rows.x_TH.shape[0], max_tokens)
        routing = replace(routing, max_tokens=most)
        shared = self._fork_shared(rows.x_TH)
        out_TH = self._run_kernel(rows.x_TH, held, routing, shared)
        return rows.restore(self._add_and_sum(out_TH, rows.x_TH, identity, shared))

    def _route(self, rows: TokenRows, inputs: LayerInputs) -> tuple[Routing, Tensor | None]:
        """Return physical ids with their weights, and the weights (T, 1) of identity experts."""
        _, router_logits, topk_weights, topk_ids, is_padding, _, token_ids, adapter_ids = inputs
        # While torch.compile traces a layer that trains, there are no values to check.
        checked = self.kernel.checked and not torch.compiler.is_compiling()
        padding = None if is_padding is None else rows.take("is_padding", is_padding)
        if router_logits is not None:
            if topk_weights is not None or topk_ids is not None:
                raise InvalidInput("give router_logits, or topk_weights and topk_ids, not both")
            logits = rows.take("router_logits", router_logits, self.router.width)
            ids_needed = padding, token_ids, adapter_ids, self.to_physical, self.router.log
            if self._kernel_routes and all(each is None for each in ids_needed):
                how, top_k = self.router.config, self.router.top_k
                return RouterLogits.of(logits.contiguous(), how, top_k), None
            tokens = None if token_ids is None else rows.take("token_ids", token_ids)
            routing = self.router(rows.x_TH, logits, padding, checked, tokens)
        else:
            if token_ids is not None:
                raise InvalidInput("token_ids choose experts only together with router_logits")
            if topk_weights is None or topk_ids is None:
                raise InvalidInput("give router_logits, or both topk_weights and topk_ids")
            top_k = self.kernel.problem.top_k
            ids = rows.take("topk_ids", topk_ids, top_k)
            if self.router.log is not None:
                ids = self.router.log.choose(ids, fixed=True)
            if padding is not None:
                ids = ids.masked_fill(padding[:, None], -1)
            routing = Routing(rows.take("topk_weights", topk_weights, top_k), ids)
        if checked and (self.router.config.zero_expert_num or self.to_physical is not None):
            # The kernel only sees ids that are translated already.
            check_ids(routing.topk_ids, self.router.width)
        routing, identity = self.router.take_zero_experts(routing)
        if self.to_physical is not None:
            routing = self.to_physical(routing)
        if adapter_ids is not None:
            routing = replace(routing, adapter_ids=rows.take("adapter_ids", adapter_ids))
        return routing, identity

    def _fork_shared(self, x_TH: Tensor) -> ConcurrentExperts | None:
        """Prepare the shared experts for the side stream, if this rank's output has them."""
        # Every rank has the complete output of shared experts, so one partial sum includes it.
        if self.shared is None or (self.ranks.partial and self.ranks.rank):
            return None
        shared = partial(check_shared, self.shared)
        return ConcurrentExperts(shared, x_TH, streams=not self.kernel.problem.training)

    def _run_kernel(
        self,
        x_TH: Tensor,
        weights: PackedWeights | ExpertWeights,
        routing: Routing,
        shared: ConcurrentExperts | None,
    ) -> Tensor:
        """Return the routed experts' output, from as many calls as all ranks make."""
        most, capacity = routing.max_tokens or 0, self.ranks.capacity or sys.maxsize
        chunks = max(1, -(-most // capacity))
        meanwhile = None if shared is None else shared.run
        parts = [(slice(None), x_TH, routing)]
        if chunks > 1:
            parts = list(_parts(x_TH, routing, chunks, -(-most // chunks)))
        if self.kernel.problem.training:  # by autograd, which no given output can enter
            if meanwhile is not None:
                meanwhile()
            outs = [self.kernel(x, weights, part) for _, x, part in parts]  # type: ignore[arg-type]
            return outs[0] if chunks == 1 else torch.cat(outs)
        assert isinstance(weights, PackedWeights)
        start = partial(self.kernel.start, weights=weights)
        if chunks == 1:
            return start(x_TH, routing=routing, meanwhile=meanwhile).result()
        out = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        for rows, x, part in parts:
            start(x, routing=part, out=out[rows], meanwhile=meanwhile).result()
            meanwhile = None
        return out

    def _add_and_sum(
        self,
        out_TH: Tensor,
        x_TH: Tensor,
        identity: Tensor | None,
        shared: ConcurrentExperts | None,
    ) -> Tensor:
        """Add shared and identity experts and sum over ranks, each exactly once."""
        self.ranks.sum_all(out_TH)
        trains = self.kernel.problem.training  # out of place: a selective checkpoint keeps out_TH
        if shared is not None:
            out_TH = out_TH + shared.join() if trains else out_TH.add_(shared.join())
        if identity is not None and not (self.ranks.partial and self.ranks.rank):
            own = torch.where(identity != 0, x_TH.float() * identity, 0.0).add_(out_TH)
            out_TH = own.to(out_TH.dtype) if trains else out_TH.copy_(own)
        return out_TH


def _parts(
    x_TH: Tensor, routing: Routing, chunks: int, most: int
) -> Iterator[tuple[slice, Tensor, Routing]]:
    """Yield the rows of each chunk, of at most ``most`` tokens on any rank, with their part."""
    for chunk in range(chunks):
        span = partition(x_TH.shape[0], chunks, chunk)
        rows = slice(span.start, span.stop)
        yield rows, x_TH[rows], routing.part(rows, most)


class TokenRows:
    """Flatten a call's tensors to rows; under sequence parallelism take this rank's share of them.

    Raises InvalidInput unless x is (..., H) with at most ``max_tokens`` rows.
    """

    __slots__ = ("_flat", "_ranks", "_share", "_x", "num_tokens", "x_TH")

    def __init__(
        self, x: Tensor, hidden_size: int, max_tokens: int | None, ranks: LayerRanks
    ) -> None:
        check_tensor("x", x)
        if x.dim() < 2 or x.shape[-1] != hidden_size:
            raise InvalidInput(f"x must have shape (..., {hidden_size}) (got {tuple(x.shape)})")
        self._x, self._ranks = x, ranks
        self._flat = x.dim() == 2 and not ranks.splits
        rows = x if self._flat else x.flatten(0, -2)
        self.num_tokens = rows.shape[0]
        if max_tokens is not None and check_tokens(max_tokens, "max_tokens") < self.num_tokens:
            raise InvalidInput(
                f"max_tokens={max_tokens} is less than this rank's {self.num_tokens} tokens: pass "
                "the most tokens of any rank"
            )
        self._share = ranks.share(self.num_tokens)
        self.x_TH = rows[self._share] if ranks.splits else rows

    def take(self, name: str, tensor: Tensor, *width: int) -> Tensor:
        """Return the rows of ``tensor`` (..., *width); raise InvalidInput for another shape."""
        check_tensor(name, tensor)
        wanted = (*self._x.shape[:-1], *width)
        if tensor.shape != wanted:
            raise InvalidInput(
                f"{name} must have shape {wanted} for x {tuple(self._x.shape)} "
                f"(got {tuple(tensor.shape)})"
            )
        if self._flat:
            return tensor
        rows = tensor.flatten(0, self._x.dim() - 2)
        return rows[self._share] if self._ranks.splits else rows

    def restore(self, out_TH: Tensor) -> Tensor:
        """Return the outputs of these rows in the shape of x, gathered over the ranks."""
        if self._ranks.splits:
            out_TH = self._ranks.gather(out_TH, self.num_tokens)
        return out_TH if self._flat else out_TH.view(self._x.shape)
