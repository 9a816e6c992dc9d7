"""The part of FlashInfer that this plugin uses, in plain torch on the CPU, as picky.

Ranks share memory as they do on GPUs: one-sided ranks write into each other's mapped file, unused
rows hold garbage, and a slot's dispatch and combine must alternate. `install` puts all of it in the
library's place, in this process, and `using` chooses the version whose forms it takes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import flashinfer_push
import torch
import torch.nn.functional as F
import triton_interpreter  # noqa: F401 (patches triton)
from moekit_flashinfer import library
from torch import Tensor
from vendor_stand_ins import on_cpu

FP8 = torch.float8_e4m3fn
GARBAGE = 0xFF  # NaN in every float format, -1 in the integers

# Libraries keep no order among rows. Theirs is drawn apart from torch's own random numbers, which a
# dispatcher leaves as they are.
ORDER = torch.Generator().manual_seed(0)


VERSIONS = ("0.6.8", "0.7.2")
_version = VERSIONS[0]


@contextlib.contextmanager
def using(version: str) -> Iterator[None]:
    """Return values and exchange messages as this version does, in this process."""
    global _version
    assert version in VERSIONS
    _version = version
    try:
        yield
    finally:
        _version = VERSIONS[0]


def is_later() -> bool:
    return _version != VERSIONS[0]


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    put(library, "one_sided", lambda: one_sided)
    put(library, "two_sided", lambda: two_sided)
    put(library, "MEMORY_MODULE", "flashinfer_mnnvl")
    put(library, "fused_moe", lambda: fused_moe)
    put(library, "autotune", contextlib.nullcontext)
    put(library, "push_layers", lambda: (flashinfer_push, flashinfer_push))
    put(library, "unsupported_mega", lambda: [])


# -- memory of all ranks ----------------------------------------------------------------------


class Descriptor:
    """A record that torch reads when the last view of the memory goes; Python must keep it."""


class Driver:
    """CUDA's driver: memory is mapped inside of what its process reserved, each address once."""

    reserved: dict[int, int] = {}  # address -> bytes
    mapped: dict[int, int] = {}
    comms: dict[int, Any] = {}  # a workspace's address -> the ranks that share it
    _starts = itertools.count(1 << 50, 1 << 50)  # so far apart that nothing fits by accident

    @staticmethod
    def reserve(nbytes: int) -> int:
        address = next(Driver._starts)
        Driver.reserved[address] = nbytes
        return address

    @staticmethod
    def map(address: int, nbytes: int) -> None:
        start = address >> 50 << 50
        assert address + nbytes <= start + Driver.reserved[start], "mapped beyond the reserved end"
        assert address not in Driver.mapped, "mapped twice"
        Driver.mapped[address] = nbytes

    @staticmethod
    def unmap(address: int, nbytes: int) -> None:
        assert Driver.mapped.pop(address) == nbytes, "unmapped in part"

    @staticmethod
    def free(address: int, nbytes: int) -> None:
        assert Driver.reserved.pop(address) == nbytes, "freed in part"

    @staticmethod
    def exchange(workspace: Tensor, value: Any = None) -> list[Any]:
        """Return the value of every rank that shares a memory, as kernels do through it."""
        everyone: list[Any] = Driver.comms[workspace.data_ptr()].allgather(value)
        return everyone


def target_ranks(experts: Tensor, per_rank: int) -> Tensor:
    """Divide as C does: -1 belongs to rank 0, unless a rank has one expert only."""
    return torch.div(experts, per_rank, rounding_mode="trunc")


# -- one-sided --------------------------------------------------------------------------------

_COUNTS_OFFSET, _STATE_OFFSET, _PAYLOAD_OFFSET = 128, 512, 1024
_sent: dict[int, tuple[Tensor, Tensor]] = {}  # workspace -> ranks (T, K), and slots there or -1
_combined: dict[int, int] = {}  # workspace -> where the rows of its last combine begin


