"""The base class of the three dispatchers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import DispatcherSpec, Lease, MoEProblem, Pending, PrepareAndFinalize, resolve

from . import buffers


class DeepEPDispatcher(PrepareAndFinalize):
    """A group of ``ep_size`` ranks on one host, each with its own tokens and share of the experts.

    Transfers run on the library's stream, in the order in which they were started: any number of
    calls may be in flight. Construction is collective, and so are calls and, with the last kernel
    that uses a buffer, `destroy`.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[buffers.Held]
    makes_output = True

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, self._protocol()))
        assert self.group is not None
        self.lease = self._acquire(self.group)

    def _protocol(self) -> str:
        return buffers.protocol()

    @abstractmethod
    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.Held]: ...

    @property
    def _buffer(self) -> Any:
        return self.lease.value.buffer


def capturing(x: Tensor) -> bool:
    """Return whether the current stream's calls go into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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


def combined(event: Any, combined_TH: Tensor, out_TH: Tensor | None) -> Pending[Tensor]:
    """Return the library's output once ``event`` has happened, in ``out_TH`` if that is given."""
    transfer = Transfer(event)

    def arrive() -> Tensor:
        transfer.wait()
        if out_TH is None:
            return combined_TH
        if combined_TH.data_ptr() != out_TH.data_ptr():
            out_TH.copy_(combined_TH)
        return out_TH

    return Pending(arrive)
