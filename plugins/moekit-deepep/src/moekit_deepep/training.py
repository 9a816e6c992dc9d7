"""The backwards of `deepep_ht` and `deepep_elastic`: gradients travel by the handle of the forward.

    dispatch by the handle   brings the gradient of the output to the rows that the tokens had. The
                             host waits for nothing, and the library finds no layout again
    combine                  brings the gradients of rows and of router weights home in one transfer

The handle holds its own tensors, which no other call writes, so calls and their backwards may run
in any order. A combine rewrites only the marks of ranks that a token was not sent to, each time to
the same values. Rows that arrived are copies, apart from the buffer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from moekit.plugin import Dispatched, Pending, TrainableDispatcher

from . import buffers
from .dispatcher import DeepEPDispatcher, ElasticDispatcher, NormalDispatcher, after


class _Trainable(DeepEPDispatcher, TrainableDispatcher):
    @property
    @abstractmethod
    def _dispatch_options(self) -> dict[str, Any]:
        """The options of a dispatch by handle: as many multiprocessors as the forward's."""

    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        grad_RH, *_, event = self._buffer.dispatch(
            grad_TH, handle=dispatched.handle, **self._dispatch_options
        )
        return after(event, lambda: grad_RH)

    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        if grad_RH is None and grad_RK is None:
            return Pending.ready((None, None))
        # The library does not combine router weights alone.
        rows_RH = dispatched.x if grad_RH is None else grad_RH.contiguous()
        out_TH, out_TK, event = self._buffer.combine(
            rows_RH, dispatched.handle,
            topk_weights=None if grad_RK is None else grad_RK.contiguous(),
            **self._combine_options,
        )  # fmt: skip
        return after(event, lambda: (None if grad_RH is None else out_TH, out_TK))


class TrainableNormal(_Trainable, NormalDispatcher):
    @property
    def _dispatch_options(self) -> dict[str, Any]:
        return {"config": self._dispatch_config, "async_finish": True}


class TrainableElastic(_Trainable, ElasticDispatcher):
    @property
    def _dispatch_options(self) -> dict[str, Any]:
        # Without num_sms, the library derives it from num_experts, which a handle stands for.
        return {"num_sms": buffers.NUM_SMS, "async_with_compute_stream": True}
