"""Write new weights into the memory of packed ones, which CUDA graphs may have captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moekit.contract import PackedWeights, PermuteExpertsUnpermute
from moekit.discovery.answers import packed_by
from moekit.errors import WeightsError
from moekit.problem.problem import DTYPES
from moekit.problem.weights import ExpertWeights
from moekit.runtime.checks import check_weights, device_of, overlap
from moekit.runtime.device import on_device
from moekit.runtime.rows import aligned
from moekit.runtime.workspace import settle
from moekit.untrusted.arguments import shown


def repack(
    backend: PermuteExpertsUnpermute,
    made_for: Mapping[str, object],
    held: PackedWeights,
    new: ExpertWeights | PackedWeights,
    experts: Sequence[int] | Tensor | None,
    checksum: str | None,
    name: str,
) -> None:
    """Implement `ModularKernel.repack_`."""
    try:
        check_weights(held, backend.spec.name, made_for)
        with on_device(device_of(held)):
            _write(backend, made_for, held, new, experts, checksum)
    except WeightsError as error:
        raise WeightsError(f"{name}: {error}") from error


def _write(
    backend: PermuteExpertsUnpermute,
    made_for: Mapping[str, object],
    held: PackedWeights,
    new: ExpertWeights | PackedWeights,
    experts: Sequence[int] | Tensor | None,
    checksum: str | None,
) -> None:
    """Check everything, then write ``new``."""
    problem, device = backend.problem, device_of(held)
    local = range(problem.num_local_experts)
    places = local if experts is None else _places(experts, local)
    if isinstance(new, ExpertWeights):
        new = new.detach().to(device)
    if checksum is not None and (found := new.checksum()) != checksum:
        raise WeightsError(
            f"the new weights have checksum {found}, not {shown(checksum)}: take it from the "
            "tensors that are passed, or send them again"
        )
    if isinstance(new, ExpertWeights):
        if problem.quant.weight is not None and new.w13.dtype in DTYPES.values():
            new = new.quantize(problem.quant)
        new.check(problem, len(places))
        new = packed_by(backend, new.canonical(problem)._map(aligned))
    check_weights(new, backend.spec.name, made_for)
    if faults := list(_faults(held, new, None if experts is None else len(places))):
        raise WeightsError("the new weights do not fit the packed ones: " + "; ".join(faults))
    for name, tensor in new.tensors().items():
        old = held.tensors()[name]
        with torch.inference_mode(old.is_inference()):
            if experts is None:
                _copy(tensor, old)
            elif name in held.experts:
                rows = tensor.clone() if overlap(old, tensor) else tensor
                for place, row in zip(places, rows, strict=True):
                    old[place].copy_(row)
    settle(device)


def _copy(new: Tensor, old: Tensor) -> None:
    """Copy a tensor into another one, unless an engine has loaded it into that memory."""
    if (new.data_ptr(), new.stride()) != (old.data_ptr(), old.stride()):
        old.copy_(new.clone() if overlap(old, new) else new)


def _places(experts: Sequence[int] | Tensor, local: range) -> Sequence[int]:
    places = torch.as_tensor(experts).tolist()
    if (
        not places
        or any(type(e) is not int or e not in local for e in places)
        or len(set(places)) < len(places)
    ):
        raise WeightsError(
            f"experts={shown(experts)}: expected different integers in 0..{local.stop - 1}, the "
            "positions of this rank's experts"
        )
    return places


def _faults(held: PackedWeights, new: PackedWeights, rows: int | None) -> Iterator[str]:
    """Yield why ``new`` does not fit the memory of ``rows`` of held's experts; None: of all."""
    olds, news = held.tensors(), new.tensors()
    for name in sorted(olds.keys() ^ news.keys()):
        yield f"{name} is {'missing' if name in olds else 'new'}"
    for name in sorted(olds.keys() & news.keys()):
        old, tensor, shape = olds[name], news[name], olds[name].shape
        if rows is not None and name in held.experts:
            shape = torch.Size((rows, *shape[1:]))
        wanted, found = ((t.dtype, t.device) for t in (old, tensor))
        if tensor.shape != shape or found != wanted:
            yield (
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, not "
                f"{tuple(shape)} {old.dtype} on {old.device}"
            )
        elif rows is not None and name in held.shared and not torch.equal(tensor, old):
            yield f"{name}, which all experts share, would change: pass all experts"
