"""The base class of the three dispatchers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import CapacityExceeded
from moekit.plugin import (
    Dispatched,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    resolve,
)

from . import buffers

if TYPE_CHECKING:
    from moekit.plugin import DispatcherSpec


class DeepEPDispatcher(PrepareAndFinalize):
    """A group of ``ep_size`` ranks on one host, each with its own tokens and share of the experts.

    Transfers run on the library's stream, in the order in which they were started: any number of
    calls may be in flight. Construction is collective, and so are calls and, with the last kernel
    that uses a buffer, `destroy`.
    """

    makes_output = True

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, self._protocol()))
        assert self.group is not None
        self._lease: buffers.Lease | None = self._acquire(self.group)

    def _protocol(self) -> str:
        return buffers.protocol()

    @abstractmethod
    def _acquire(self, group: dist.ProcessGroup) -> buffers.Lease: ...

    @abstractmethod
    def _dispatch(
        self, buffer: Any, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        """Implement `prepare` with deep_ep's ``buffer``."""

    @abstractmethod
    def _combine(
        self, buffer: Any, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None
    ) -> Pending[Tensor]:
        """Implement `finalize` with deep_ep's ``buffer``; without ``out_TH`` return its tensor."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        most = self.problem.max_num_tokens
        if most is not None and x_TH.shape[0] > most:
            raise CapacityExceeded(
                f"{x_TH.shape[0]} tokens, but max_num_tokens={most}: split the call, or compose "
                "for more"
            )
        return self._dispatch(self._buffer, x_TH, routing, quantize)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        return self._combine(self._buffer, y, dispatched, out_TH)

    @property
    def _buffer(self) -> Any:
        assert self._lease is not None, "called after destroy()"
        return self._lease.buffer

    def max_rows(self, num_tokens: int) -> int:
        assert self.group is not None
        return self.group.size() * self._tokens(num_tokens)

    @abstractmethod
    def _tokens(self, num_tokens: int) -> int:
        """Return the tokens of each rank that a call of ``num_tokens`` tokens has room for."""

    def transient_bytes(self, num_tokens: int) -> int:
        return self._transient_bytes(num_tokens, self.max_rows(num_tokens))

    @abstractmethod
    def _transient_bytes(self, num_tokens: int, rows: int) -> int: ...

    def buffer_bytes(self) -> int:
        return 0 if self._lease is None else self._lease.nbytes

    def destroy(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class Transfer:
    """A transfer on the library's stream, whose tensors must live until it is finished.

    `wait` makes the current stream wait for the transfer. Deleting an object that nobody waited for
    does the same, before the memory of its tensors can be reused.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.current_stream_wait()

    __del__ = wait


def quantized_rows(
    x_TH: Tensor, topk_ids: Tensor, quantize: Quantizer, problem: MoEProblem
) -> tuple[Tensor, Tensor]:
    """Quantize x for the transfer: one byte per element, and scales (T, groups) fp32.

    A scale for the whole tensor differs between ranks, so every row carries it.
    """
    activation = problem.quant.activation
    assert activation is not None
    shared = activation.per_tensor and not activation.static
    x, scale = quantize(x_TH, (topk_ids >= 0).any(dim=1) if shared else None)
    scale = scale.to(torch.float32).expand(x.shape[0], scale.shape[1])
    return x.contiguous(), scale.contiguous()
