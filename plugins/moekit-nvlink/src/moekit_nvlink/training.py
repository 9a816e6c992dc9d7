"""The backward of `nvlink_ht`: gradients travel as tokens do, by the routing of the forward.

Rows depend on the routing alone, so a second dispatch gives the gradient of the output the rows
that the tokens had. The combine then brings the gradients of rows and of router weights home; the
latter lie in a part of the buffer that only layers that train have.

The next call, of this layer or another one, overwrites the buffer. So `prepare` copies what a call
saves. The rows of a backward are not copied: they are read until the gradients of weights have been
computed, and the combine, which lets other ranks overwrite them, is launched behind that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from moekit.plugin import Dispatched, Pending, Quantizer, Routing, TrainableDispatcher

from .dispatcher import HighThroughputDispatcher
from .transfer import Call


@dataclass(eq=False)
class _Saved(Call):
    """A forward. backward: the call of its backward, from that one's dispatch to its combine."""

    routing: Routing
    backward: list[Call] = field(default_factory=list)


class TrainableHighThroughput(HighThroughputDispatcher, TrainableDispatcher):
    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        arrived = super().prepare(x_TH, routing, quantize).result()
        ids_RK, weights_RK = arrived.topk_ids, arrived.topk_weights
        assert ids_RK is not None and weights_RK is not None
        # The caller may change its ids before the backward.
        routing = replace(routing, topk_ids=routing.topk_ids.clone())
        return Pending.ready(
            replace(
                arrived,
                x=arrived.x.clone(),
                topk_ids=ids_RK.clone(),
                topk_weights=weights_RK.clone(),
                handle=_Saved(**vars(arrived.handle), routing=routing),
            )
        )

    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        saved: _Saved = dispatched.handle
        arrived = super().prepare(grad_TH, saved.routing, None).result()
        saved.backward.append(arrived.handle)
        return Pending.ready(arrived.x)

    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        saved: _Saved = dispatched.handle
        call = saved.backward[-1]
        if grad_RH is not None:
            self._transfer.output(call).copy_(grad_RH)
        if grad_RK is not None:
            self._transfer.router_gradients(call).copy_(grad_RK)

        def come_home() -> tuple[Tensor | None, Tensor | None]:
            saved.backward.remove(call)
            T = len(call.weights)
            out_TH = torch.empty((T, self.problem.hidden_size), dtype=self.problem.dtype,
                                 device=call.weights.device)  # fmt: skip
            out_TK = torch.empty_like(call.weights)
            gather = partial(self._transfer.gather, call, grads_TK=out_TK)
            self._gather(call, out_TH, gather, call.weights, out_TK)
            return None if grad_RH is None else out_TH, None if grad_RK is None else out_TK

        return Pending(come_home)

    def abandon(self, dispatched: Dispatched) -> None:
        saved: _Saved = dispatched.handle
        call = saved.backward.pop() if saved.backward else saved
        super().abandon(replace(dispatched, handle=call))

    def transient_bytes(self, num_tokens: int) -> int:
        """Return also the bytes of ids and weights that a call saves, and the router gradients."""
        entries = self.max_rows(num_tokens) * 8 + num_tokens * (8 + 4)
        return super().transient_bytes(num_tokens) + self.problem.top_k * entries
