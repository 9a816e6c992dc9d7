"""Expert weights of MoE layers, for one rank, straight from the files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.checkpoint.config import model_type_of
from moekit.checkpoint.files import Checkpoint, available_memory, empty, named
from moekit.checkpoint.formats import stored
from moekit.checkpoint.names import ExpertNames
from moekit.checkpoint.progress import Progress
from moekit.checkpoint.read import Reader, is_finite
from moekit.checkpoint.schema import MAX_EXPERTS
from moekit.checkpoint.share import Piece, Share
from moekit.errors import WeightsError
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights, in_order

THREADS = 8  # also on few cores: they wait for the disk
_SHOWN = 20  # faults spelled out in one error
_COUNTED = 10_000
_AGREE = 1e-5  # relative, between the input scales of gate and up


def load_experts(
    path: str | Path | Checkpoint,
    names: ExpertNames | str | None,
    layer: int,
    problem: MoEProblem,
    *,
    experts: Sequence[int] | None = None,
    dequantize: bool = False,
    pin_memory: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> ExpertWeights:
    """One MoE layer's experts for this rank of ``problem``, on the CPU.

    Reads this rank's experts and slices only (input scales of all experts: they share the
    largest). Weights stay as they are stored: in the file's dtype, or in the problem's scheme,
    whose activations need not be those that the checkpoint means, and whose scales may be finer.

    Under tensor parallelism every rank has the very numbers that are stored. Blocks of 128 x 128
    are never cut: a rank holds whole ones, the `MoEProblem.local_neurons`, and zeros behind them.
    Groups of columns of w2 are cut in even parts only: where a rank's share of I is no multiple of
    them, it is made of whole groups and a part of one more, which need not lie together, as the
    neurons' order makes no difference; where that does not come out even, the scheme is refused.
    On one rank, where I is no multiple of 128, a block of gate meets one of up, and values are
    rounded again under the larger scale. A w2 in act-order is cut into whole groups,
    for which whole experts are read. Where all columns turn out to be in order, there is no g_idx.

    path: an open `Checkpoint` saves reading the headers for each layer.
    names: an ExpertNames, a model type of `NAMES`, or None for the one that config.json says.
    experts: the logical expert of each of this rank's L slots, if not as the problem places them.
    dequantize: give weights of any known format in the problem's dtype; its scheme must be "none".
    pin_memory: in page-locked memory. threads: that read.
    progress: show a bar; by default where stderr is a terminal and the load takes over a second.

    Raises WeightsError naming all that is missing, unexpected, duplicate, misshapen or not a
    number. Nothing half-loaded is returned.
    """
    ((_, weights),) = load_layers(
        path,
        names,
        [layer],
        problem,
        experts=experts,
        dequantize=dequantize,
        pin_memory=pin_memory,
        threads=threads,
        progress=progress,
    )
    return weights


def load_layers(
    path: str | Path | Checkpoint,
    names: ExpertNames | str | None,
    layers: Iterable[int],
    problem: MoEProblem,
    *,
    experts: Sequence[int] | None = None,
    dequantize: bool = False,
    pin_memory: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
    reuse: bool = False,
) -> Iterator[tuple[int, ExpertWeights]]:
    """(layer, weights) of each of ``layers``, each read when it is asked for; see `load_experts`.

    All layers are checked before the first is read.
    reuse: read every layer into the same memory, for callers who have moved a layer to another
    device when they ask for the next one. Spares the cost of fresh memory. (Packing or moving it to
    the device where it lies may copy nothing: all layers would then have the last one's weights.)
    """
    opened = nullcontext(path) if isinstance(path, Checkpoint) else Checkpoint(path)
    with opened as checkpoint:
        called = model_type_of(checkpoint) if names is None else names
        with named(checkpoint):
            if problem.num_physical_experts > 2 * MAX_EXPERTS:
                raise WeightsError(
                    f"num_experts={problem.num_experts}: want at most {MAX_EXPERTS} experts"
                )
            local = _local_experts(problem, experts)
            shares = [
                Share(checkpoint, called, layer, problem, local, dequantize) for layer in layers
            ]
            faults = (fault for share in shares for fault in share.faults())
            _raise(checkpoint, list(itertools.islice(faults, _COUNTED)))
        total = sum(share.expert_nbytes * len(local) for share in shares)
        out: dict[str, Tensor] = {}
        with _pool(threads or THREADS) as pool, Progress(total, "loading experts", progress) as bar:
            for share in shares:
                if not reuse or not out or out["w2"].dtype != _dtype(share):
                    out = _destination(share, pin_memory)
                yield share.layer, _load(share, out, pool, bar)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose torch operators use no further threads."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "moekit-load", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # also what threads that are new from now on use


def _destination(share: Share, pin_memory: bool) -> dict[str, Tensor]:
    p, L, dtype = share.problem, len(share.experts), _dtype(share)
    halved = 1 if p.quant.weight is None or not p.quant.weight.packed else 2
    shapes = {
        "w13": (L, p.w13_rows, p.hidden_size // halved),
        "w2": (L, p.hidden_size, p.local_intermediate_size // halved),
    }
    nbytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    if nbytes > (free := available_memory()):
        raise WeightsError(
            f"{share.checkpoint.path}: the experts of layer {share.layer} take {nbytes / 1e9:.1f} "
            f"GB on this rank, and {free / 1e9:.1f} GB of memory are free; use more ranks, or "
            f"correct the sizes: num_experts={p.num_experts}, hidden_size={p.hidden_size}, "
            f"intermediate_size={p.intermediate_size}"
        )
    out = {name: empty(shape, dtype, pin_memory) for name, shape in shapes.items()}
    if share.padded:  # no layer writes there, so this holds for all that reuse the memory
        for tensor in out.values():
            tensor.zero_()
    return out


def _load(
    share: Share, out: dict[str, Tensor], pool: ThreadPoolExecutor, bar: Progress
) -> ExpertWeights:
    reader = Reader(share, out)
    in_file_order = sorted(
        range(len(share.experts)), key=lambda slot: share.place(share.experts[slot])
    )
    try:
        for _ in pool.map(reader.expert, in_file_order):
            bar.add(share.expert_nbytes)
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    input_scales = _input_scales(share, reader.faults) if share.static else {}
    biases = _biases(share, reader.faults)
    _raise(share.checkpoint, reader.faults)
    extras = {name: torch.stack([e[name] for e in reader.extras]) for name in reader.extras[0]}
    return ExpertWeights(
        **out,
        **_without_runs(share, extras),
        **biases,
        **input_scales,
        interleaved=bool(share.names.gate_up and share.names.interleaved),
    )


def _local_experts(problem: MoEProblem, experts: Sequence[int] | None) -> list[int]:
    if experts is None:
        return [problem.logical_expert(p) for p in problem.local_experts]
    if len(experts) != problem.num_local_experts:
        raise WeightsError(
            f"experts names {len(experts)}, want one for each of this rank's "
            f"{problem.num_local_experts} slots"
        )
    if wrong := [e for e in experts if not 0 <= e < problem.num_experts]:
        raise WeightsError(f"experts {wrong} are none of the {problem.num_experts} there are")
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


def _without_runs(share: Share, extras: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without any g_idx that only says what groups are anyway."""
    weight = share.problem.quant.weight
    for name in [name for name in extras if name.endswith("_g_idx")]:
        assert weight is not None
        if in_order(extras[name], weight.group[1]):
            del extras[name]
    return extras


def _biases(share: Share, faults: list[str]) -> dict[str, Tensor]:
    """w13_bias (L, 2I or I) and w2_bias (L, H), where the names have them."""
    names, found = share.names, {}
    of = {names.gate: names.gate_bias, names.up: names.up_bias, names.gate_up: names.gate_up_bias}
    w13 = [
        _padded(_stack(share, of[piece.template], slice(piece.rows.start, piece.rows.stop)), piece)
        for piece in share.w13
        if of[piece.template]
    ]
    if w13:
        found["w13_bias"] = torch.cat(w13, dim=1)
    if names.down_bias:
        found["w2_bias"] = _stack(share, names.down_bias, slice(None))
    for name, bias in found.items():
        if not is_finite(bias):
            faults.append(f"layer {share.layer}'s {name} holds values that are not finite")
    dtype = share.problem.dtype
    return {name: t.to(dtype) if share.dequantize else t for name, t in found.items()}


def _padded(bias: Tensor, piece: Piece) -> Tensor:
    return F.pad(bias, (0, piece.room - len(piece.rows)))


def _stack(share: Share, template: str, part: slice) -> Tensor:
    read, per_expert = share.checkpoint.read, "{expert}" in template
    rows = [
        read(share.name(template, e), part).unsqueeze(0)
        if per_expert
        else read(share.name(template, e), slice(e, e + 1), part)
        for e in share.experts
    ]
    return torch.cat(rows)


def _input_scales(share: Share, faults: list[str]) -> dict[str, Tensor]:
    """One static scale each for w13 and w2, the largest of all experts', so that every rank of
    expert parallelism quantizes alike."""
    suffix, every = share.format.parts["input_scale"].suffix, range(share.problem.num_experts)

    def scales(template: str) -> Tensor:
        experts = every if "{expert}" in template else (0,)
        names = [share.name(template, e, suffix) for e in experts]
        read = torch.cat([share.checkpoint.read(name).float().flatten() for name in names])
        if not bool((torch.isfinite(read) & (read > 0)).all()):
            faults.append(f"{stored(template, suffix)} is not finite and positive everywhere")
        return read

    w13 = [scales(template) for template in dict.fromkeys(p.template for p in share.w13)]
    for other in w13[1:]:
        apart = ((other - w13[0]).abs() > _AGREE * w13[0]).nonzero().flatten().tolist()
        for expert in apart:
            gate, up = (share.name(t, expert, suffix) for t in (share.names.gate, share.names.up))
            faults.append(
                f"{gate} is {float(w13[0][expert]):g} and {up} {float(other[expert]):g}: gate "
                "and up have one input"
            )
    return {"w13_input_scale": w13[0].max(), "w2_input_scale": scales(share.names.down).max()}


def _raise(checkpoint: Checkpoint, faults: Sequence[Any]) -> None:
    if faults := list(dict.fromkeys(faults)):
        shown = "; ".join(faults[:_SHOWN])
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise WeightsError(
            f"{checkpoint.path}: {len(faults)} tensor(s) or settings do not fit: {shown}{more}"
        )
