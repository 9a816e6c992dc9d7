"""The load of a model's experts over the last steps, and what is done about it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights, Routing
from moekit.eplb.migrate import HalfMoved, MigrationReport, agree, digest, migrate
from moekit.eplb.policy import Policy, improve, named_policy
from moekit.errors import InvalidInput, Unsupported, WeightsError
from moekit.kernel import ModularKernel
from moekit.layer.layer import FusedMoE
from moekit.layer.replicas import to_physical
from moekit.problem.placement import Placement
from moekit.runtime.checks import ID_DTYPES, check_ids, check_tensor, check_tokens, device_of
from moekit.untrusted.arguments import (
    FUNCTION,
    GROUP,
    MAX_EXPERTS,
    MAX_TOKENS,
    NAME,
    accept,
    either,
    instance,
    optional,
    real,
    sequence,
    shown,
    size,
)

_WINDOW = {"layers": size(), "num_experts": size(1, MAX_EXPERTS), "steps": size()}
_KINDS = {
    "kernel": instance("a ModularKernel", ModularKernel),
    "packed": sequence("PackedWeights", PackedWeights),
    "policy": either(FUNCTION, NAME),
    "options": optional(instance("a mapping of names to integers", Mapping)),
    "min_gain": real(most=1.0, finite=False),
    "staging_bytes": size(1, 2**62),
    "placements": optional(sequence("Placement", Placement)),
    "group": optional(GROUP),
}


class LoadWindow:
    """Tokens per layer and logical expert over the last ``steps`` steps, kept on the device.

    Logical, so that counts stay true when experts move. ``record`` does not synchronize, can be
    captured in a CUDA graph, and may be called by any thread on any stream; ``step`` is the host's.
    """

    def __init__(
        self, layers: int, num_experts: int, steps: int, device: torch.device | str = "cpu"
    ) -> None:
        accept(_WINDOW, locals(), InvalidInput)
        if (count := layers * num_experts * steps) > MAX_TOKENS:
            raise InvalidInput(
                f"a window of {steps} steps of {layers} layers of {num_experts} experts has "
                f"{count} counters: use fewer steps"
            )
        self._now = torch.zeros((layers, num_experts), dtype=torch.int32, device=device)
        self._last = self._now.repeat(steps, 1, 1)
        self._step = 0
        self._lock = threading.Lock()

    def record(self, topk_ids: Tensor, layer: int = 0) -> None:
        """Counts logical ids (T, K) in the current step; -1 does not count."""
        check_tensor("topk_ids", topk_ids)
        if topk_ids.dim() != 2 or topk_ids.dtype not in ID_DTYPES:
            raise InvalidInput(f"topk_ids is {shown(topk_ids)}, want (T, K) of int32 or int64")
        if not 0 <= check_tokens(layer, "layer") < len(self._now):
            raise InvalidInput(f"layer={layer}: want 0..{len(self._now) - 1}")
        if topk_ids.device.type == "cpu":
            check_ids(topk_ids, self._now.shape[1])
        ids = topk_ids.flatten().long()
        index, counted = ids.clamp(min=0), (ids >= 0).int()
        with self._lock:  # the CPU does not add atomically
            self._now[layer].scatter_add_(0, index, counted)

    def step(self) -> None:
        """Ends the current step; the oldest one leaves a full window."""
        with self._lock:
            self._last[self._step % len(self._last)].copy_(self._now)
            self._now.zero_()
            self._step += 1

    def total(self, group: dist.ProcessGroup | None = None, *, mine: bool = True) -> Tensor:
        """Sum over finished steps and the ranks of ``group``: (layers, E) int64 on the CPU.

        Collective where a group is given. mine: False where another rank counts the same tokens.
        """
        total = self._last.sum(dim=0, dtype=torch.int64)
        if group is not None:
            total *= mine
            dist.all_reduce(total, group=group)
        return total.cpu()


@dataclass(frozen=True)
class RebalanceReport:
    """A layer's heaviest rank over its mean rank, before and after, and what moved, if anything."""

    layer: int
    before: float
    after: float
    migration: MigrationReport | None

    def __str__(self) -> str:
        moved = "nothing moved" if self.migration is None else self.migration
        return f"layer {self.layer}: max/mean load {self.before:.2f} -> {self.after:.2f}; {moved}"


