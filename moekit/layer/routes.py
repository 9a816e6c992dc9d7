"""Record which experts the tokens of a model go to, and replay them in another pass.

A log has one fixed buffer for all layers. Inside a `Block` each layer writes its choice to the
buffer, or reads its experts from it, also in captured CUDA graphs. No call waits for the device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moekit.contract.pending import Pending
from moekit.errors import InvalidInput
from moekit.runtime.checks import check_tokens
from moekit.runtime.workspace import is_capturing
from moekit.untrusted.arguments import shown


@dataclass(frozen=True, eq=False)
class LayerLog:
    """A layer's part of a `RoutingLog`, for `moekit.route`."""

    log: RoutingLog
    name: str
    index: int
    num_experts: int
    top_k: int

    def choose(self, ids: Tensor, fixed: bool = False) -> Tensor:
        """Return the experts (T, K) of a call: the router's choice ``ids``, or the replayed ones.

        fixed: ``ids`` already have weights, so replaying different ids raises InvalidInput.
        """
        if torch.compiler.is_compiling():
            return _operator(ids, self.log.number, self.index, fixed)  # type: ignore[no-any-return]
        return self.log._choose(self, ids, fixed)

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a router whose `torch.topk` then returns the experts that `choose` returns."""
        if self.log._block is None and not self.log._in_block:
            return function(*args, **keywords)
        with _Topk() as mode:
            mode.layer = self
            made = function(*args, **keywords)
        if mode.ids is None:
            what = f"{self.top_k} of {self.num_experts} experts by torch.topk"
            raise InvalidInput(f"layer {self.name!r} did not choose {what}: detach the log from it")
        return made


class _Topk(TorchFunctionMode):
    layer: LayerLog
    ids: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, layer = func(*args, **(kwargs or {})), self.layer
        if func not in (torch.topk, Tensor.topk):
            return made
        scores: Any = args[0] if args else kwargs["input"]
        if (scores.shape[-1], made[1].shape[-1]) != (layer.num_experts, layer.top_k):
            return made  # a choice of groups, for example
        if self.ids is None:
            self.ids = layer.choose(made[1].flatten(0, -2)).view_as(made[1])
        return torch.return_types.topk((scores.gather(-1, self.ids), self.ids))


class Block:
    """A step of a server, or a micro-batch of a trainer: ``with log.record() as block``.

    One forward pass runs in a block, and each layer routes once. A recomputation in backward gets
    the same experts. Enter the block again around a backward that runs later.
    """

    def __init__(self, log: RoutingLog, given: Tensor | None) -> None:
        self._log, self._replays = log, given is not None
        self._held = given  # the buffer's rows while the block is not entered
        self._tokens = None if given is None else len(given)
        self._called: set[int] = set()  # the layers of the forward pass
        self._taken = False
        self._outer: list[Block | None] = []

    def __enter__(self) -> Block:
        if self._log.undo is None:
            raise InvalidInput("the log is detached, or another one took its layers: make a log")
        self._outer.append(self._log._block)
        self._log._switch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log._switch(self._outer.pop())

    def take(self, num_tokens: int | None = None) -> Pending[Tensor]:
        """Start an asynchronous copy to the CPU of ids (T, layers, K), int16 or int32.

        In a block of `record`, another forward pass may follow. After a CUDA graph's replay, pass
        its num_tokens. Raises InvalidInput outside the block.
        """
        tokens = self._tokens if num_tokens is None else check_tokens(num_tokens)
        if self._log._block is not self or tokens is None or tokens > len(self._log._ids):
            wanted = f"a forward pass of at most {len(self._log._ids)} tokens, or with num_tokens"
            raise InvalidInput(f"call take() in its block, after {wanted} (got {tokens or 'none'})")
        self._taken, rows = not self._replays, self._log._ids[:tokens]
        if rows.device.type == "cpu":
            return Pending.ready(rows.clone())
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        copied = torch.get_device_module(rows.device).current_stream(rows.device).record_event()
        return Pending(lambda: copied.synchronize() or host)

    def _misfit(self, layer: LayerLog, ids: Tensor, again: bool) -> str:
        """Count a layer's call, and return what is wrong with it, or an empty string."""
        if self._taken and not again:
            self._called, self._tokens, self._taken = set(), None, False
        if ids.dim() != 2 or ids.shape[1] != layer.top_k:
            return f"needs topk_ids (T, {layer.top_k}) (got {shown(ids)})"
        if again and (layer.index not in self._called or len(ids) != self._tokens):
            return _OUTSIDE
        if not again and layer.index in self._called:
            return "runs twice in one block: open a block for each forward pass, or take() between"
        most, self._tokens = len(self._log._ids), len(ids) if self._tokens is None else self._tokens
        if not len(ids) == self._tokens <= most:
            return f"got {len(ids)} tokens in a block of {self._tokens}; at most max_tokens={most}"
        self._called.add(layer.index)
        return ""


