"""Module fixtures of processes that tests run functions on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moekit.testing.distributed import RankPool


def rank_pool(ranks: int, device: str = "cpu", *first: Any, **options: Any) -> Any:
    """Return a module fixture: a pool of ranks, or a skip where the devices are missing.

    first: a function that every rank runs before, and its arguments.
    """

    @pytest.fixture(scope="module")
    def pool():
        if device == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} CUDA devices")
        with RankPool(ranks, device, **options) as made:
            if first:
                made.run(*first)
            yield made

    return pool
