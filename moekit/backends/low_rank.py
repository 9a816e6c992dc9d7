"""Low-rank deltas of experts (LoRA), one expert at a time.

Shape suffixes: n rows of one expert, K and N columns; S slots, L local experts, G groups, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.contract import Adapters


def add_delta(
    adapters: Adapters | None,
    name: str,
    expert: int,
    into_nN: Tensor,
    rows_nK: Tensor,
    slots_n: Tensor | None,
) -> Tensor:
    """Return ``into`` plus ``scaling B (A row)`` of one expert and each row's slot, -1 for none.

    Rows without an adapter keep their bits. Autograd flows, and ``into`` is written in place if
    nothing requires a gradient. Waits for the device.
    """
    a_SLGrK, b_SLNr = matrices(adapters, name)
    if a_SLGrK is None or b_SLNr is None or adapters is None or slots_n is None:
        return into_nN
    for slot in torch.unique(slots_n[slots_n >= 0]).tolist():
        mine = (slots_n == slot).nonzero()[:, 0]
        a_GrK = a_SLGrK[slot, expert].to(rows_nK.dtype)
        b_GNr = b_SLNr[slot, expert].to(rows_nK.dtype).view(len(a_GrK), -1, a_GrK.shape[1])
        low_Gnr = torch.matmul(rows_nK[mine], a_GrK.mT) * adapters.scaling[slot]
        delta_nN = torch.bmm(low_Gnr, b_GNr.mT).transpose(0, 1).flatten(1)
        if into_nN.requires_grad or delta_nN.requires_grad:
            into_nN = into_nN.index_add(0, mine, delta_nN.to(into_nN.dtype))
        else:
            into_nN[mine] += delta_nN
    return into_nN


def matrices(adapters: Adapters | None, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return A (S, L, G, r, K) and B (S, L, N, r) of w13 or w2, None where there are none."""
    held = {} if adapters is None else adapters.tensors()
    a = held.get(f"{name}_a")
    return (a[:, :, None] if a is not None and a.dim() == 4 else a), held.get(f"{name}_b")
