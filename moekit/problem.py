"""What is to be computed, and where: pure data, comparable, and printable so that it can be re-run.

``eval(repr(problem))`` gives an equal problem (with ``moekit``'s names and ``torch`` in scope).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, fields
from typing import Any

import torch

from moekit.activation import Activation
from moekit.errors import InvalidProblem
from moekit.quant import SCHEMES, QuantScheme, scheme
from moekit.validate import (
    FLAG,
    MAX_EXPERTS,
    MAX_RANKS,
    MAX_WIDTH,
    Kind,
    accept,
    accept_fields,
    converted,
    first_line,
    instance,
    optional,
    shown,
    size,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


# What backends write to say where they run: see `DeviceSpec.meets`.
DEVICE_PATTERN = re.compile(
    r"any|(?P<arch>gfx[0-9a-f]+)|(?P<type>[a-z]+)((?P<op>>=|==)(?P<major>\d+)\.(?P<minor>\d+))?"
)


class ActivationFormat(enum.Enum):
    """Layout of dispatched tokens.

    STANDARD: rows ``x_RH`` with expert ids ``topk_ids_RK``. BATCHED: a slab of C rows per local
    expert, ``x_LCH``, of which the first ``expert_num_tokens_L`` are real.
    """

    STANDARD = "standard"
    BATCHED = "batched"

    def __repr__(self) -> str:
        return f"ActivationFormat.{self.name}"


def _device_type(value: Any) -> str:
    if torch.device(value).type != value:
        raise ValueError
    return str(value)


def _capability(value: Any) -> tuple[int, int]:
    major, minor = value if isinstance(value, tuple) else ()
    return size(0, 999).keep(major), size(0, 99).keep(minor)


_DEVICE = {
    "type": Kind("a type of device that torch knows, for example 'cpu' or 'cuda'", _device_type),
    "capability": optional(Kind("a tuple of two integers, for example (9, 0)", _capability)),
    "name": instance("a str", str),
    "arch": instance("a str", str),
}


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device: ``type`` as torch names it and, where it has one, a compute capability.

    AMD's GPUs, which torch calls "cuda" too, have no capability but an ``arch``, as in "gfx942".
    Given explicitly, it lets any machine ask what would run on another one.

    Raises InvalidProblem for a type that torch does not know, and for fields of other types.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""
    arch: str = ""

    def __post_init__(self) -> None:
        accept_fields(self, _DEVICE)

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """``"cpu"``, ``"xpu"``, ``"sm90"`` (CUDA compute capability 9.0), ``"gfx942"`` (AMD's),
        ``"cuda"``, ``"cuda:1"`` (of this machine)."""
        accept({"device": instance("a str, for example 'sm90'", str)}, {"device": text})
        if match := re.fullmatch(r"(gfx[0-9a-f]+)(:.*)?", text):
            return cls("cuda", arch=match[1])
        if match := re.fullmatch(r"sm_?(1?\d)(\d)a?", text):
            return cls("cuda", (int(match[1]), int(match[2])))
        if re.fullmatch(r"cuda(:\d+)?", text):
            return cls.of(torch.device(text))
        if re.fullmatch(r"[a-z]+", text):
            return cls(text)
        raise InvalidProblem(
            f"device {shown(text)} is not understood; examples: 'cpu', 'cuda', 'sm90', 'gfx942'"
        )

    @classmethod
    def detect(cls) -> DeviceSpec:
        """This machine's accelerator if torch sees one, else its CPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return cls("cpu") if accelerator is None else cls.of(accelerator)

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpec:
        """Of a torch device of this machine. Raises InvalidProblem if torch does not see it."""
        accept({"device": instance("a torch.device", torch.device)}, {"device": device})
        if device.type == "cpu":
            return cls("cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InvalidProblem(
                f"device {str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} "
                "CUDA devices here; name the capability instead, as in 'sm90'"
            )
        try:
            module = torch.get_device_module(device)
            name = getattr(module, "get_device_name", lambda _: "")(device)
        except Exception as error:  # each device type has its own
            raise InvalidProblem(
                f"device {str(device)!r} was asked for, but torch sees none here "
                f"({type(error).__name__}: {first_line(error)}); name a device that is "
                "here, or ask about another machine with a DeviceSpec"
            ) from error
        if device.type == "cuda" and torch.version.hip:
            arch = module.get_device_properties(device).gcnArchName.partition(":")[0]
            return cls(device.type, None, str(name), arch)
        capability = getattr(module, "get_device_capability", lambda _: None)(device)
        pair = tuple(capability) if isinstance(capability, tuple) else None
        return cls(device.type, pair, str(name))

    def meets(self, wanted: str) -> bool:
        """``wanted``: "any", a type, ``"cuda>=9.0"``, ``"cuda==9.0"`` or ``"gfx942"``."""
        match = DEVICE_PATTERN.fullmatch(wanted) if isinstance(wanted, str) else None
        if match is None:
            raise InvalidProblem(f"wanted={shown(wanted)}: it must be like 'cpu' or 'cuda>=9.0'")
        if match["arch"] or wanted == "any":
            return wanted in ("any", self.arch)
        if match["op"] is None:
            return self.type == wanted
        if self.type != match["type"] or self.capability is None:
            return False
        least = (int(match["major"]), int(match["minor"]))
        return self.capability == least or (match["op"] == ">=" and self.capability > least)

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.type} {self.arch}".strip()
        return f"{self.type} sm{self.capability[0]}{self.capability[1]}"


