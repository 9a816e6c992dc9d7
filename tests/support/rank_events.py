"""Events that ranks of a test wait for, in the store of the default process group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# Longer than a slow machine needs.
GUARD = 300.0


def happened(event: str) -> None:
    dist.distributed_c10d._get_default_store().set(f"event {event}", "")


def wait_for(event: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"event {event}"], timedelta(seconds=GUARD))
