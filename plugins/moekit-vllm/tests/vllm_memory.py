"""Memory that vLLM takes away in sleep mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """Keeps the memory of all tensors that its thread makes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = storage
        return made

    def discard(self, kept: Iterable[torch.Tensor]) -> None:
        """Overwrite all but ``kept``."""
        known = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for address, storage in self.storages.items():
            if address not in known:
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0xA5)