_OUTSIDE = "runs again in backward, outside of its block: enter it, or use context_fn=log.contexts"


class RoutingLog:
    """Records and replays the logical experts of a model's tokens, before EPLB maps them::

        log = moekit.RoutingLog.of(model, max_tokens=8192)
        with log.record() as step:                 # in a server
            model(tokens)
            ids = step.take()                      # an asynchronous copy
        with log.replay(ids.result()):             # in a trainer
            model(tokens).loss.backward()

    The router gathers the weights of replayed experts from its scores of all experts, with
    gradients. A log holds this rank's tokens. Attach it before torch.compile or a CUDA
    graph sees the layers, and capture graphs inside a block. One thread at a time may run them.

    Args:
        layers: (experts that the router chooses from, top_k) by name. `moekit.route` takes
            ``log[name]``.
        max_tokens: The most tokens of a forward pass.
        device: The layers' device.
    """

    _numbered: WeakValueDictionary[int, RoutingLog] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(
        self, layers: Mapping[str, tuple[int, int]], max_tokens: int, device: Any = "cpu"
    ) -> None:
        if not layers or not check_tokens(max_tokens, "max_tokens"):
            raise InvalidInput(
                "a log needs a FusedMoE layer or a name, and max_tokens of at least 1"
            )
        self.layers = tuple(layers)
        self._parts = {n: LayerLog(self, n, i, *layers[n]) for i, n in enumerate(self.layers)}
        experts, top_k = map(max, zip(*layers.values(), strict=True))
        dtype = torch.int16 if experts < 2**15 else torch.int32
        with torch.inference_mode(False):
            self._ids = torch.full((max_tokens, len(layers), top_k), -1, dtype=dtype, device=device)
        self._block: Block | None = None
        self._in_block = False  # whether the layers' last forward pass was in a block
        self.undo: Any = []  # what `detach` calls; None once it did
        self.number = next(self._numbers)
        self._numbered[self.number] = self

    @classmethod
    def of(cls, model: nn.Module, max_tokens: int) -> RoutingLog:
        """Return a log of a model's `FusedMoE` layers, until its `detach()` or another log."""
        found = {
            name or str(module.prefix): module
            for name, module in model.named_modules()
            if hasattr(vars(module).get("router"), "log")
        }
        sizes = {name: (m.router.width, m.router.top_k) for name, m in found.items()}
        log = cls(sizes, max_tokens, next((m.device for m in found.values()), "cpu"))
        for name, module in found.items():
            if module.router.log is not None:
                module.router.log.log.detach()
            module.router.log = log[name]
        log.undo = [partial(setattr, m.router, "log", None) for m in found.values()]
        return log

    def detach(self) -> None:
        """Let the layers route without this log, whose blocks cannot be entered any more."""
        for undo in self.undo or ():
            undo()
        self.undo = None

    def __getitem__(self, name: str) -> LayerLog:
        return self._parts[name]

    def record(self) -> Block:
        """Return a block that records the experts which the layers choose."""
        return Block(self, None)

    def replay(self, ids: Any) -> Block:
        """Return a block in which layers use these experts.

        ids: Logical ids of T tokens: (T, K) for each layer's name; (T, N, K) of the log's layers;
        or of all layers of the model, as vLLM's ``routed_experts``. The one integer in a layer's
        name is then its number. A token with ids of -1 keeps the router's choice. Raises an
        InvalidInput that names the layer if ids do not fit.
        """
        return Block(self, self._checked(ids).to(self._ids.device, non_blocking=True))

    def contexts(self) -> tuple[Any, Any]:
        """Let recomputations replay their own block, as ``context_fn`` of torch's checkpoint()."""
        return nullcontext(), self._block or nullcontext()

    def _switch(self, new: Block | None) -> None:
        """Leave the current block, and load the rows of another one into the buffer."""
        old = self._block
        if old is new:
            return
        if is_capturing(self._ids.device):
            raise InvalidInput("enter a block of a RoutingLog before the CUDA graph is captured")
        if old is not None and old._tokens is not None and (new or torch.is_grad_enabled()):
            old._held = self._ids[: old._tokens].clone()
        self._block = new
        self._ids.fill_(-1)
        if new is not None and new._held is not None:
            self._ids[: len(new._held)].copy_(new._held)

    def _choose(self, layer: LayerLog, ids: Tensor, fixed: bool) -> Tensor:
        """Return the experts (T, K) of a call, and write them to the buffer."""
        # A layer that runs while autograd runs in this thread is computed again for a checkpoint.
        again, block = torch._C._current_graph_task_id() != -1, self._block
        self._in_block = self._in_block if again else block is not None
        if block is None and not (again and self._in_block):
            return ids
        wrong = _OUTSIDE if block is None else block._misfit(layer, ids, again)
        if block is None or wrong:
            raise InvalidInput(f"layer {layer.name!r} {wrong}")
        held = self._ids[: len(ids), layer.index, : layer.top_k]
        made = torch.where(held < 0, ids, held).to(ids.dtype) if again or block._replays else ids
        if fixed and made is not ids and not torch.equal(made, ids):
            raise InvalidInput(
                f"layer {layer.name!r} got topk_ids, but others are replayed: give router_logits"
            )
        held.copy_(made)
        return made

    def _checked(self, ids: Any) -> Tensor:
        """Return the ids (T, layers, K) of this log's layers, as the buffer holds them."""
        found, made = self._by_layer(ids), []
        (most, _, K), tokens = self._ids.shape, len(found[0])
        for given, part in zip(found, self._parts.values(), strict=True):
            k, what = part.top_k, f"topk_ids of layer {part.name!r}"
            shaped = given.dim() == 2 and len(given) == tokens <= most and given.shape[1] in (k, K)
            if not shaped or given.is_floating_point() or given.is_complex():
                wanted = f"integers (T, {k}), T the same for all and at most {most}"
                raise InvalidInput(f"{what} must be {wanted} (got {shown(given)})")
            own = given.cpu().long()
            bad = ((own < 0) | (own >= part.num_experts))[:, :k].any(1)
            bad |= (own[:, :k].sort().values.diff() == 0).any(1)
            bad = (bad & (own != -1).any(1)) | (own[:, k:] != -1).any(1)
            if bool(bad.any()):
                wanted = f"{k} different experts of 0..{part.num_experts - 1}, or only -1"
                which = f"{own[bad][0].tolist()} for token {int(bad.nonzero()[0])}"
                raise InvalidInput(f"{what} are {which}: they must be {wanted}")
            made.append(nn.functional.pad(own[:, :k], (0, K - k), value=-1))
        return torch.stack(made, 1).to(self._ids.dtype)

    def _by_layer(self, ids: Any) -> list[Tensor]:
        if isinstance(ids, Mapping):
            if missing := [name for name in self.layers if name not in ids]:
                raise InvalidInput(f"layer {missing[0]!r} has no topk_ids among {shown([*ids])}")
            return [torch.as_tensor(ids[name]) for name in self.layers]
        given, places = torch.as_tensor(ids), list(range(len(self.layers)))
        if given.dim() == 3 and given.shape[1] != len(places):
            numbers = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in self.layers]
            places = [int(n[0]) if len(n) == 1 else -1 for n in numbers]
        if given.dim() != 3 or not all(0 <= place < given.shape[1] for place in places):
            wanted = f"(T, {len(places)}, K) of {shown(self.layers)}, (T, K) by name, or (T, N, K)"
            every = "of N layers, where the one integer in each name is the index"
            raise InvalidInput(f"topk_ids must be {wanted} {every} (got {shown(given)})")
        return [given[:, place] for place in places]


# torch.compile leaves it out of CUDA graphs, so Python finds the current block in every call.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("moekit::choose_experts", mutates_args=(), tags=_UNSAFE)
def _operator(ids: Tensor, log: int, layer: int, fixed: bool) -> Tensor:
    found = RoutingLog._numbered[log]
    return found._choose(found[found.layers[layer]], ids, fixed).clone()


@_operator.register_fake
def _(ids: Tensor, *_: object) -> Tensor:
    return torch.empty_like(ids)
