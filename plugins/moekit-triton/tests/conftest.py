"""On the GPU when there is one, else in Triton's interpreter (the top-level conftest chooses)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
