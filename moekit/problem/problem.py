"""The problem: what is computed, and where, as comparable data.

``eval(repr(problem))`` gives an equal problem (with ``moekit``'s names and ``torch`` in scope).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import torch

from moekit.errors import InvalidProblem
from moekit.problem.activation import Activation
from moekit.problem.device import DeviceSpec
from moekit.problem.parallel import ParallelConfig, partition
from moekit.problem.quant import SCHEMES, QuantScheme, scheme
from moekit.untrusted.arguments import (
    FLAG,
    MAX_EXPERTS,
    MAX_WIDTH,
    Kind,
    accept,
    accept_fields,
    converted,
    instance,
    optional,
    size,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class ActivationFormat(enum.Enum):
    """Layout of dispatched tokens.

    STANDARD: rows ``x_RH`` with expert ids ``topk_ids_RK``. BATCHED: ``x_LCH`` with a capacity of C
    rows for each local expert, of which the first ``expert_num_tokens_L`` are real.
    """

    STANDARD = "standard"
    BATCHED = "batched"

    def __repr__(self) -> str:
        return f"ActivationFormat.{self.name}"


@dataclass(frozen=True)
class AdapterSlots:
    """The adapters (LoRA) that calls may name.

    count: S, the adapters that a batch may mix. rank: r, the largest rank of an adapter.
    separate: gate and up have one A each. Otherwise they share one.
    """

    count: int = 1
    rank: int = 16
    separate: bool = False

    def __post_init__(self) -> None:
        accept_fields(self, _SLOTS)


_SLOTS = {"count": size(1, 1024), "rank": size(1, 256), "separate": FLAG}


def _known_scheme(value: Any) -> QuantScheme:
    value = scheme(value) if isinstance(value, str) else value
    if SCHEMES[value.name] != value:
        raise ValueError
    return SCHEMES[value.name]


def _dtype(value: Any) -> torch.dtype:
    if value not in DTYPES.values():
        raise ValueError
    return DTYPES[str(value).removeprefix("torch.")]


_PROBLEM = {
    "num_experts": size(1, MAX_EXPERTS),
    "top_k": size(),
    "hidden_size": size(1, MAX_WIDTH),
    "intermediate_size": size(1, MAX_WIDTH),
    "dtype": Kind("one of " + ", ".join(f"torch.{name}" for name in DTYPES), _dtype),
    "activation": converted("an Activation or the name of one", Activation, {str: Activation}),
    "quant": Kind("a QuantScheme of moekit.SCHEMES or the name of one", _known_scheme),
    "has_bias": FLAG,
    "apply_router_weight_on_input": FLAG,
    "num_redundant_experts": size(0, MAX_EXPERTS),
    "max_num_tokens": optional(size()),
    "batch_invariant": FLAG,
    "training": FLAG,
    "adapters": optional(instance("an AdapterSlots", AdapterSlots)),
    "parallel": instance("a ParallelConfig", ParallelConfig),
    "device": converted(
        "a DeviceSpec, a torch.device or the name of a device",
        DeviceSpec,
        {str: DeviceSpec.parse, torch.device: DeviceSpec.of},
    ),
}


@dataclass(frozen=True, init=False)
class MoEProblem:
    """One layer of routed experts: sizes, arithmetic, parallelism and device.

    num_experts: E, the model's logical experts.
    num_redundant_experts: further replicas (EPLB).
    intermediate_size: the model's I; this rank's share is `local_intermediate_size`.
    dtype: of activations, output and unquantized weights: bfloat16, float16 or float32.
    activation, quant, device: objects or their names (``"silu"``, ``"fp8_block"``, ``"sm90"``).
        The default device is this machine's accelerator, or its CPU.
    has_bias: both projections add a bias (w13_bias, w2_bias).
    apply_router_weight_on_input: the router weight scales the token before GEMM 1 instead of the
        expert's output; top_k must be 1.
    max_num_tokens: the most tokens that any rank passes to one call. Dispatchers with fixed buffers
        need it, and memory is reported for it.
    batch_invariant: a token's output has the same bits in every call: at every T and position,
        whatever the other tokens of all ranks are and wherever they are routed, for every
        ``ep_size`` (one rank included), and on whichever rank or replica an expert is. This holds
        between kernels that chose the same experts backend, on equal devices with equal libraries,
        variables and numbers of CPU threads. Backends that do not declare it are refused, and so
        are ranks that add up partial sums: ``tp_size > 1``, and several ranks with ``dp_size=1``.
    training: calls can be differentiated. Backends without a backward are refused.
    adapters: experts add low-rank deltas to their weights, `moekit.lora`. Backends that do not take
        adapters are refused. None: there are no adapters.

    Raises InvalidProblem when the values contradict each other.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    activation: Activation
    quant: QuantScheme
    has_bias: bool
    apply_router_weight_on_input: bool
    num_redundant_experts: int
    max_num_tokens: int | None
    batch_invariant: bool
    training: bool
    adapters: AdapterSlots | None
    parallel: ParallelConfig
    device: DeviceSpec

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype = torch.bfloat16,
        activation: Activation | str = "silu",
        quant: QuantScheme | str = "none",
        has_bias: bool = False,
        apply_router_weight_on_input: bool = False,
        num_redundant_experts: int = 0,
        max_num_tokens: int | None = None,
        batch_invariant: bool = False,
        training: bool = False,
        adapters: AdapterSlots | None = None,
        parallel: ParallelConfig | None = None,
        device: DeviceSpec | torch.device | str | None = None,
    ) -> None:
        parallel = ParallelConfig() if parallel is None else parallel
        device = DeviceSpec.detect() if device is None else device
        for name, value in accept(_PROBLEM, locals()).items():
            object.__setattr__(self, name, value)
        if self.top_k > self.num_experts:
            raise InvalidProblem(
                f"top_k={self.top_k} exceeds num_experts={self.num_experts}: "
                "a token cannot go to more experts than there are"
            )
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise InvalidProblem(
                "apply_router_weight_on_input needs top_k=1 (one weight per token), "
                f"got top_k={self.top_k}"
            )
        if self.intermediate_size % self.parallel.tp_size:
            raise InvalidProblem(
                f"tp_size={self.parallel.tp_size} must divide "
                f"intermediate_size={self.intermediate_size}; pad the experts or choose another "
                "tp_size"
            )
        if self.parallel.ep_size > self.num_physical_experts:
            raise InvalidProblem(
                f"ep_size={self.parallel.ep_size} exceeds the {self.num_physical_experts} "
                "experts: a rank would hold none; use fewer ranks or redundant experts"
            )
        if self.batch_invariant:
            _check_batch_invariant(self.parallel)
            for other in ("training", "adapters"):
                if getattr(self, other):
                    raise InvalidProblem(
                        f"{other}={getattr(self, other)} and batch_invariant=True exclude each "
                        f"other: no backend does both"
                    )

    @property
    def num_physical_experts(self) -> int:
        """P: logical experts plus redundant replicas."""
        return self.num_experts + self.num_redundant_experts

    @property
    def local_experts(self) -> range:
        """Physical ids of the experts this rank holds."""
        return partition(self.num_physical_experts, self.parallel.ep_size, self.parallel.ep_rank)

    @property
    def num_local_experts(self) -> int:
        """L, the number of experts that this rank holds."""
        return len(self.local_experts)

    def logical_expert(self, physical: int) -> int:
        """Return the expert that a physical slot first holds: replicas repeat the first experts."""
        return physical % self.num_experts

    @property
    def local_neurons(self) -> range:
        """The model's neurons (of I) that this rank holds, in front of `local_intermediate_size`.

        They are a run of ``I / tp_size``, unless that would cut the blocks that share a scale
        (fp8_block, fp8_w8a16_block). Then ranks hold whole blocks: the first ranks hold one more,
        and some ranks may hold none.
        """
        tp_size, rank, block = self.parallel.tp_size, self.parallel.tp_rank, self._cut_block
        if not block:
            share = self.intermediate_size // tp_size
            return range(rank * share, (rank + 1) * share)
        blocks = partition(-(-self.intermediate_size // block), tp_size, rank)
        neurons = range(self.intermediate_size)
        return neurons[blocks.start * block : blocks.stop * block]

    @property
    def local_intermediate_size(self) -> int:
        """I on this rank, the same on all ranks.

        Behind a rank's `local_neurons` there may be zeros, which add nothing: rows of w13 (of gate
        and of up), biases and columns of w2.
        """
        if block := self._cut_block:
            return -(-self.intermediate_size // (block * self.parallel.tp_size)) * block
        return self.intermediate_size // self.parallel.tp_size

    @property
    def _cut_block(self) -> int:
        """The block of rows that the end of gate, or of a rank's share, would cut; 0 if none."""
        weight, share = self.quant.weight, self.intermediate_size // self.parallel.tp_size
        if weight is None or weight.group[0] <= 1 or not share % weight.group[0]:
            return 0
        return weight.group[0]

    @property
    def w13_rows(self) -> int:
        """Rows of w13 per expert on this rank: 2I when gated, else I."""
        return self.local_intermediate_size * (2 if self.activation.gated else 1)

    @property
    def scales_per_row(self) -> int:
        """Scales of a row of H activations, 0 if they are not quantized."""
        activation = self.quant.activation
        return 0 if activation is None else activation.scale_shape(1, self.hidden_size)[1]

    @property
    def dispatched(self) -> MoEProblem:
        """The problem for which a dispatcher is made.

        If tokens move, the adapter of a token travels within the ids of its experts. Each physical
        expert then has an id for every adapter, and one for tokens without an adapter
        (`moekit.runtime.adapters`).
        """
        if self.adapters is None or not self.parallel.moves_tokens:
            return self
        count = self.num_physical_experts * (self.adapters.count + 1)
        return self.replace(num_experts=count, num_redundant_experts=0, adapters=None)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def replace(self, **changes: Any) -> MoEProblem:
        """Return a copy with these fields changed, and checked again."""
        return replace(self, **changes)


def _check_batch_invariant(parallel: ParallelConfig) -> None:
    """Raise InvalidProblem for ranks whose partial sums are added up."""
    if parallel.tp_size > 1:
        raise InvalidProblem(
            f"batch_invariant=True needs tp_size=1 (got tp_size={parallel.tp_size}): slices of an "
            "expert are summed over ranks, so bits would depend on their number; split the "
            "experts with ep_size instead"
        )
    if parallel.num_ranks > 1 and not parallel.moves_tokens:
        raise InvalidProblem(
            f"batch_invariant=True needs ranks that exchange tokens (got dp_size=1 with "
            f"{parallel.num_ranks} ranks): partial sums that the ranks add up depend on their "
            f"number; give each rank its own tokens (dp_size={parallel.num_ranks}, in a layer "
            "is_sequence_parallel=True)"
        )


def summary(problem: MoEProblem) -> str:
    """Return ``problem`` in one line for people; its ``repr`` is a Python expression."""
    p, parallel = problem, problem.parallel
    limit = f" (limit {p.activation.limit:g})" if p.activation.clamped else ""
    words = [
        f"{p.num_experts} experts",
        f"top {p.top_k}",
        f"hidden {p.hidden_size}",
        f"intermediate {p.intermediate_size}",
        p.dtype_name,
        f"quant {p.quant.name}",
        p.activation.name + limit,
    ]
    words += ["bias"] if p.has_bias else []
    words += ["weight on input"] if p.apply_router_weight_on_input else []
    words += [f"{p.num_redundant_experts} redundant"] if p.num_redundant_experts else []
    words += [] if p.max_num_tokens is None else [f"at most {p.max_num_tokens} tokens"]
    words += ["batch-invariant"] if p.batch_invariant else []
    words += ["training"] if p.training else []
    if p.adapters is not None:
        words.append(f"{p.adapters.count} adapters of rank {p.adapters.rank}")
    for kind in ("ep", "tp", "dp"):
        if (size := getattr(parallel, f"{kind}_size")) > 1:
            words.append(f"{kind} {size}")
    words += [f"{parallel.nodes} hosts"] if parallel.nodes > 1 else []
    return f"{', '.join(words)} on {p.device}"
