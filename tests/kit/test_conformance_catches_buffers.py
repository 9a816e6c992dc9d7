"""Wrong dispatchers whose calls or layers share buffers that each needs to itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from conformance_catches import killed_by, wrong
from right_naive import Naive

from moekit.contract.pending import Pending

# -- calls -------------------------------------------------------------------------------


class Receives(Naive):
    """Receives in the buffers that `key` names."""

    _shared: ClassVar[dict[Any, torch.Tensor]] = {}
    _calls = 0

    @abstractmethod
    def key(self): ...

    def received(self, mine):
        """Return whether these rows are received in a buffer."""
        return mine.dtype is not torch.int32

    def _gather(self, mine, everyone, sizes, works):
        super()._gather(mine, everyone, sizes, works)
        for work in works:
            work.wait()
        if not self.received(mine):
            return
        self._calls += 1
        buffer = self._shared.setdefault(self.key(), everyone.new_empty(1 << 18))
        everyone.set_(buffer[: everyone.numel()].view(everyone.shape).copy_(everyone))


wrong("OneReceiveBuffer", "Receives all calls' tokens in one buffer",
      killed_by("test_two_calls_in_flight", 2, says="call 0 of those in flight"), of=Receives,
      key=lambda self: self)  # fmt: skip


@killed_by("test_two_calls_in_flight", 2, says="call 0 of those in flight, finished last first",
           key=Receives)  # fmt: skip
def BuffersInTurn(self):
    """Receives the tokens of its calls in two buffers in turn, in whichever order calls end."""
    return self, self._calls % 2


@killed_by("test_two_calls_in_flight", 2, says="call 0 of those in flight")
class OneScalesBuffer(Receives):
    """Receives the scales of all calls in one buffer."""

    def received(self, mine):
        return mine.shape[1] > 2 * self.problem.top_k and mine.dtype is torch.int32

    def key(self):
        return self


@killed_by("test_two_calls_in_flight", 2, says="call 1 of those in flight, finished run ahead")
class FreeAtTheLaunch(Naive):
    """Copies y to one of its buffers, which the next call has when the combine is launched."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        rows = 256, problem.hidden_size
        self._free = [torch.empty(rows, dtype=problem.dtype) for _ in range(2)]

    def prepare(self, *args):
        pending, own = super().prepare(*args), self._free.pop(0)

        def arrive():
            tokens = pending.result()
            return replace(tokens, handle=(own, tokens.handle))

        return Pending(arrive)

    def finalize(self, y, dispatched, out_TH):
        own, handle = dispatched.handle
        self._free.insert(0, own)
        mine, tokens = own[: len(y)].copy_(y), replace(dispatched, handle=handle)
        launch = super().finalize
        return Pending(lambda: launch(mine, tokens, out_TH).result())


# -- layers ------------------------------------------------------------------------------


@killed_by("test_layers_in_turn", 2, says="layer 0, while both were in flight", key=Receives)
def BuffersOfLayersInTurn(self):
    """Layers of a group share two receive buffers, and each layer uses them in turn."""
    return self.group, self._calls % 2


wrong("BuffersOfLikeLayersInTurn", "The same, for layers that are alike",
      killed_by("test_layers_in_turn", 2, says="layer 0, while both were in flight"), of=Receives,
      key=lambda self: (self.group, self.problem, self._calls % 2))  # fmt: skip


class Shares(Naive):
    """Layers share the object that the first of the ``alike`` layers made."""

    _made: ClassVar[dict[Any, int]] = {}

    def first(self, own, *alike):
        return self._made.setdefault((type(self), self.group, *alike), own)

    def sizes(self):
        p = self.problem
        return p.hidden_size, p.num_experts, p.top_k, p.max_num_tokens

    def destroy(self):
        self._made.clear()


of_the_first = killed_by("test_layers_in_turn", 2, says="layer 1.*(relative error|exact zeros)",
                         handed=Shares)  # fmt: skip


@of_the_first
def BufferOfTheFirstLayer(self, handed):
    """Layers share the buffer of the first layer."""
    handed.topk_ids[:, self.first(self.problem.top_k) :] = -1
    return handed


@of_the_first
def BufferOfTheSameSize(self, handed):
    """Layers share the buffer of the first layer with rows as wide and as many."""
    p = self.problem
    handed.topk_ids[:, self.first(p.top_k, p.hidden_size, p.max_num_tokens) :] = -1
    return handed


@of_the_first
def WidthOfTheFirstLayer(self, handed):
    """Layers share receive buffers as wide as the first layer needs."""
    lost = torch.arange(self.first(self.problem.hidden_size), handed.x.shape[1])
    return replace(handed, x=handed.x.index_fill(1, lost, 0))


@of_the_first
def RoomOfTheFirstLayer(self, handed):
    """Layers share receive buffers with as many rows as the first layer needs."""
    handed.topk_ids[self.first(self.max_rows(self.problem.max_num_tokens)) :] = -1
    return handed


@of_the_first
def SchemeOfTheFirstLayer(self, handed):
    """Layers of equal sizes share buffers without room for scales, if the first needs none."""
    scale = handed.x_scale
    if self.first(scale is not None, *self.sizes()) or scale is None:
        return handed
    return replace(handed, x_scale=torch.ones_like(scale))


@of_the_first
def BytesOfTheFirstLayer(self, handed):
    """Layers of equal sizes share buffers with as many bytes a row as the first of them sends."""
    x, width = handed.x, self.problem.hidden_size
    fit = self.first(width * x.itemsize, *self.sizes()) // x.itemsize
    lost = torch.arange(min(fit, width), width)
    return replace(handed, x=x.index_fill(1, lost, 0) if len(lost) else x)


@killed_by("test_layers_in_turn", 2, says="buffers are gone")
class DestroyedTwice(Naive):
    """Counts a layer that is destroyed twice as two users of what like layers share."""

    _users: ClassVar[dict[Any, int]] = {}

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._key = self.group, problem
        self._users[self._key] = self._users.get(self._key, 0) + 1

    def prepare(self, *args):
        assert self._users[self._key] > 0, "buffers are gone"
        return super().prepare(*args)

    def destroy(self):
        self._users[self._key] = max(0, self._users[self._key] - 1)


@killed_by("test_layers_in_turn", 2, says="buffers are gone")
class DestroyedForAll(Naive):
    """Frees what layers share with the first layer that ends."""

    _open = False

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        DestroyedForAll._open = True

    def prepare(self, *args):
        assert DestroyedForAll._open, "buffers are gone"
        return super().prepare(*args)

    def destroy(self):
        DestroyedForAll._open = False