def _pad(n: int) -> int:
    return -(-n // 128) * 128


def moe_a2a_get_workspace_size_per_rank(ranks: int, capacity: int, there: int, back: int) -> int:
    return _PAYLOAD_OFFSET + _pad(ranks * capacity * there) + _pad(ranks * capacity * back)


@on_cpu
def moe_a2a_initialize(workspace: Tensor, rank: int, ranks: int, capacity: int) -> Tensor:
    assert workspace.dtype == torch.uint8 and workspace.shape[0] == ranks
    workspace[rank].zero_()
    _combined.pop(workspace.data_ptr(), None)
    return torch.tensor([_STATE_OFFSET, _COUNTS_OFFSET, _PAYLOAD_OFFSET])


def _index_pairs() -> tuple[list[str], list[int]]:
    return ["MOE_A2A_FLAG_VAL_OFFSET_INDEX", "MOE_A2A_RECV_COUNTERS_OFFSET_INDEX"], [0, 1]


def _state(workspace: Tensor, rank: int) -> Tensor:
    return workspace[rank, _STATE_OFFSET : _STATE_OFFSET + 4].view(torch.int32)


@on_cpu
def moe_a2a_dispatch(
    ids: Tensor, payloads: list[Tensor], workspace: Tensor, metainfo: Tensor, most: int, rank: int,
    ranks: int, top_k: int, experts: int,
) -> tuple[Any, ...]:  # fmt: skip
    state = _state(workspace, rank)
    assert state.item() == 0, "dispatch called twice without combine"
    state.fill_(1)
    assert ids.dtype == torch.int32 and ids.shape[1] == top_k and ids.is_contiguous()
    assert top_k in (1, 2, 4, 6, 8, 10, 16, 22) and ranks <= 64 and 1 <= len(payloads) <= 4
    assert experts % ranks == 0 and 0 < most and len(ids) <= most
    starts, offset = [], _PAYLOAD_OFFSET
    for payload in payloads:
        assert payload.dim() == 2 and payload.is_contiguous() and len(payload) == len(ids)
        row = payload.shape[1] * payload.itemsize
        vector = min(16, row & -row)
        assert offset % vector == 0, "a vector store would trap: widest alignment first"
        starts.append(offset)
        offset += ranks * most * row
    assert offset <= workspace.shape[1], "workspace size per rank insufficient"
    # Other ranks read a combine's rows until they come to this dispatch.
    assert offset <= _combined.get(workspace.data_ptr(), offset), "writes rows that may be read"

    targets, order = target_ranks(ids, experts // ranks), torch.randperm(len(ids), generator=ORDER)
    assert bool(((targets >= 0) & (targets < ranks)).all()), f"{ids}: write out of bounds"
    slots = torch.full(targets.shape, -1)  # of the first assignment to each rank
    for target in range(ranks):
        here = targets[order] == target
        tokens = order[here.any(dim=1)]
        slots[tokens, (targets[tokens] == target).int().argmax(dim=1)] = torch.arange(len(tokens))
        for payload, start in zip(payloads, starts, strict=True):
            source = payload[tokens].view(torch.uint8)
            begin = start + rank * most * source.shape[1]
            workspace[target, begin : begin + source.numel()] = source.view(-1)
        counts = workspace[target, _COUNTS_OFFSET : _COUNTS_OFFSET + 4 * ranks].view(torch.int32)
        counts[rank] = len(tokens)
    _sent[workspace.data_ptr()] = targets.long(), slots
    Driver.exchange(workspace)

    received, mine = [], workspace[rank]
    counts = mine[_COUNTS_OFFSET : _COUNTS_OFFSET + 4 * ranks].view(torch.int32)
    for payload, start in zip(payloads, starts, strict=True):
        nbytes = ranks * most * payload.shape[1] * payload.itemsize
        rows = mine[start : start + nbytes].view(ranks, most, -1)
        for source in range(ranks):
            rows[source, counts[source] :] = GARBAGE
        received.append(mine[start : start + nbytes].view(payload.dtype).view(ranks, most, -1))
    return (received, _pad(offset), None) if is_later() else (received, _pad(offset))


@on_cpu
def moe_a2a_combine(
    payload: Tensor, tokens: int, workspace: Tensor, metainfo: Tensor, most: int, rank: int,
    ranks: int, top_k: int, offset: int, in_place: bool = False,
) -> Tensor:  # fmt: skip
    state = _state(workspace, rank)
    assert state.item() == 1, "combine called before dispatch"
    state.zero_()
    assert payload.shape[:2] == (ranks, most) and payload.dim() == 3 and payload.is_contiguous()
    assert payload.dtype in (torch.bfloat16, torch.float16, torch.float32)
    nbytes = payload.numel() * payload.itemsize
    assert offset + nbytes <= workspace.shape[1], "workspace insufficient for combine payload"
    if in_place:
        assert payload.data_ptr() == workspace[rank].data_ptr() + offset
    else:
        workspace[rank, offset : offset + nbytes] = payload.view(-1).view(torch.uint8)
    _combined[workspace.data_ptr()] = offset
    Driver.exchange(workspace)
    rows = workspace[:, offset : offset + nbytes].view(payload.dtype).view(ranks, ranks * most, -1)
    out = payload.new_zeros((tokens, payload.shape[2]))
    for target, slot in zip(*(t.unbind(1) for t in _sent.pop(workspace.data_ptr())), strict=True):
        some = slot >= 0
        out[some] += rows[target[some], rank * most + slot[some]]
    return out


one_sided = SimpleNamespace(
    moe_a2a_get_workspace_size_per_rank=moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize=moe_a2a_initialize,
    moe_a2a_dispatch=moe_a2a_dispatch,
    moe_a2a_combine=moe_a2a_combine,
    get_moe_alltoall_module=lambda: SimpleNamespace(moe_a2a_get_metainfo_index_pairs=_index_pairs),
)


# -- two-sided --------------------------------------------------------------------------------


def _cumsum(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).int()
    return ends, torch.cat(parts).int()


@on_cpu
def moe_prepare(
    ids: Tensor, weights: Tensor, statics: None, workspace: Tensor, most: int, rank: int,
    ranks: int, experts: int, slots: int, top_k: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert ids.dtype == torch.int32 and ids.shape[1] == top_k <= 32 and ids.is_contiguous()
    assert weights.dtype == torch.float32 and weights.is_contiguous()
    assert workspace.dtype == torch.uint64 and experts % 4 == slots % 4 == experts % ranks == 0
    targets, order = target_ranks(ids, experts // ranks), torch.randperm(len(ids), generator=ORDER)
    to_rank, first = [], []
    for target in range(ranks):
        here = targets[order] == target
        some = here.any(dim=1)
        to_rank.append(order[some])
        first.append(order[some] * top_k + here[some].int().argmax(dim=1))
    everyone = Driver.exchange(workspace, [t.numpy() for t in (ids, weights, *to_rank)])
    received_ids = torch.full((most * ranks, top_k), slots, dtype=torch.int32)
    received_weights = weights.new_full((most * ranks, top_k), float("nan"))
    arriving, row = [], 0
    for theirs in everyone:
        their_ids, their_weights, *their_targets = map(torch.from_numpy, theirs)
        tokens = their_targets[rank]
        arriving.append(torch.arange(row, row + len(tokens)))
        local = target_ranks(their_ids[tokens], experts // ranks) == rank
        received_ids[arriving[-1]] = torch.where(local, their_ids[tokens], slots)
        received_weights[arriving[-1]] = their_weights[tokens]
        row += len(tokens)
    send_ends, send = _cumsum(to_rank)
    receive_ends, receive = _cumsum(arriving)
    receive.fill_unwritten = True  # type: ignore[attr-defined]
    back = _cumsum(first)[1]
    return received_ids, received_weights, send_ends, send, receive_ends, receive, back, None


@on_cpu
def moe_comm(
    rows: Tensor, send_ends: Tensor, send: Tensor, out: Tensor, receive_ends: Tensor,
    receive: Tensor, workspace: Tensor, rank: int, ranks: int,
) -> None:  # fmt: skip
    assert rows.dim() == 2 and rows.is_contiguous() and workspace.dtype == torch.uint64
    assert rows.shape[1] * rows.itemsize % 16 == 0, "rows of 16 bytes"
    assert out.is_contiguous() and (out.shape[1], out.dtype) == (rows.shape[1], rows.dtype)
    if hasattr(receive, "fill_unwritten"):  # what arrives, not what returns
        out.view(torch.uint8).fill_(GARBAGE)
    parts = torch.tensor_split(send.long(), send_ends[:-1].tolist())
    outgoing = [rows[part].view(torch.uint8).numpy() for part in parts]
    everyone = Driver.exchange(workspace, outgoing)
    wanted = torch.tensor_split(receive.long(), receive_ends[:-1].tolist())
    for source, places in enumerate(wanted):
        out.view(torch.uint8)[places] = torch.from_numpy(everyone[source][rank])


two_sided = SimpleNamespace(
    get_moe_commworkspace_size_per_rank=lambda ranks: 4096 * ranks,
    get_moe_prepare_workspace_size_per_rank=lambda ranks: 512 * ranks,
    moe_comm=moe_comm,
    moe_prepare=moe_prepare,
)


# -- experts ----------------------------------------------------------------------------------


class ActivationType(enum.IntEnum):
    Gelu, Relu, Silu, Swiglu, Geglu, SwigluBias, Relu2, Identity = range(8)


def _activate(h: Tensor, kind: ActivationType, expert: int, **parameters: Tensor | None) -> Tensor:
    """fp32 rows: up in the first half, gate in the second."""
    if kind is ActivationType.Silu:
        return F.silu(h)
    if kind is ActivationType.Relu2:
        return F.relu(h).square()
    assert kind is ActivationType.Swiglu
    up, gate = h.chunk(2, dim=1)
    alpha, beta, limit = (
        default if (t := parameters[name]) is None else float(t[expert])
        for name, default in (("alpha", 1.0), ("beta", 0.0), ("limit", float("inf")))
    )
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _blockwise(w: Tensor, scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float32 and scale.is_contiguous()
    assert scale.shape == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
    return w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


def _fp8_groups(x: Tensor) -> Tensor:
    """fp32 rows rounded to e4m3, each 1 x 128 group by its own scale."""
    groups = x.unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((groups / scale).to(FP8).float() * scale).flatten(1)


@on_cpu
@torch.autocast("cpu", enabled=False)  # it does not reach into libraries
def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    output: Tensor | None = None,
    use_deepseek_fp8_block_scale: bool = False,
    activation_type: ActivationType = ActivationType.Swiglu,
) -> Tensor:
    x, ids, w13, w2 = input, token_selected_experts, fc1_expert_weights, fc2_expert_weights
    L, gated = len(w13), activation_type is ActivationType.Swiglu
    assert ids.dtype == torch.int32 and token_final_scales.dtype == torch.float32
    assert all(t.is_contiguous() for t in (x, ids, token_final_scales, w13, w2, output))
    for operand in (x, fc1_expert_biases):  # 0.7 refuses others
        assert operand is None or operand.data_ptr() % 16 == 0, "beginnings at 16 bytes"
    assert w13.shape[1] == w2.shape[2] * (2 if gated else 1) and len(w2) == L
    assert output.shape == (len(x), w2.shape[1]) and output.dtype == output_dtype
    multiple = 16 if w13.dtype == FP8 else 8
    assert w2.shape[1] % multiple == w2.shape[2] % multiple == 0
    for bias, rows in ((fc1_expert_biases, w13.shape[1]), (fc2_expert_biases, w2.shape[1])):
        assert bias is None or (bias.shape == (L, rows) and bias.dtype == output_dtype)
    assert (fc1_expert_biases is None) == (fc2_expert_biases is None)
    for parameter in (swiglu_alpha, swiglu_beta, swiglu_limit):
        assert parameter is None or (parameter.shape == (L,) and parameter.dtype == torch.float32)
    block = use_deepseek_fp8_block_scale
    if block:
        assert x.dtype == output_dtype == torch.bfloat16 and w13.dtype == FP8
        wide13, wide2 = (_blockwise(w, s) for w, s in zip((w13, w2), quant_scales, strict=True))
    else:
        assert x.dtype == w13.dtype
        wide13, wide2 = w13.float(), w2.float()
    quantizes = x.dtype == FP8
    if quantizes:
        dequant1, quant2, dequant2, input_dequant = quant_scales
        assert dequant1.shape == dequant2.shape == (L,) and input_dequant.dim() == 0
        assert quant2.dim() == 0 and all(s.dtype == torch.float32 for s in quant_scales)
    else:
        assert block or not quant_scales

    output.zero_()
    total = torch.zeros(output.shape)
    for expert in range(L):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        a = x[rows].float()
        h = (_fp8_groups(a) if block else a) @ wide13[expert].T
        if quantizes:
            h *= dequant1[expert]
        h = h.to(output_dtype).float()
        if fc1_expert_biases is not None:
            h += fc1_expert_biases[expert].float()
        parameters = {"alpha": swiglu_alpha, "beta": swiglu_beta, "limit": swiglu_limit}
        a = _activate(h, activation_type, expert, **parameters)
        if quantizes:
            a = (a * quant2).clamp(-448, 448).to(FP8).float()
        else:
            a = a.to(output_dtype).float()
        y = (_fp8_groups(a) if block else a) @ wide2[expert].T
        if quantizes:
            y *= dequant2[expert]
        y = y.to(output_dtype).float()
        if fc2_expert_biases is not None:
            y += fc2_expert_biases[expert].float()
        total[rows] += y * token_final_scales[rows, slots, None]
    return output.copy_(total)


fused_moe = SimpleNamespace(cutlass_fused_moe=cutlass_fused_moe, ActivationType=ActivationType)
