"""Engines and models that the tests of a session share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    import vllm_models

    @cache
    def save(name: str, seed: int = 0) -> str:
        folder: Path = tmp_path_factory.mktemp(f"{name}-{seed}")
        return str(vllm_models.save(name, folder, seed))

    return save


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from vllm_engines import Engines

    with Engines(tmp_path_factory.mktemp("plugins")) as running:
        yield running


@pytest.fixture(scope="module")
def vllm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let layers of vLLM be made in this process, with an H100's backends."""
    import vllm_quantized_layers as layers

    with pytest.MonkeyPatch.context() as patch, layers.process(tmp_path_factory.mktemp("gloo")):
        layers.choose_backends(patch)
        yield
