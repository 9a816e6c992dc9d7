"""`deep_ep` on the CPU over gloo: what the dispatchers use of it, as picky as the library.

What the library leaves undefined is garbage here: rows that nobody sent, weights of slots with
experts elsewhere, the order of rows where it promises none, and everything a transfer writes until
its event has been waited for. Importing this module makes it `deep_ep` in this process; `registry`
offers the dispatchers over it as ``<name>_standin``.
"""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from deepep_transfers import (
    EventOverlap,
    _Base,
    delivered,
    sent_again,
    summed_by_rank,
)
from torch.utils._python_dispatch import _disable_current_modes
from vendor_stand_ins import exchange, garbage, on_cpu

topk_idx_t = torch.int64
_E4M3 = torch.float8_e4m3fn


def _check_payload(x, topk_idx, topk_weights):
    """(rows, scales or None) of a tensor, or of a pair of one-byte rows and their scales."""
    x, scales = x if isinstance(x, tuple) else (x, None)
    assert x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.itemsize % 16 == 0
    assert x.dtype == torch.bfloat16 if scales is None else x.itemsize == 1
    if scales is not None:
        assert scales.dtype == torch.float32 and scales.dim() == 2
        assert scales.shape[0] == x.shape[0]
    assert topk_idx.dtype == topk_idx_t and topk_idx.dim() == 2 and topk_idx.is_contiguous()
    assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
    assert topk_idx.shape == topk_weights.shape and topk_idx.shape[0] == x.shape[0]
    return x, scales


