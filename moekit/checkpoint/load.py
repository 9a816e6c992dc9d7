"""Load the expert weights of MoE layers for one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moekit.checkpoint.config import model_type_of
from moekit.checkpoint.files import Checkpoint, available_memory
from moekit.checkpoint.names import ExpertNames
from moekit.checkpoint.read import Reader
from moekit.checkpoint.share import Share
from moekit.checkpoint.tensors import Tensors, listed, named
from moekit.errors import WeightsError
from moekit.problem import MoEProblem
from moekit.problem.weight_faults import in_order
from moekit.problem.weights import ExpertWeights

THREADS = 8  # also with few cores: threads mostly wait for the disk
_COUNTED = 10_000  # faults after which the search ends


def load_experts(
    path: str | Path | Checkpoint,
    names: ExpertNames | str | None,
    layer: int,
    problem: MoEProblem,
    **options: Any,
) -> ExpertWeights:
    """Load one MoE layer's experts for this rank of ``problem``, to the CPU.

    Only this rank's experts and slices are read, except that input scales of all experts are,
    because they share the largest. Weights stay as they are stored: in the file's dtype, or in the
    problem's scheme. The scheme may quantize activations differently than the checkpoint intends,
    and its scales may be finer.

    Tensor parallelism keeps every stored number. Blocks of 128 x 128 are never cut: a rank holds
    whole blocks, the `MoEProblem.local_neurons`, padded with zeros. Groups of columns of w2 are cut
    into equal parts only; a rank may hold whole groups and a part of another one, because the order
    of neurons makes no difference. A w2 in act-order is cut into whole groups. What cannot be cut
    so is refused; ``dequantize=True`` cuts anything.

    Args:
        path: A file, a directory, or an open `Checkpoint`, which reads its headers only once.
        names: An `ExpertNames`, a model type of `NAMES`, or None for config.json's model type.
        layer: The layer's number in the checkpoint.
        problem: The problem to load for.
        options: ``experts`` and ``dequantize``, as in `load_layers`.

    Returns:
        w13 (L, 2I, H) and w2 (L, H, I) with their scales and biases, in the problem's slices.

    Raises:
        WeightsError: Lists all tensors that are missing, unexpected, duplicate, of another shape
            or dtype, or not finite.
    """
    ((_, weights),) = load_layers(path, names, [layer], problem, **options)
    return weights


def load_layers(
    path: str | Path | Checkpoint,
    names: ExpertNames | str | None,
    layers: Iterable[int],
    problem: MoEProblem,
    *,
    experts: Sequence[int] | None = None,
    dequantize: bool = False,
) -> Iterator[tuple[int, ExpertWeights]]:
    """Yield (layer, weights) for each of ``layers``, each read when it is requested.

    All layers are checked before the first one is read. See `load_experts` for the other
    arguments and errors.

    Args:
        layers: The layers' numbers in the checkpoint.
        experts: The logical expert of each of this rank's L physical experts. Default: as the
            problem places them.
        dequantize: Convert weights of any known format to the problem's dtype. The problem's
            scheme must be "none".
    """
    opened = nullcontext(path) if isinstance(path, Checkpoint) else Checkpoint(path)
    with opened as checkpoint:
        called = model_type_of(checkpoint) if names is None else names
        with named(checkpoint):
            local = local_experts(problem, experts)
            shares = [Share(checkpoint, called, n, problem, local, dequantize) for n in layers]
            faults = (fault for share in shares for fault in share.faults())
            _raise(checkpoint, list(itertools.islice(faults, _COUNTED)))
        with _pool() as pool:
            for share in shares:
                checkpoint.check_unchanged()
                weights = _load(share, pool)
                checkpoint.check_unchanged()
                yield share.layer, weights


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads in which torch operators run single-threaded."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(THREADS, "moekit-load", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # also for threads that start later


def _destination(share: Share) -> dict[str, Tensor]:
    """Allocate w13 and w2 of a layer. Raises WeightsError if memory does not suffice."""
    p, dtype = share.problem, _dtype(share)
    shapes = loaded_shapes(p)
    nbytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    if nbytes > (free := available_memory()):
        raise WeightsError(
            f"{share.checkpoint.path}: the experts of layer {share.layer} take {nbytes / 1e9:.1f} "
            f"GB on this rank, but only {free / 1e9:.1f} GB of memory are free; use more ranks, or "
            f"correct the sizes: num_experts={p.num_experts}, hidden_size={p.hidden_size}, "
            f"intermediate_size={p.intermediate_size}"
        )
    out = {name: torch.empty(each, dtype=dtype, device="cpu") for name, each in shapes.items()}
    clear_padding(share, out)
    return out


def clear_padding(share: Share, out: Mapping[str, Tensor]) -> None:
    """Fill w13 and w2 with the scheme's code of 0, if the rank's neurons are padded."""
    if share.padded:
        weight = share.problem.quant.weight
        for tensor in out.values():
            tensor.view(torch.uint8).fill_(0 if weight is None else weight.codes.zero_byte)


def loaded_shapes(problem: MoEProblem) -> dict[str, tuple[int, int, int]]:
    """Return the shapes of w13 and w2 of this rank's experts."""
    L, H, weight = problem.num_local_experts, problem.hidden_size, problem.quant.weight
    per_byte = 1 if weight is None else weight.codes.per_byte
    return {
        "w13": (L, problem.w13_rows, H // per_byte),
        "w2": (L, H, problem.local_intermediate_size // per_byte),
    }


def _load(share: Share, pool: ThreadPoolExecutor) -> ExpertWeights:
    """Read the share's experts, in the order of the files."""
    reader = Reader(share, _destination(share))
    slots = range(len(share.experts))
    in_file_order = sorted(slots, key=lambda slot: share.place(share.experts[slot]))
    try:
        for _ in pool.map(reader.expert, in_file_order):
            pass
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    return collect(reader)


def collect(reader: Reader) -> ExpertWeights:
    """Return the experts that ``reader`` has read, with their input scales. Raises WeightsError,
    which lists the reader's faults."""
    share = reader.share
    input_scales = _input_scales(share, reader.faults) if share.static else {}
    _raise(share.checkpoint, reader.faults)
    extras = {name: torch.stack([e[name] for e in reader.extras]) for name in reader.extras[0]}
    weight = share.problem.quant.weight
    for name in [name for name in extras if name.endswith("_g_idx")]:
        assert weight is not None
        if in_order(extras[name], weight.group[1]):  # then it is not needed
            del extras[name]
    return ExpertWeights(
        **reader.out,
        **extras,
        **input_scales,
        interleaved=bool(share.names.gate_up and share.names.interleaved),
    )


def local_experts(problem: MoEProblem, experts: Sequence[int] | None) -> list[int]:
    """Return the logical expert of each of this rank's physical experts. Raises WeightsError if
    ``experts`` does not fit the problem."""
    if experts is None:
        return [problem.logical_expert(p) for p in problem.local_experts]
    if len(experts) != problem.num_local_experts:
        raise WeightsError(
            f"experts must name one logical expert for each of this rank's "
            f"{problem.num_local_experts} physical experts (got {len(experts)})"
        )
    if wrong := [e for e in experts if not 0 <= e < problem.num_experts]:
        raise WeightsError(f"experts must be in 0..{problem.num_experts - 1} (got {wrong})")
    return list(experts)


def _dtype(share: Share) -> torch.dtype:
    p = share.problem
    if share.dequantize:
        return p.dtype
    if p.quant.weight is not None:
        return p.quant.weight.torch_dtype
    dtype = share.checkpoint.dtype(share.name(share.names.down, share.experts[0]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _input_scales(share: Share, faults: list[str]) -> dict[str, Tensor]:
    """Read one static scale each for w13 and w2: the largest of all experts.

    With it, all ranks of expert parallelism quantize a token to the same values.
    """
    suffix, every = share.format.parts["input_scale"].suffix, range(share.problem.num_experts)

    def scales(template: str) -> Tensor:
        experts = every if "{expert}" in template else (0,)
        names = [share.name(template, e, suffix) for e in experts]
        read = torch.cat([share.checkpoint.view(name).float().flatten() for name in names])
        wrong = (~(torch.isfinite(read) & (read > 0))).nonzero().flatten().tolist()
        for index in wrong[:_COUNTED]:
            name = share.name(template, index, suffix)
            faults.append(f"{name} is {float(read[index]):g}, expected a finite number above 0")
        return read

    w13 = [scales(template).max() for template in dict.fromkeys(p.template for p in share.w13)]
    return {
        "w13_input_scale": torch.stack(w13).max(),
        "w2_input_scale": scales(share.names.down).max(),
    }


def _raise(checkpoint: Tensors, faults: Sequence[str]) -> None:
    if faults := list(dict.fromkeys(faults)):
        raise WeightsError(
            f"{checkpoint.path}: {len(faults)} tensor(s) or settings do not fit: {listed(faults)}"
        )
