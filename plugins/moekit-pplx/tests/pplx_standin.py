"""pplx_kernels.AllToAll on the CPU over gloo, with the library's semantics and its traps:

- ids are uint32 and in range, K in every row; no expert gets more than max_num_tokens rows of one
  rank, or the library writes out of bounds (here: an error)
- strictly dispatch then combine; sending clears the counts, receiving adds to them
- rows come in any order, and after what an expert already has; other rows are not touched
- the row of a token beyond NUM_SMS overwrites one that is still being sent
- a combine reads expert_y through its strides only, and sums weight * value over all K slots, NaN
  times 0 included

A row's place in this rank's memory is (expert's rank, expert, token), as in the library: `combine`
finds by its own `indices` what came back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from moekit_pplx.dispatcher import PplxDispatcher
from vendor_stand_ins import on_cpu

NUM_SMS = 132


class AllToAll:
    made = 0
    destroyed = 0

    @classmethod
    def intranode(
        cls,
        max_num_tokens,
        num_experts,
        experts_per_token,
        rank,
        world_size,
        dp_size,
        hidden_dim,
        hidden_dim_bytes,
        hidden_dim_scale_bytes,
        group_name="default",
    ):
        assert world_size % dp_size == 0 and world_size // dp_size > 1
        assert dp_size == 1, "the stand-in knows no more"
        assert hidden_dim_bytes % 16 == 0 and hidden_dim_scale_bytes % 16 == 0
        assert hidden_dim_scale_bytes <= hidden_dim_bytes
        assert num_experts % world_size == 0, "the kernels divide without a rest"
        assert experts_per_token <= num_experts
        self = cls()
        self.capacity, self.K, self.ranks, self.rank = (
            max_num_tokens,
            experts_per_token,
            world_size,
            rank,
        )
        self.L = num_experts // world_size
        self.hidden, self.row_bytes = hidden_dim, hidden_dim_bytes
        self.scales = hidden_dim_scale_bytes // 4
        self.group = dist.distributed_c10d._resolve_process_group(group_name)
        assert (self.group.rank(), self.group.size()) == (rank, world_size)
        self.state, self.generator = "idle", torch.Generator().manual_seed(rank)
        cls.made += 1
        return self

    # -- dispatch ---------------------------------------------------------------------------

    @on_cpu
    def dispatch(
        self,
        out_expert_num_tokens,
        out_expert_x,
        out_expert_x_scale,
        dp_x,
        dp_x_scale,
        indices,
        bound_m,
        do_send=True,
        do_recv=True,
    ):
        assert (self.scales > 0) == (out_expert_x_scale is not None) == (dp_x_scale is not None)
        assert bound_m is None
        assert out_expert_num_tokens.is_contiguous() and out_expert_num_tokens.dim() == 1
        assert out_expert_num_tokens.dtype == torch.int32
        assert out_expert_x.is_contiguous() and out_expert_x.dim() == 3
        assert dp_x.is_contiguous() and dp_x.dim() == 2
        assert dp_x.itemsize * self.hidden == self.row_bytes == out_expert_x.itemsize * self.hidden
        assert indices.dtype == torch.uint32, "indices must be of type UInt32"
        assert indices.is_contiguous() and tuple(indices.shape) == (dp_x.shape[0], self.K)
        if do_send:
            assert self.state == "idle", f"dispatch while {self.state}"
            self.state = "sent"
            out_expert_num_tokens[: self.L] = 0
            self._send(dp_x, dp_x_scale, indices)
        if do_recv:
            assert self.state == "sent", f"receive while {self.state}"
            self.state = "dispatched"
            self._receive(out_expert_num_tokens, out_expert_x, out_expert_x_scale)

    def _send(self, x, scale, indices):
        tokens = x.shape[0]
        assert tokens <= self.capacity, f"{tokens} tokens, buffers for {self.capacity}"
        ids = indices.view(torch.int32).long()
        inside = (ids >= 0) & (ids < self.L * self.ranks)
        assert bool(inside.all()), f"an id is out of bounds: {ids.tolist()}"
        per_expert = torch.bincount(ids.flatten(), minlength=self.L * self.ranks)
        assert int(per_expert.max()) <= self.capacity, "more rows for an expert than there is room"
        rows = torch.empty(tokens, self.row_bytes, dtype=torch.uint8)
        if tokens:  # the strides of nothing are anything
            rows.copy_(x.view(torch.uint8))
        late = torch.arange(NUM_SMS, max(NUM_SMS, tokens))
        half = self.row_bytes // 2
        rows[late - NUM_SMS, :half] = rows[late, :half]
        payload = [torch.full((self.capacity, self.row_bytes), 7, dtype=torch.uint8)]
        payload[0][:tokens] = rows
        payload.append(torch.full((self.capacity, self.K), -1, dtype=torch.int32))
        payload[1][:tokens] = indices.view(torch.int32)
        if self.scales:
            assert scale.dtype == torch.float32 and tuple(scale.shape) == (tokens, self.scales)
            payload.append(torch.full((self.capacity, self.scales), float("nan")))
            payload[2][:tokens] = scale
        self.arriving = []
        for mine in payload:
            everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
            self.arriving.append((work, everyone, mine))

    def _receive(self, counts, x, scale):
        for work, *_ in self.arriving:
            work.wait()
        rows, ids, *scales = (everyone for _, everyone, _ in self.arriving)
        del self.arriving
        slab = x.view(torch.uint8)
        assert x.shape[0] >= self.L, "fewer slabs than local experts"
        self.sources = []  # (source rank, token, local expert, row)
        groups = [(source, e) for source in range(self.ranks) for e in range(self.L)]
        for at in torch.randperm(len(groups), generator=self.generator).tolist():
            source, expert = groups[at]
            sent = (ids[source] == self.rank * self.L + expert).any(dim=1).nonzero().flatten()
            for token in sent[torch.randperm(len(sent), generator=self.generator)].tolist():
                times = int((ids[source][token] == self.rank * self.L + expert).sum())
                for _ in range(times):
                    row = int(counts[expert])
                    assert row < x.shape[1], f"slab of {x.shape[1]} rows is full"
                    slab[expert, row] = rows[source][token]
                    if scale is not None:
                        # Strides may be 0: what they make coincide is equal.
                        for column in range(self.scales):
                            scale[expert, row, column] = scales[0][source][token, column]
                    counts[expert] += 1
                    self.sources.append((source, token, expert, row))

    # -- combine ----------------------------------------------------------------------------

    @on_cpu
    def combine(self, out_tokens, indices, weights, expert_y, bound_m, do_send=True, do_recv=True):
        assert bound_m is None
        assert out_tokens.is_contiguous() and out_tokens.dim() == 2
        assert out_tokens.dtype in (torch.bfloat16, torch.float16), "unsupported out_tokens"
        assert indices.dtype == torch.uint32 and indices.is_contiguous()
        assert weights.dtype == torch.float32 and weights.is_contiguous()
        assert expert_y.is_contiguous() and expert_y.dim() == 3
        assert tuple(weights.shape) == tuple(indices.shape) == (out_tokens.shape[0], self.K)
        if do_send:
            assert self.state == "dispatched", f"combine while {self.state}"
            self.state = "returning"
            self._return(expert_y)
        if do_recv:
            assert self.state == "returning", f"receive of a combine while {self.state}"
            self.state = "idle"
            self._sum(out_tokens, indices.view(torch.int32).long(), weights)

    def _return(self, y):
        back = torch.full((self.ranks, self.L, self.capacity, self.hidden), float("nan"))
        arrived = torch.zeros(self.ranks, self.capacity, dtype=torch.int32)
        for source, token, expert, row in self.sources:
            flat = expert * y.stride(0) + row * y.stride(1)
            assert flat + self.hidden <= y.numel(), "reads behind the end of expert_y"
            back[source, expert, token] = y.view(-1)[flat : flat + self.hidden].float()
            arrived[source, token] += 1
        self.returned, self.arrived = torch.empty_like(back), torch.empty_like(arrived)
        self.works = [
            dist.all_to_all_single(self.returned, back, group=self.group, async_op=True),
            dist.all_to_all_single(self.arrived, arrived, group=self.group, async_op=True),
        ]
        self.sent = back, arrived

    def _sum(self, out, ids, weights):
        for work in self.works:
            work.wait()
        tokens = out.shape[0]
        count = self.arrived.sum(dim=0)
        assert bool((count[:tokens] == self.K).all()), f"waits forever: {count.tolist()}"
        at = torch.arange(tokens)[:, None]
        rows = self.returned[ids // self.L, ids % self.L, at]
        out.copy_((rows * weights[:, :, None]).sum(dim=1))
        del self.returned, self.arrived, self.works, self.sent

    def destroy(self):
        if self.state != "destroyed":
            assert self.state == "idle", f"destroyed while {self.state}"
            self.state = "destroyed"
            type(self).destroyed += 1


class StandInPplx(PplxDispatcher):
    @staticmethod
    def library():
        return AllToAll

    @staticmethod
    def translate(ids, weights, destinations, num_experts):
        """Do as `moekit_pplx.kernels.translate`, on any device."""
        known = (ids >= 0) & (ids < num_experts)
        spare = num_experts + torch.arange(ids.shape[1], device=ids.device)
        sent = destinations[torch.where(known, ids.long(), spare)]
        missing = torch.full_like(weights, float("nan")).masked_fill(ids < 0, 0.0)
        return sent.view(torch.uint32), torch.where(known, weights, missing)