@dataclass(frozen=True)
class Config:
    num_sms: int
    send: int = 6
    recv: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        row = hidden_bytes + 128 * (8 + 4 + 4) + 8
        return -(-self.num_sms // 2 * num_ranks * self.recv * row // 128) * 128


@dataclass(frozen=True)
class _NormalHandle:
    """In the library it holds tensors that no other call writes."""

    sources: list[tuple[int, int]]  # rank and token of each row
    tokens: int
    rows: int
    num_sms: int


class Buffer(_Base):
    num_sms = 20
    _nvshmem: list[list[int]] = []

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        explicitly_destroy=False,
    ):
        assert group.size() in (2, 4, 8)
        assert num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0
        assert (num_rdma_bytes > 0) == low_latency_mode
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.set, self.raised, self.captured = 0, [False, False], ""
        if low_latency_mode:
            ranks = dist.get_process_group_ranks(group)
            assert all(others == ranks for others in self._nvshmem), "one set of ranks per process"
            self._nvshmem.append(ranks)
            self.qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        self._open(group, explicitly_destroy)

    def destroy(self):
        super().destroy()
        if self.low_latency_mode:
            self._nvshmem.pop()

    @classmethod
    def set_num_sms(cls, value):
        assert value % 2 == 0
        cls.num_sms = value

    @classmethod
    def get_dispatch_config(cls, num_ranks):
        assert num_ranks in (2, 4, 8)
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks):
        assert num_ranks in (2, 4, 8)
        return Config(cls.num_sms, send=4)

    # -- normal mode ------------------------------------------------------------------------

    @on_cpu
    def get_dispatch_layout(self, topk_idx, num_experts, *, async_finish=False):
        self._check_open()
        assert topk_idx.dtype == topk_idx_t and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        assert num_experts % self.ranks == 0
        per_rank = torch.empty(self.ranks, dtype=torch.int32)
        per_expert = torch.empty(num_experts, dtype=torch.int32)
        in_rank = torch.empty((topk_idx.shape[0], self.ranks), dtype=torch.bool)
        with _disable_current_modes():
            used = topk_idx[topk_idx >= 0]
            assert not len(used) or int(used.max()) < num_experts
            per_expert.copy_(torch.bincount(used, minlength=num_experts))
            local = num_experts // self.ranks
            for rank in range(self.ranks):
                here = (topk_idx >= rank * local) & (topk_idx < (rank + 1) * local)
                in_rank[:, rank] = here.any(dim=1)
            per_rank.copy_(in_rank.sum(dim=0))
        return per_rank, None, per_expert, in_rank, EventOverlap(None)

    def _check_rows(self, x, config):
        assert x.dim() == 2 and x.is_contiguous()
        width = x.shape[1] * x.itemsize
        assert width % 32 == 0 and width // 2 + 8 <= 8192, "half a row must fit a warp's memory"
        assert config.get_nvl_buffer_size_hint(width, self.ranks) <= self.num_nvl_bytes

    @on_cpu
    def dispatch(
        self,
        x,
        *,
        handle=None,
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        num_worst_tokens=0,
        config=None,
        async_finish=False,
    ):
        self._check_open()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            self._check_rows(x, config)
            assert config.num_sms == handle.num_sms, "as many channels as the first time"
            received, finish = sent_again(self, x, handle)
            # No count arrives, and the host waits for none.
            return received, None, None, None, None, self._event(finish, async_finish)
        x, scales = _check_payload(x, topk_idx, topk_weights)
        self._check_rows(x, config)
        experts = num_tokens_per_expert.shape[0]
        assert topk_idx.shape[1] <= 32 and experts // self.ranks <= 128
        per_rank, _, per_expert, in_rank, _ = self.get_dispatch_layout(topk_idx, experts)
        assert torch.equal(per_rank, num_tokens_per_rank) and per_rank.dtype == torch.int32
        assert torch.equal(per_expert, num_tokens_per_expert)
        assert torch.equal(in_rank, is_token_in_rank)

        sent = [x, topk_idx, topk_weights, *([] if scales is None else [scales])]
        arrived = exchange(self.group, *sent, in_rank)
        sources = [
            (rank, token)
            for rank, (*_, wanted) in enumerate(arrived)
            for token in wanted[:, self.rank].nonzero().flatten().tolist()
        ]
        # The host polls one word, which the kernels before this one also write.
        self.stream.counts.append(len(sources))
        if not num_worst_tokens:
            assert self.stream.counts[0] == len(sources), "the host read an earlier call's count"
            self.stream.synchronize()
        rows = num_worst_tokens or len(sources)
        assert len(sources) <= rows, "more tokens than the worst case"
        held = range(experts)[self.rank * experts // self.ranks :][: experts // self.ranks]
        theirs = [each[:-1] for each in arrived]
        received, recv_idx, recv_weights, write = delivered(sources, theirs, rows, held)

        def finish():
            write()
            recv_idx[len(sources) :] = -1
            recv_weights[recv_idx < 0] = float("nan")

        counts = [] if num_worst_tokens else per_expert.tolist()
        handle = _NormalHandle(sources, x.shape[0], rows, config.num_sms)
        event = self._event(finish, async_finish)
        return received, recv_idx, recv_weights, counts, handle, event

    @on_cpu
    def combine(self, x, handle, *, topk_weights=None, config=None, async_finish=False):
        self._check_open()
        assert config.get_nvl_buffer_size_hint(2 * x.shape[1], self.ranks) <= self.num_nvl_bytes
        assert config.num_sms == handle.num_sms, "as many channels as in dispatch"
        combined, combined_weights, finish = summed_by_rank(self, x, handle, topk_weights)
        return combined, combined_weights, self._event(finish, async_finish)

    # -- low-latency mode -------------------------------------------------------------------

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, num_experts):
        there, back = 16 + 2 * hidden, hidden // 128 * 4 + 2 * hidden
        rows, counts = num_experts * tokens, -(-4 * num_experts // 128) * 128
        both = max(tokens * there, rows * back) + rows * max(there, back) + counts
        return (2 * both // 128 + 1) * 128  # two sets, and a signal

    def _check_low_latency(self, tokens, hidden, num_experts):
        self._check_open()
        assert self.low_latency_mode
        size = self.get_low_latency_rdma_size_hint(tokens, hidden, self.ranks, num_experts)
        assert size <= self.num_rdma_bytes
        assert self.qp_depth >= 2 * (tokens + 1)
        assert num_experts % self.ranks == 0 and self.num_qps_per_rank == num_experts // self.ranks
        assert self.ranks * tokens % 4 == 0, "TMA"
        assert hidden % 512 == 0  # a list in the library, of which all are multiples

    def _take_set(self):
        """Raise the flags of a set, and clear the other's: the host counts, kernels run."""
        if not self.captured:
            assert not self.raised[self.set], (
                "flags of an earlier transfer are taken for this one's"
            )
            self.raised[self.set], self.raised[1 - self.set] = True, False
        self.set = 1 - self.set
        if self.captured == "broken":
            raise RuntimeError("operation failed due to a previous error during capture")

    @on_cpu
    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        *,
        use_fp8=True,
        async_finish=False,
        return_recv_hook=False,
    ):
        capacity, (tokens, hidden) = num_max_dispatch_tokens_per_rank, x.shape
        self._check_low_latency(capacity, hidden, num_experts)
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and tokens <= capacity
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous()
        assert topk_idx.shape[0] == tokens and topk_idx.shape[1] <= 11
        assert not return_recv_hook, "the stand-in knows no hooks"
        self._take_set()
        arrived = exchange(self.group, x, topk_idx)
        local, rows = num_experts // self.ranks, self.ranks * capacity
        slab = garbage((local, rows, hidden), _E4M3 if use_fp8 else torch.bfloat16)
        counts = garbage((local,), torch.int32)
        scales = None
        if use_fp8:
            scales = garbage((local, hidden // 128, rows), torch.float32).transpose(1, 2)
        sources: list[list[tuple[int, int]]] = []
        for expert in range(self.rank * local, (self.rank + 1) * local):
            pairs = [
                (rank, token)
                for rank, (_, ids) in enumerate(arrived)
                for token in (ids == expert).nonzero()[:, 0].tolist()
            ]
            sources.append([pairs[i] for i in self._shuffled(len(pairs))])

        def finish():
            for expert, pairs in enumerate(sources):
                counts[expert] = len(pairs)
                for row, (rank, token) in enumerate(pairs):
                    value = arrived[rank][0][token]
                    if scales is None:
                        slab[expert, row] = value
                        continue
                    groups = value.float().view(-1, 128)
                    scale = groups.abs().amax(dim=1).clamp(min=1e-4) / 448
                    slab[expert, row] = (groups / scale[:, None]).to(_E4M3).view(-1)
                    scales[expert, row] = scale

        handle = (sources, capacity, hidden, num_experts, tokens)
        event = self._event(finish, async_finish)
        return slab if scales is None else (slab, scales), counts, handle, event, None

    @on_cpu
    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, *, async_finish=False, out=None
    ):
        sources, capacity, hidden, num_experts, tokens = handle
        self._check_low_latency(capacity, hidden, num_experts)
        local = num_experts // self.ranks
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert tuple(x.shape) == (local, self.ranks * capacity, hidden)
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous()
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape and topk_idx.shape[0] == tokens
        if out is None:
            out = garbage((tokens, hidden), torch.bfloat16)
        assert out.dtype == torch.bfloat16 and out.is_contiguous()
        assert tuple(out.shape) == (tokens, hidden)
        with _disable_current_modes():
            rows = [
                (e, r, *pair) for e, pairs in enumerate(sources) for r, pair in enumerate(pairs)
            ]
            which = torch.tensor(rows, dtype=torch.long).view(-1, 4)
            values = x[which[:, 0], which[:, 1]]
        self._take_set()
        arrived = exchange(self.group, values, which)

        def finish():
            found = {}
            for rank, (theirs, where) in enumerate(arrived):
                for value, (expert, _, source, token) in zip(theirs, where.tolist(), strict=True):
                    if source == self.rank:
                        found[token, rank * local + expert] = value.float()
            total = torch.zeros(tokens, hidden)
            for token, slot in (topk_idx >= 0).nonzero().tolist():
                expert = int(topk_idx[token, slot])
                total[token] += topk_weights[token, slot] * found.pop((token, expert))
            assert not found, "rows came back that nobody asked for"
            out.copy_(total)

        return out, self._event(finish, async_finish), None


@dataclass(frozen=True)
class EPHandle:
    sources: list[tuple[int, int]]
    tokens: int
    rows: int
    num_sms: int
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    topk_idx: torch.Tensor  # the library's copy
    num_experts: int


class ElasticBuffer(_Base):
    def __init__(
        self,
        group,
        *,
        num_max_tokens_per_rank,
        hidden,
        num_topk,
        allow_hybrid_mode=True,
        explicitly_destroy=False,
    ):
        assert not allow_hybrid_mode and os.environ.get("EP_DISABLE_GIN") == "1", "no network card"
        assert num_max_tokens_per_rank > 0
        row = 2 * hidden + num_topk * 8 + 64
        self.num_bytes = -(-group.size() * num_max_tokens_per_rank * row // 2**21) * 2**21
        self._open(group, explicitly_destroy)

    @on_cpu
    def dispatch(
        self,
        x,
        *,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        num_sms=0,
        handle=None,
        do_cpu_sync=None,
        async_with_compute_stream=False,
    ):
        self._check_open()
        assert 0 < num_sms <= 132, "the default depends on num_experts, also with a handle"
        if handle is not None:
            assert topk_idx is None and topk_weights is None and not do_cpu_sync
            assert num_experts in (None, handle.num_experts)
            assert num_max_tokens_per_rank in (None, handle.rows // self.ranks)
            received, finish = sent_again(self, x, handle)
            event = self._event(finish, async_with_compute_stream)
            ids = garbage((handle.rows, handle.topk_idx.shape[1]), topk_idx_t)
            return received, ids, None, handle, event
        x, scales = _check_payload(x, topk_idx, topk_weights)
        local, k = num_experts // self.ranks, topk_idx.shape[1]
        assert num_experts % self.ranks == 0 and local <= 256 and k <= 32
        assert x.shape[0] <= num_max_tokens_per_rank
        row = x.shape[1] * x.itemsize + k * 8 + (0 if scales is None else 4 * scales.shape[1])
        assert self.ranks * num_max_tokens_per_rank * row <= self.num_bytes
        assert do_cpu_sync is False, "the stand-in knows only the worst case"
        sent = [x, topk_idx, topk_weights, *([] if scales is None else [scales])]
        arrived = exchange(self.group, *sent)
        first, sources, ends = self.rank * local, [], []
        for rank, (_, ids, *_) in enumerate(arrived):
            here = ((ids >= first) & (ids < first + local)).any(dim=1)
            tokens = here.nonzero().flatten().tolist()
            sources += [(rank, tokens[i]) for i in self._shuffled(len(tokens))]
            ends.append(len(sources))
        rows = self.ranks * num_max_tokens_per_rank
        counts = garbage((self.ranks,), torch.int32)
        held = range(first, first + local)
        received, recv_idx, recv_weights, write = delivered(sources, arrived, rows, held)

        def finish():
            counts.copy_(torch.tensor(ends))
            write()

        handle = EPHandle(sources, x.shape[0], rows, num_sms, counts, topk_idx.clone(), num_experts)
        event = self._event(finish, async_with_compute_stream)
        return received, recv_idx, recv_weights, handle, event

    @on_cpu
    def combine(self, x, handle, *, topk_weights=None, async_with_compute_stream=False):
        self._check_open()
        assert x.shape[1] % 256 == 0
        assert topk_weights is None or topk_weights.shape[1] == handle.topk_idx.shape[1]
        combined, combined_weights, finish = summed_by_rank(
            self, x, handle, topk_weights, handle.num_experts // self.ranks
        )
        return combined, combined_weights, self._event(finish, async_with_compute_stream)


# As a module without a spec, so that nothing that looks for the library finds it.
_library = types.ModuleType("deep_ep")
for _name in ("Buffer", "Config", "ElasticBuffer", "EPHandle", "EventOverlap", "topk_idx_t"):
    setattr(_library, _name, globals()[_name])
sys.modules["deep_ep"] = _library

import moekit_deepep  # noqa: E402
import triton_interpreter  # noqa: E402, F401 (patches triton)
from moekit_deepep.dispatcher import (  # noqa: E402, F401 (spec.target names this module)
    ElasticDispatcher,
    LowLatencyDispatcher,
    NormalDispatcher,
)
from moekit_deepep.training import (  # noqa: E402, F401 (spec.training names this module)
    TrainableElastic,
    TrainableNormal,
)

from moekit.contract.specs import DispatcherSpec  # noqa: E402
from moekit.discovery.registry import Registry  # noqa: E402
from moekit.discovery.registry import registry as installed  # noqa: E402


def specs() -> list[DispatcherSpec]:
    """The plugin's own, on the CPU, and with hidden sizes small enough for it."""
    small = {"deepep_ll": partial(moekit_deepep.check_ll, hidden_sizes=(512, 1024))}
    return [
        replace(
            spec,
            name=f"{spec.name}_standin",
            target=f"{__name__}:{spec.target.split(':')[1]}",
            training=spec.training and f"{__name__}:{spec.training.split(':')[1]}",
            devices=("cpu",),
            requires=(),
            check=small.get(spec.name, spec.check),
        )
        for spec in moekit_deepep.moekit_dispatchers()
    ]


def registry() -> Registry:
    made = Registry(plugins=installed().plugins)
    for spec in specs():
        made.register(spec)
    return made