class Rebalancer:
    """Balances layers of equal problems::

        rebalancer = Rebalancer.of(layers)       # FusedMoE: they route and count by themselves
        rebalancer.step()                        # after each step of the model
        rebalancer.rebalance()                   # now and then, between steps

    or, without FusedMoE, ``Rebalancer(kernel, packed)`` and for every call
    ``kernel(x, packed[i], rebalancer.route(logical, i))``.

    policy: a `Policy`, or the name of one in `POLICIES` with its ``options``. window: steps whose
    load counts. min_gain: the fraction by which a layer's heaviest rank must get lighter for its
    experts to move. placements: where the layers' experts are, if not at `Placement.default`.
    group: the ranks of a layer; default: the kernel's, else all.
    ``loads`` and ``rebalance`` are collective.

    Raises Unsupported for experts that do not declare their packed weights movable.
    """

    def __init__(
        self,
        kernel: ModularKernel,
        packed: Sequence[PackedWeights],
        *,
        policy: str | Policy = "global",
        options: Mapping[str, int] | None = None,
        window: int = 1000,
        min_gain: float = 0.0,
        staging_bytes: int = 2**27,
        placements: Sequence[Placement] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        accept(_KINDS, locals(), InvalidInput)
        problem, spec, parallel = kernel.problem, kernel.experts.spec, kernel.problem.parallel
        if not spec.movable:
            reason = "packs weights in a form in which experts cannot move"
            raise Unsupported(f"experts {spec.name!r}: {reason}; choose others", [reason])
        if not packed or (placements is not None and len(placements) != len(packed)):
            raise InvalidInput(
                "want the packed weights of at least one layer, and as many placements if any"
            )
        for each in packed:
            device_of(each)
        self.policy = named_policy(policy, options or {}) if isinstance(policy, str) else policy
        self.packed, self.min_gain, self.staging_bytes = list(packed), min_gain, staging_bytes
        self.placements = list(placements or [Placement.default(problem)] * len(packed))
        self._layers: Sequence[FusedMoE] = ()
        ranks = parallel.ep_size * parallel.tp_size
        self.group = group or kernel.dispatcher.group or (dist.group.WORLD if ranks > 1 else None)
        # Ranks that hold the same tokens must choose the same replicas, others need not.
        rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
        self._batch = rank * parallel.dp_size // ranks
        self._counts = rank == 0 or (rank - 1) * parallel.dp_size // ranks < self._batch
        device = next(iter(packed[0].experts.values())).device
        with torch.inference_mode(False):  # tensors to be overwritten in any mode
            self.window = LoadWindow(len(packed), problem.num_experts, window, device)
            # One table for good: captured graphs read it.
            self.replicas = torch.stack([p.logical_to_physical(device) for p in self.placements])

    @classmethod
    def of(cls, layers: Sequence[FusedMoE], **options: Any) -> Rebalancer:
        """For layers with weights. They keep to its replicas, and are counted, from now on."""
        accept({"layers": sequence("FusedMoE", FusedMoE)}, {"layers": layers}, InvalidInput)
        packed = [layer.packed for layer in layers if layer.packed is not None]
        if len(packed) < len(layers) or len({repr(layer.problem) for layer in layers}) != 1:
            raise InvalidInput("want layers with weights, one or more, and all of one problem")
        placements = [layer.placement for layer in layers]
        made = cls(layers[0].kernel, packed, placements=placements, **options)
        made._layers = layers
        for index, layer in enumerate(layers):
            layer.set_replicas(made.replicas[index], partial(made.window.record, layer=index))
        return made

    def route(self, routing: Routing, layer: int = 0) -> Routing:
        """Logical ids -> physical ids of the layer's replicas; counts them in the window."""
        if not isinstance(routing, Routing):
            raise InvalidInput(f"routing is {shown(routing)}, want moekit.Routing")
        self.window.record(routing.topk_ids, layer)
        return to_physical(routing, self.replicas[layer], self._batch)

    def step(self) -> None:
        """Ends a step of the model."""
        self.window.step()

    def loads(self) -> Tensor:
        """Tokens per layer and logical expert in the window, on all ranks: (layers, E) int64.

        Tokens that several ranks hold count once.
        """
        return self.window.total(self.group, mine=self._counts)

    def rebalance(self) -> list[RebalanceReport]:
        """Moves every layer's experts to where the policy wants them; returns when they are there.

        No call may be in flight. Nothing moves in any layer, and every rank raises, if the policy
        fails on some rank, returns no valid placement, or different ones (errors as `migrate`'s).
        """
        loads, wanted = self.loads().double(), []
        error: Exception | None = None
        try:
            for layer, owner in enumerate(self._layers):
                if owner.packed is None:
                    raise WeightsError(f"layer {layer} has no weights: call its load_weights()")
                self.packed[layer] = owner.packed  # perhaps loaded anew
            for load_E, now in zip(loads, self.placements, strict=True):
                wanted.append(improve(self.policy, load_E, now, self.min_gain))
        except Exception as found:  # a stranger's code; the other ranks must hear of it
            error = found
        agree(self.group, {"placements wanted": digest(wanted)}, error)
        return [self._move(layer, loads[layer], new) for layer, new in enumerate(wanted)]

    def _move(self, layer: int, load_E: Tensor, new: Placement) -> RebalanceReport:
        old, migration = self.placements[layer], None
        if new != old:
            owners = self._layers[layer : layer + 1]
            try:
                migration = migrate(
                    self.packed[layer], old, new, self.group, staging_bytes=self.staging_bytes
                )
            except HalfMoved:
                for owner in owners:
                    owner.packed = None
                raise
            self.replicas[layer].copy_(new.logical_to_physical())
            self.placements[layer] = new
            for owner in owners:
                owner.placement = new
        return RebalanceReport(layer, old.imbalance(load_E), new.imbalance(load_E), migration)
