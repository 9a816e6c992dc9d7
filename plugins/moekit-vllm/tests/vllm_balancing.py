"""A plugin of vLLM that lets EPLB run on a CPU, where vLLM refuses it.

vLLM's mapping of experts to their replicas is a Triton kernel, its events need a device, and its
model runner for CPUs does not start EPLB.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def register() -> None:
    import vllm.config.parallel as config
    from vllm.distributed.eplb import eplb_state
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Platform(type(config.current_platform)):  # type: ignore[misc]
        def is_cuda_alike(self) -> bool:
            return True

    commit, load = eplb_state._commit_eplb_maps, CPUModelRunner.load_model
    rearrange = eplb_state.EplbState.rearrange

    def with_events(*args: Any, **more: Any) -> Any:
        with patch.object(torch, "Event", Event):
            return rearrange(*args, **more)

    def load_model(self: Any, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        self._moe_model = self.model
        self.eplb_state = eplb_state.EplbState(self.parallel_config, self.device)
        self.eplb_state.add_model(self.model, self.model_config)

    def say_map(state: Any, **more: Any) -> None:
        print(f"PLACES {more['new_physical_to_logical_map'].tolist()}", flush=True)
        commit(state, **more)

    config.current_platform = Platform()
    CPUModelRunner.load_model = load_model
    eplb_state.EplbState.rearrange = with_events
    eplb_state._commit_eplb_maps = say_map
    base_router.eplb_map_to_physical_and_record = places


class Event:
    """The time at which it was recorded; on a CPU nothing runs later."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.monotonic()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later._time - self._time)


def places(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
) -> Tensor:
    """Return one replica's place of each chosen expert, in turns, and count the assignments."""
    ids = topk_ids.long()
    turn = torch.arange(ids.numel()).view_as(ids) % logical_replica_count[ids]
    found = logical_to_physical_map[ids, turn]
    if record_enabled:
        expert_load_view += found.flatten().bincount(minlength=len(expert_load_view))
    return found.to(topk_ids.dtype)
