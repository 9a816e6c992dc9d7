"""The backward of `nccl_ht`: gradients travel by the library's backward direction.

Rows depend on the routing alone, so after an update with the forward's ids the gradient of the
output gets the same rows as the tokens. The combine then returns the gradients of rows and of
router weights in one transfer. No handle outlives a call or its backward, which may run twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import nccl.ep as ep
import torch
from torch import Tensor

from moekit.plugin import Dispatched, Pending, Quantizer, Routing, TrainableDispatcher

from .buffers import described
from .dispatcher import Call, HighThroughputDispatcher

_DISPATCH = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
_COMBINE = ep.CombineConfig(pass_direction=ep.PassDir.BWD)


@dataclass(frozen=True)
class _Saved(Call):
    """A forward. backward: the calls of its backwards, from their dispatch to their combine."""

    backward: list[Call] = field(default_factory=list)


class TrainableHighThroughput(HighThroughputDispatcher, TrainableDispatcher):
    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        arrived = super().prepare(x_TH, routing, quantize).result()
        call, ids, weights = arrived.handle, arrived.topk_ids, arrived.topk_weights
        assert ids is not None and weights is not None
        # Other calls overwrite the rows, and the caller may change its ids before the backward.
        return Pending.ready(
            replace(
                arrived, x=arrived.x.clone(), topk_ids=ids.clone(), topk_weights=weights.clone(),
                handle=_Saved(**{**vars(call), "ids": call.ids.clone()}),
            )
        )  # fmt: skip

    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        saved: _Saved = dispatched.handle
        held = self.lease.value
        call = Call(held.calls.take(), saved.ids, saved.weights, saved.tokens, saved.rows)
        stream, memory = held.stream(), call.memory
        grad = self._mine(grad_TH)  # must live until the dispatch
        inputs = ep.DispatchInputs(tokens=described(grad))
        outputs = ep.DispatchOutputs(tokens=memory.x_tensor)
        try:
            memory.handle.update(described(call.ids), stream=stream)
            memory.handle.dispatch(inputs, outputs, config=_DISPATCH, stream=stream)
        except BaseException:
            held.calls.give_back(memory)
            raise
        saved.backward.append(call)
        return Pending.ready(memory.got[False][0][: call.rows])

    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        saved: _Saved = dispatched.handle
        call, held, p = saved.backward[-1], self.lease.value, self.problem
        memory, slots = call.memory, held.sizes.slots
        held.calls.keep_order()
        grad = memory.y[: call.rows]
        if grad_RH is not None:
            grad.copy_(grad_RH)
        sent = grad.new_zeros((call.rows, slots), dtype=torch.float32)
        if grad_RK is not None:
            sent[:, : p.top_k] = grad_RK
        out_TH = grad.new_empty((call.tokens, p.hidden_size))
        out_TS = sent.new_empty((call.tokens, slots))
        inputs = ep.CombineInputs(tokens=memory.tensor(2, grad), topk_weights=described(sent))

        def both(mine_TH: Tensor) -> None:
            def combine(mine_TS: Tensor) -> None:
                weights = described(mine_TS)
                outputs = ep.CombineOutputs(tokens=described(mine_TH), topk_weights=weights)
                memory.handle.combine(inputs, outputs, config=_COMBINE, stream=held.stream())

            self._gathered(out_TS, combine)

        self._gathered(out_TH, both)

        def come_home() -> tuple[Tensor | None, Tensor | None]:
            # Until now, the gradients of weights are computed from the rows of this call.
            saved.backward.remove(call)
            held.calls.give_back(memory)
            out_TK = out_TS.view(call.tokens, p.top_k, self._slices).sum(dim=2)
            return None if grad_RH is None else out_TH, None if grad_RK is None else out_TK

        return Pending(come_home)

    def abandon(self, dispatched: Dispatched) -> None:
        saved: _Saved = dispatched.handle
        if not saved.backward:
            return super().abandon(dispatched)
        grad_RH = torch.full_like(saved.memory.y[: saved.rows], float("nan"))
        self.finalize_backward(grad_RH, None, dispatched).result()

    def transient_bytes(self, num_tokens: int) -> int:
        """Add the bytes that a call saves, and the bytes of router gradients."""
        p, rows, slots = self.problem, self.max_rows(num_tokens), self.lease.value.sizes.slots
        saved = rows * (p.hidden_size * p.dtype.itemsize + 12 * p.top_k) + 8 * slots * num_tokens
        return super().transient_bytes(num_tokens) + saved + 4 * slots * (rows + 2 * num_tokens)
