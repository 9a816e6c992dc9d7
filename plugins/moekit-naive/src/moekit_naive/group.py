"""Does the process group fit the problem, and do its ranks agree on what the problem is?"""

from __future__ import annotations

from dataclasses import fields

import torch.distributed as dist

from moekit.errors import GroupMismatch
from moekit.problem import MoEProblem

# Ranks that speak different versions of the exchange in dispatcher.py must not start talking.
PROTOCOL = 1


def resolve(problem: MoEProblem, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to exchange tokens in; None when tokens need not move.

    Collective when tokens move or a group is given. Raises GroupMismatch, and then on all ranks.
    """
    parallel = problem.parallel
    if group is None and not parallel.moves_tokens:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupMismatch(
            f"dp_size={parallel.dp_size}: tokens must move between ranks, but torch.distributed "
            "is not initialized; call torch.distributed.init_process_group first (torchrun sets "
            "its environment), or describe one rank with ParallelConfig()"
        )
    group = group or dist.group.WORLD
    assert group is not None
    _agree(problem, group)
    return group if parallel.moves_tokens else None


def has_backend(group: dist.ProcessGroup, device_type: str, *names: str) -> bool:
    """Whether ``group`` carries tensors of ``device_type`` (by one of the ``names``, if given)."""
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    backend = backends.get(device_type)
    return backend is not None and (not names or backend in names)


def _agree(problem: MoEProblem, group: dist.ProcessGroup) -> None:
    # This rank's own fault travels too: raising before the exchange would leave the others in it.
    mine = (_fingerprint(problem), _fault(problem, group))
    everyone: list[tuple[dict[str, str], str | None]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    faults = []
    for name in sorted({name for fingerprint, _ in everyone for name in fingerprint}):
        holders: dict[str, list[int]] = {}
        for rank, (fingerprint, _) in enumerate(everyone):
            holders.setdefault(fingerprint.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
            faults.append(f"ranks disagree on {name}: {values}; give all ranks the same")
    faults += [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(everyone) if fault]
    if faults:
        raise GroupMismatch("; ".join(faults))


def _fingerprint(problem: MoEProblem) -> dict[str, str]:
    """What all ranks must have in common, by field name."""
    own = ("parallel", "device")
    values = {f.name: repr(getattr(problem, f.name)) for f in fields(problem) if f.name not in own}
    parallel = problem.parallel
    return values | {
        "ep_size": str(parallel.ep_size),
        "tp_size": str(parallel.tp_size),
        "dp_size": str(parallel.dp_size),
        "device": problem.device.type,
        "moekit-naive protocol": str(PROTOCOL),
    }


def _fault(problem: MoEProblem, group: dist.ProcessGroup) -> str | None:
    parallel = problem.parallel
    sizes = f"ep_size={parallel.ep_size} x tp_size={parallel.tp_size}"
    wanted = parallel.ep_size * parallel.tp_size
    if group.size() != wanted:
        return (
            f"the process group has {group.size()} ranks, {sizes} wants {wanted}; pass the group "
            "of exactly the ranks that share this layer, or correct the ParallelConfig"
        )
    rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
    if group.rank() != rank:
        return (
            f"is rank {group.rank()} of the process group, but ep_rank={parallel.ep_rank} and "
            f"tp_rank={parallel.tp_rank} ({sizes}) want it to be rank {rank}; set ep_rank = "
            "group rank // tp_size and tp_rank = group rank % tp_size"
        )
    device = problem.device.type
    backends = ("gloo", "mpi") if device == "cpu" else ("nccl",)
    if not has_backend(group, device, *backends):
        return (
            f"the process group's backends are {dist.get_backend_config(group)}, tensors on "
            f"{device} want {' or '.join(backends)}; initialize it with "
            f"backend='{'gloo' if device == 'cpu' else 'cpu:gloo,cuda:nccl'}'"
        )
    return None
