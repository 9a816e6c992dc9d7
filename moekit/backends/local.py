"""Dispatchers that move nothing, for one rank or for ranks that all hold the same tokens."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing
from moekit.contract.pending import Pending
from moekit.contract.specs import DispatcherSpec
from moekit.contract.training import TrainableDispatcher
from moekit.problem import MoEProblem
from moekit.runtime.rows import batched_places, to_batched


def local_ids(topk_ids: Tensor, problem: MoEProblem) -> Tensor:
    """Return local expert ids for global physical ids, -1 for experts of other ranks.

    Args:
        topk_ids: (T, K), any integer dtype; -1 for no expert.

    Returns:
        (T, K) of the same dtype. May be topk_ids itself: do not modify it.
    """
    experts = problem.local_experts
    if len(experts) == problem.num_physical_experts:
        return topk_ids
    local = topk_ids - experts.start  # four small kernels, which matter for one token
    return local.masked_fill_(local != local.clamp(0, len(experts) - 1), -1)


class LocalDispatcher(PrepareAndFinalize):
    """STANDARD. The experts write the caller's output; `finalize` has nothing left to do.

    In batch-invariant problems it weights and sums their rows.
    """

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, group)
        self._holds_all = problem.num_local_experts == problem.num_physical_experts

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids if self._holds_all else local_ids(routing.topk_ids, self.problem)
        x, scale = x_TH, None
        if quantize is not None:
            x, scale = quantize(x_TH, (ids >= 0).any(dim=1))
        names = routing.adapter_ids
        tokens = Dispatched(x, scale, ids, routing.topk_weights, adapter_ids=names)
        return Pending.ready(tokens)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        if self.problem.batch_invariant:
            ids, weights = dispatched.topk_ids, dispatched.topk_weights
            assert ids is not None and weights is not None
            return Pending.ready(self.weight_and_reduce(y.flatten(0, 1), ids, weights, out_TH))
        if y is not out_TH and y.data_ptr() != out_TH.data_ptr():
            out_TH.copy_(y)
        return Pending.ready(out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens


class TrainableLocal(LocalDispatcher, TrainableDispatcher):
    """Gradients stay on their rank as well."""

    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        return Pending.ready(grad_TH)

    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        return Pending.ready((grad_RH, grad_RK))


class LocalBatchedDispatcher(PrepareAndFinalize):
    """BATCHED, capacity T. Rows are copied to the batched layout and gathered back."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids, tokens = local_ids(routing.topk_ids, self.problem), x_TH.shape[0]
        x, scale, L = x_TH, None, self.problem.num_local_experts
        if quantize is not None:
            x, scale = quantize(x_TH, (ids >= 0).any(dim=1))
            scale = scale.expand(tokens, -1)
        places_TK, counts_L = batched_places(ids, L, tokens)

        def batched(rows: Tensor) -> Tensor:
            empty = rows.new_empty(L * tokens + 1, rows.shape[1])
            return to_batched(rows, places_TK, (L, tokens), empty)

        dispatched = Dispatched(
            x=batched(x),
            x_scale=None if scale is None else batched(scale),
            expert_num_tokens=counts_L,
            handle=(places_TK, ids, routing.topk_weights),
        )
        return Pending.ready(dispatched)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        places_TK, ids, weights = dispatched.handle
        y_SH = y.reshape(-1, y.shape[2])
        return Pending.ready(self.weight_and_reduce(y_SH, ids, weights, out_TH, places_TK))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens

    def transient_bytes(self, num_tokens: int) -> int:
        p = self.problem
        batched = (p.num_local_experts * num_tokens + 1) * p.hidden_size * p.dtype.itemsize
        indices = num_tokens * p.top_k * 8 * 8
        return batched + num_tokens * p.hidden_size * 4 * 4 + indices
