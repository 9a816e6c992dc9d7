"""Map logical experts to the replicas (physical experts) that hold them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import InvalidInput
from moekit.problem import MoEProblem
from moekit.runtime.checks import ID_DTYPES, check_ids, check_tensor, check_tokens
from moekit.untrusted.arguments import shown

# Odd multipliers with random bits for a hash modulo 2**64 of a token's position and its expert.
_TOKEN, _EXPERT, _MIX = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x369DEA0F31A53F85


def to_physical(routing: Routing, replicas: Tensor, offset: int = 0) -> Routing:
    """Replace logical expert ids by physical ids, spreading tokens over each expert's replicas.

    A hash of the token's position in the batch and of the expert picks the replica, so a regular
    pattern of tokens favours none of them: of n tokens, each of M replicas receives about n / M.
    The result depends on the arguments only, and nothing synchronizes with the device.

    Args:
        routing: Weights (T, K) and logical ids (T, K); -1 stands for no expert.
        replicas: (E, M) int32 or int64, the physical ids of each logical expert's replicas,
            padded with -1.
        offset: The number of this token batch. Different batches start with different replicas;
            ranks that hold the same tokens must pass the same number.

    Returns:
        The same weights with physical ids.

    Raises:
        InvalidInput: An argument has the wrong type, shape, dtype or values.
    """
    ids, offset = routing.topk_ids, check_tokens(offset, "offset")
    for name, table in (("topk_ids", ids), ("replicas", replicas)):
        check_tensor(name, table)
        if table.dim() != 2 or table.dtype not in ID_DTYPES:
            raise InvalidInput(
                f"{name} must have two dimensions and dtype int32 or int64 (got {shown(table)})"
            )
    replicas = replicas.to(ids.device, ids.dtype)
    counts = (replicas >= 0).sum(dim=1)
    if replicas.device.type == "cpu":
        if bool((counts == 0).any()):
            missing = int((counts == 0).nonzero()[0])
            raise InvalidInput(f"logical expert {missing} has no replica: every expert needs one")
        check_ids(ids, len(replicas))
    logical = ids.clamp(min=0)
    # Experts start with different replicas, so the assignments of one token do not all go to the
    # first ones. Batches of one token are spread by ``offset`` alone, which is exactly even.
    turn = logical + offset
    if len(ids) > 1:
        token = torch.arange(len(ids), device=ids.device)[:, None]
        hashed = torch.add(token * _TOKEN, logical.long(), alpha=_EXPERT)
        turn = turn + ((hashed ^ hashed >> 32) * _MIX >> 33)
    replica = turn % counts[logical]
    physical = replicas[logical, replica]
    return replace(routing, topk_ids=torch.where(ids < 0, ids, physical))


def check_replicas(replicas: Tensor, problem: MoEProblem, device: torch.device) -> None:
    """Raise InvalidInput unless ``replicas`` is a table that a layer of ``problem`` can use."""
    check_tensor("replicas", replicas)
    shaped = replicas.dim() == 2 and replicas.shape[0] == problem.num_experts
    if not shaped or replicas.dtype not in ID_DTYPES:
        raise InvalidInput(
            f"replicas must be ({problem.num_experts}, M) of int32 or int64, one row of physical "
            f"ids for each expert (got {tuple(replicas.shape)} {replicas.dtype})"
        )
    if replicas.device != device:
        raise InvalidInput(f"replicas must be on {device} (got {replicas.device}): move them")
    end = problem.num_physical_experts
    outside = ((replicas < -1) | (replicas >= end)).any()
    if bool(outside | (replicas < 0).all(dim=1).any()):
        raise InvalidInput(
            f"replicas must hold physical ids 0..{end - 1}, at least one in each row, padded "
            "with -1"
        )
