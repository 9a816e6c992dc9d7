"""The process group of a layer: whether it fits the problem, and whether its ranks agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

import torch.distributed as dist

from moekit.errors import GroupMismatch, MoekitError
from moekit.problem import MoEProblem
from moekit.runtime.agreement import Agreement, exchange


def resolve(
    problem: MoEProblem,
    group: dist.ProcessGroup | None,
    protocol: str = "",
    timeout: float | None = None,
) -> dist.ProcessGroup | None:
    """Return the group to exchange tokens in, or None if tokens need not move.

    Collective when tokens move or a group is given.

    Args:
        protocol: what else ranks must have in common, for example a library's version.
        timeout: seconds to wait for a rank; by default the ``peer_timeout`` of the last
            `moekit.compose` in the group.

    Raises:
        GroupMismatch: the group does not fit the problem, or ranks differ; raised on all ranks.
        PeerFailed: a rank did not come.
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
    # This rank's own fault is exchanged too: raising first would leave the others waiting.
    said = _fingerprint(problem) | {"protocol": protocol}
    same("describe the layer", said, _fault(problem, group), group, timeout)
    return group if parallel.moves_tokens else None


def same_choice(
    chosen: str,
    group: dist.ProcessGroup | None,
    fault: str | None = None,
    timeout: float | None = None,
) -> None:
    """Raise GroupMismatch on all ranks unless all chose alike. Collective if there are ranks.
    Raises PeerFailed if a rank did not come.

    Args:
        fault: why this rank has not chosen.
        timeout: as in `resolve`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # `resolve` reports that
    group = group or dist.group.WORLD
    assert group is not None
    said = {"dispatcher and experts": chosen} if fault is None else {}
    advice = " plugins, tuned tables (MOEKIT_TUNED) and variables, or name both"
    same("choose backends", said, fault, group, timeout, advice)


def join(group: dist.ProcessGroup, timeout: float, checked: bool) -> tuple[str, Agreement]:
    """Return the name that all ranks give a new kernel, and its agreement. Collective.

    Raises GroupMismatch on all ranks if only some are checked, and PeerFailed if a rank does not
    come.
    """
    same("compose a kernel", {"checked": str(checked)}, None, group, timeout)
    agreement = Agreement(group, timeout)
    return f"kernel {agreement.step}", agreement


def has_backend(group: dist.ProcessGroup, device_type: str, *names: str) -> bool:
    """Return whether ``group`` carries tensors of ``device_type``.

    names: count only these backends, if any are given.
    """
    config = dist.get_backend_config(group)
    backends = dict(item.split(":") for item in config.split(",") if ":" in item)
    backend = backends.get(device_type)
    return backend is not None and (not names or backend in names)


def same(
    what: str,
    said: Mapping[str, str],
    fault: str | None,
    group: dist.ProcessGroup,
    timeout: float | None = None,
    advice: str = "",
    failed: type[MoekitError] = GroupMismatch,
) -> None:
    """Raise GroupMismatch on all ranks if they differ, ``failed`` if one has a fault. Collective.

    advice: ends the error's text.
    """
    everyone: list[tuple[dict[str, str], str | None]] = [
        tuple(json.loads(text))
        for text in exchange(what, json.dumps([dict(said), fault]), group, timeout)
    ]
    faults = []
    for name in sorted({name for fingerprint, _ in everyone for name in fingerprint}):
        holders: dict[str, list[int]] = {}
        for rank, (fingerprint, _) in enumerate(everyone):
            holders.setdefault(fingerprint.get(name, "unknown"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
            faults.append(f"ranks disagree on {name}: {values}; give all ranks the same")
    failures = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(everyone) if fault]
    if faults or failures:
        raise (failed if failures else GroupMismatch)("; ".join(faults + failures) + advice)


def _fingerprint(problem: MoEProblem) -> dict[str, str]:
    """Return what all ranks must have in common, by field name."""
    own, shared = ("parallel", "device"), ("ep_size", "tp_size", "dp_size", "nodes")
    return {
        **{f.name: repr(getattr(problem, f.name)) for f in fields(problem) if f.name not in own},
        **{name: str(getattr(problem.parallel, name)) for name in shared},
        "device": problem.device.type,
    }


def _fault(problem: MoEProblem, group: dist.ProcessGroup) -> str | None:
    parallel = problem.parallel
    sizes = f"ep_size={parallel.ep_size} x tp_size={parallel.tp_size}"
    wanted = parallel.num_ranks
    if group.size() != wanted:
        return (
            f"the process group has {group.size()} ranks, {sizes} needs {wanted}; pass the group "
            "of exactly the ranks that share this layer, or correct the ParallelConfig"
        )
    rank = parallel.rank
    if group.rank() != rank:
        return (
            f"is rank {group.rank()} of the process group, but ep_rank={parallel.ep_rank} and "
            f"tp_rank={parallel.tp_rank} ({sizes}) need it to be rank {rank}; set ep_rank = "
            "group rank // tp_size and tp_rank = group rank % tp_size"
        )
    device = problem.device.type
    backends = ("gloo", "mpi") if device == "cpu" else ("nccl",)
    if not has_backend(group, device, *backends):
        return (
            f"the process group's backends are {dist.get_backend_config(group)}, tensors on "
            f"{device} need {' or '.join(backends)}; initialize it with "
            f"backend='{'gloo' if device == 'cpu' else 'cpu:gloo,cuda:nccl'}'"
        )
    return None
