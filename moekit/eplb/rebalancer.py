"""Count the load of a model's experts, and move the experts to balance it."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights, Routing
from moekit.eplb.migrate import MigrationInterrupted, MigrationReport, agree, digest, migrate
from moekit.eplb.policy import Balanced, Policy, improve
from moekit.errors import InvalidInput, Unsupported, WeightsError
from moekit.kernel import ModularKernel
from moekit.layer.layer import FusedMoE
from moekit.layer.replicas import Placement, to_physical
from moekit.runtime.checks import ID_DTYPES, check_ids, check_tensor, check_tokens, device_of
from moekit.untrusted.arguments import MAX_TOKENS, shown


class LoadWindow:
    """Counts tokens of each layer and logical expert over the last ``steps`` steps, on the device.

    Counts are of logical experts, so they stay valid when experts move. ``record`` does not
    synchronize, can be captured in a CUDA graph, and may be called from any thread on any stream.
    ``step`` counts what has been recorded before it on its own stream, so let that wait for others.

    Raises InvalidInput for too many counters.
    """

    def __init__(
        self, layers: int, num_experts: int, steps: int, device: torch.device | str = "cpu"
    ) -> None:
        sizes = map(operator.index, (layers, num_experts, steps))  # a text times a number is long
        if not 0 < (count := math.prod(sizes)) <= MAX_TOKENS:
            raise InvalidInput(
                f"a window must have 1 to {MAX_TOKENS} counters (got {count} for {steps} steps "
                f"of {layers} layers of {num_experts} experts): use fewer steps"
            )
        self._now = torch.zeros((layers, num_experts), dtype=torch.int32, device=device)
        self._last = self._now.repeat(steps, 1, 1)
        self._step = 0
        self._lock = threading.Lock()

    def record(self, topk_ids: Tensor, layer: int = 0) -> None:
        """Count logical ids (T, K) in the current step; -1 does not count."""
        check_tensor("topk_ids", topk_ids)
        if topk_ids.dim() != 2 or topk_ids.dtype not in ID_DTYPES:
            raise InvalidInput(f"topk_ids must be (T, K) of int32 or int64 (got {shown(topk_ids)})")
        if not 0 <= check_tokens(layer, "layer") < len(self._now):
            raise InvalidInput(f"layer must be in 0..{len(self._now) - 1} (got {layer})")
        if topk_ids.device.type == "cpu":
            check_ids(topk_ids, self._now.shape[1])
        ids = topk_ids.flatten().long()
        index, counted = ids.clamp(min=0), (ids >= 0).int()
        with self._lock:  # additions on the CPU are not atomic
            self._now[layer].scatter_add_(0, index, counted)

    def step(self) -> None:
        """End the current step; a full window drops the oldest one."""
        with self._lock:
            self._last[self._step % len(self._last)].copy_(self._now)
            self._now.zero_()
            self._step += 1

    def total(self, group: dist.ProcessGroup | None = None, *, mine: bool = True) -> Tensor:
        """Return the sum over finished steps and ranks, (layers, E) int64 on the CPU.

        Args:
            group: Sum over these ranks; then the call is collective.
            mine: False if another rank counts the same tokens.
        """
        total = self._last.sum(dim=0, dtype=torch.int64)
        if group is not None:
            total *= mine
            dist.all_reduce(total, group=group)
        return total.cpu()


@dataclass(frozen=True)
class RebalanceReport:
    """The result of rebalancing one layer.

    Attributes:
        layer: The layer's index.
        before, after: Load imbalance: the load of the hottest rank over the mean.
        migration: What moved; None if nothing did.
    """

    layer: int
    before: float
    after: float
    migration: MigrationReport | None

    def __str__(self) -> str:
        moved = "nothing moved" if self.migration is None else self.migration
        return f"layer {self.layer}: max/mean load {self.before:.2f} -> {self.after:.2f}; {moved}"


class Rebalancer:
    """Balances the load of layers with equal problems::

        rebalancer = Rebalancer.of(layers)       # FusedMoE layers route and count from now on
        rebalancer.step()                        # after each step of the model
        rebalancer.rebalance()                   # once in a while, between steps

    Without FusedMoE, use ``Rebalancer(kernel, packed)``, and for every call
    ``kernel(x, packed[i], rebalancer.route(logical, i))``.

    Args:
        kernel: The kernel of the layers.
        packed: The packed weights of each layer.
        policy: Chooses placements. Default: `Balanced`, with any expert on any rank.
        window: Finished steps whose load counts.
        min_gain: The fraction by which the load of a layer's hottest rank must fall.
        staging_bytes: Limit of a rank's staging buffer; see `migrate`.
        placements: The current placements. Default: `Placement.default` of each layer.
        group: The ranks of a layer. Default: the kernel's group, else all ranks.

    Raises:
        Unsupported: The experts backend does not declare its packed weights movable.
        InvalidInput: The lists' lengths differ, or two layers have the same weights.
    """

    def __init__(
        self,
        kernel: ModularKernel,
        packed: Sequence[PackedWeights],
        *,
        policy: Policy | None = None,
        window: int = 1000,
        min_gain: float = 0.0,
        staging_bytes: int = 2**27,
        placements: Sequence[Placement] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        problem, spec, parallel = kernel.problem, kernel.experts.spec, kernel.problem.parallel
        if not spec.movable:
            reason = "its packed weights cannot move between ranks"
            raise Unsupported(f"experts {spec.name!r}: {reason}; choose another backend", [reason])
        if problem.adapters is not None:
            reason = "adapters do not migrate with their experts"
            raise Unsupported(f"{reason}: compose the layers without adapters", [reason])
        placed = [Placement.default(problem)] * len(packed) if placements is None else placements
        if not packed or len(placed) != len(packed):
            raise InvalidInput(
                "packed must hold the weights of at least one layer, and placements, if given, one "
                f"for each of them (got {len(packed)} layers, {len(placed)} placements)"
            )
        _check_apart(packed)
        self.policy: Policy = policy or Balanced()
        self.packed, self.min_gain, self.staging_bytes = list(packed), min_gain, staging_bytes
        self.placements = list(placed)
        self._layers: Sequence[FusedMoE] = ()
        self._routes: Sequence[object] = ()  # the layers' routing by this table
        rank, ranks = parallel.rank, parallel.num_ranks
        self.group = group or kernel.dispatcher.group or (dist.group.WORLD if ranks > 1 else None)
        # Ranks that hold the same tokens must choose the same replicas; others need not.
        self._batch = rank * parallel.dp_size // ranks
        self._counts = rank == 0 or (rank - 1) * parallel.dp_size // ranks < self._batch
        device = device_of(packed[0])
        with torch.inference_mode(False):  # tensors that may be written in any mode
            self.window = LoadWindow(len(packed), problem.num_experts, window, device)
            # Captured CUDA graphs read this table, so it is never replaced.
            self.replicas = torch.stack([p.logical_to_physical(device) for p in self.placements])

    @classmethod
    def of(cls, layers: Sequence[FusedMoE], **options: Any) -> Rebalancer:
        """Return a rebalancer for layers with weights, which use its replicas from now on.

        Raises InvalidInput if a layer has no weights, or the problems differ.

        options: arguments of the constructor.
        """
        packed = [layer.packed for layer in layers if layer.packed is not None]
        if len(packed) < len(layers) or len({repr(layer.problem) for layer in layers}) != 1:
            raise InvalidInput(
                "layers must be at least one FusedMoE, all with weights and of equal problems (got "
                f"{len(layers)} layers, {len(packed)} with weights)"
            )
        placements = [layer.placement for layer in layers]
        made = cls(layers[0].kernel, packed, placements=placements, **options)
        made._layers = layers
        for index, layer in enumerate(layers):
            layer.set_replicas(made.replicas[index], partial(made.window.record, layer=index))
        made._routes = [layer.flow.to_physical for layer in layers]
        return made

    def route(self, routing: Routing, layer: int = 0) -> Routing:
        """Count logical ids, and return them as physical ids of the layer's replicas."""
        self.window.record(routing.topk_ids, layer)
        return to_physical(routing, self.replicas[layer], self._batch)

    def step(self) -> None:
        """End a step of the model."""
        self.window.step()

    def loads(self) -> Tensor:
        """Return the tokens of each layer and logical expert in the window, (layers, E) int64.

        Collective: the sum is over all ranks. Tokens that several ranks hold count once.
        """
        return self.window.total(self.group, mine=self._counts)

    def rebalance(self) -> list[RebalanceReport]:
        """Move every layer's experts to the placement that the policy chooses.

        Collective; no call may be in flight. If the policy fails on a rank, or ranks get different
        placements, nothing moves and every rank raises.

        Returns:
            A report for each layer.

        Raises:
            InvalidInput: A layer does not use this rebalancer's replicas any more.
            MoekitError: As `migrate`, or what the policy raised on this rank.
        """
        loads, wanted = self.loads().double(), []
        error: Exception | None = None
        try:
            for layer, owner in enumerate(self._layers):
                if owner.packed is None:
                    raise WeightsError(f"layer {layer} has no weights: call its load_weights()")
                if owner.flow.to_physical is not self._routes[layer]:
                    raise InvalidInput(
                        f"layer {layer} routes by other replicas since a later Rebalancer.of() or "
                        "set_replicas(): use that rebalancer, or make another one"
                    )
                self.packed[layer] = owner.packed  # they may have been loaded again
            _check_apart(self.packed)
            for load_E, now in zip(loads, self.placements, strict=True):
                wanted.append(improve(self.policy, load_E, now, self.min_gain))
        except Exception as found:  # the policy may raise anything; the other ranks must know
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
            except (MigrationInterrupted, KeyboardInterrupt):  # the weights may be a mix
                for owner in owners:
                    owner.packed = None
                raise
            self.replicas[layer].copy_(new.logical_to_physical())
            self.placements[layer] = new
            for owner in owners:
                owner.placement = new
        return RebalanceReport(layer, old.imbalance(load_E), new.imbalance(load_E), migration)


def _check_apart(packed: Sequence[PackedWeights]) -> None:
    """Raise InvalidInput if two layers have the same weights, which can only be in one order."""
    owners: dict[int, int] = {}
    for layer, each in enumerate(packed):
        for tensor in filter(Tensor.numel, each.experts.values()):  # empty ones have no memory
            if (owner := owners.setdefault(tensor.data_ptr(), layer)) != layer:
                raise InvalidInput(
                    f"layers {owner} and {layer} share the memory of their weights, and moving the "
                    "experts of one would move the other's: load copies of the weights"
                )