def partition(total: int, size: int, rank: int) -> range:
    """Rank's contiguous share of ``total`` things; the remainder goes to the first ranks."""
    share, extra = divmod(total, size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


_RANKS = {
    "ep_size": size(1, MAX_RANKS),
    "ep_rank": size(0, MAX_RANKS),
    "tp_size": size(1, MAX_RANKS),
    "tp_rank": size(0, MAX_RANKS),
    "dp_size": size(0, MAX_RANKS),
    "nodes": size(1, MAX_RANKS),
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one MoE layer is spread over ranks, seen from one of them.

    ep_size, ep_rank: experts are split, each rank holding a contiguous share (`partition`).
    tp_size, tp_rank: every expert's intermediate size is split.
    dp_size: how many different batches of tokens the ranks of the layer's process group hold.
    The default is ``ep_size``: each expert-parallel rank has its own tokens, so tokens must move.
    With ``dp_size=1`` all ranks hold the same tokens; then nothing moves and every rank's output
    is a partial sum that the caller all-reduces. With more, every rank's output is complete, and
    where there are fewer batches than ranks, consecutive ranks share one.
    A rank's place in the layer's process group is ``ep_rank * tp_size + tp_rank``.
    nodes: hosts that these ranks are spread over, as many on each, in the order of their places.

    Raises InvalidProblem for values of another type, out of range, or that contradict each other.
    """

    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 0
    nodes: int = 1

    def __post_init__(self) -> None:
        accept_fields(self, _RANKS)
        for kind in ("ep", "tp"):
            most, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if rank >= most:
                raise InvalidProblem(
                    f"{kind}_rank={rank} with {kind}_size={most}: want a rank in [0, {most})"
                )
        if self.num_ranks % self.nodes:
            raise InvalidProblem(
                f"nodes={self.nodes}: want a number of hosts that the {self.num_ranks} ranks "
                "(ep_size x tp_size) divide by"
            )
        object.__setattr__(self, "dp_size", self.dp_size or self.ep_size)

    @property
    def num_ranks(self) -> int:
        """Of the layer's process group."""
        return self.ep_size * self.tp_size

    @property
    def moves_tokens(self) -> bool:
        """True when ranks hold different tokens, so that a dispatcher must exchange them."""
        return self.dp_size > 1


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
    "parallel": instance("a ParallelConfig", ParallelConfig),
    "device": converted(
        "a DeviceSpec, a torch.device or the name of a device",
        DeviceSpec,
        {str: DeviceSpec.parse, torch.device: DeviceSpec.of},
    ),
}


@dataclass(frozen=True, init=False)
class MoEProblem:
    """One routed-experts block: sizes, arithmetic, parallelism and the device it runs on.

    num_experts: E, logical experts of the model. num_redundant_experts: extra replicas (EPLB).
    intermediate_size: the model's I; this rank's share is `local_intermediate_size`.
    dtype: of activations, output and unquantized weights: bfloat16, float16 or float32.
    activation, quant, device: objects or their names (``"silu"``, ``"fp8_block"``, ``"sm90"``);
    device defaults to this machine's accelerator, else its CPU.
    has_bias: both projections add a bias (w13_bias, w2_bias).
    apply_router_weight_on_input: the router weight scales the token before GEMM 1 (top_k must
    be 1) instead of the expert's output.
    max_num_tokens: most tokens this or any other rank will pass to one call; dispatchers with
    fixed buffers need it, and memory is stated for it.

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
                f"intermediate_size={self.intermediate_size} does not divide by "
                f"tp_size={self.parallel.tp_size}; pad the experts or choose another tp_size"
            )
        if self.parallel.ep_size > self.num_physical_experts:
            raise InvalidProblem(
                f"ep_size={self.parallel.ep_size} exceeds the {self.num_physical_experts} "
                "experts: a rank would hold none; use fewer ranks or redundant experts"
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
        """L."""
        return len(self.local_experts)

    def logical_expert(self, physical: int) -> int:
        """The expert that a physical slot holds at start: replicas repeat the first experts."""
        return physical % self.num_experts

    @property
    def local_neurons(self) -> range:
        """Which of the model's I neurons this rank holds: the first of `local_intermediate_size`.

        A run of ``I / tp_size``, except where that would cut the blocks of rows and columns that
        share a scale (fp8_block, fp8_w8a16_block): whole blocks then, of which the first ranks
        hold one more, and some ranks may hold none.
        """
        tp_size, rank, block = self.parallel.tp_size, self.parallel.tp_rank, self._cut_block
        if not block:
            share = self.intermediate_size // tp_size
            return range(rank * share, (rank + 1) * share)
        blocks = partition(-(-self.intermediate_size // block), tp_size, rank)
        return range(
            *(min(at * block, self.intermediate_size) for at in (blocks.start, blocks.stop))
        )

    @property
    def local_intermediate_size(self) -> int:
        """I on this rank, the same on all ranks. Behind a rank's `local_neurons` there may be
        zeros: rows of w13 (of gate and of up), biases and columns of w2, which add nothing."""
        if block := self._cut_block:
            return -(-self.intermediate_size // (block * self.parallel.tp_size)) * block
        return self.intermediate_size // self.parallel.tp_size

    @property
    def _cut_block(self) -> int:
        """The rows of the blocks of w13 that ``I / tp_size`` would cut; 0 if it cuts none."""
        weight, tp_size = self.quant.weight, self.parallel.tp_size
        if tp_size == 1 or weight is None or weight.group[0] <= 1:
            return 0
        return weight.group[0] if self.intermediate_size // tp_size % weight.group[0] else 0

    @property
    def w13_rows(self) -> int:
        """Rows of w13 per expert on this rank: 2I when gated, else I."""
        return self.local_intermediate_size * (2 if self.activation.gated else 1)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def replace(self, **changes: Any) -> MoEProblem:
        """A copy with some fields changed (and checked again)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MoEProblem(**{**values, **changes})
