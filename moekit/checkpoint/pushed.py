"""Load one rank's experts from tensors that a caller passes one by one, as engines' loaders do.

The caller passes a checkpoint's tensors, whole, in any order. `PushedExperts` takes this rank's
part of each and converts it as `load_experts` does, so that both give the same bits. Weights go
straight into their final place. Scales and the like are kept until their matrix is complete; so are
weights that cannot be converted without them.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from moekit.checkpoint.load import clear_padding, collect, loaded_shapes, local_experts
from moekit.checkpoint.names import per_expert
from moekit.checkpoint.read import Reader
from moekit.checkpoint.share import Piece, Share, fits
from moekit.checkpoint.tensors import Entry, Tensors, listed
from moekit.errors import WeightsError
from moekit.formats.format import BIAS, Format, Part
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.untrusted.arguments import shown


class _Given(NamedTuple):
    """One stored tensor of a push, and the physical expert it was pushed for."""

    part: Part
    physical: int
    tensor: Tensor


class PushedExperts:
    """The experts of one layer on one rank, from tensors that are pushed.

    A round of loading begins with the first `push` after construction or after `finish`, and needs
    every tensor of this rank exactly once. So call `finish` after the last tensor, further replicas
    included: a tensor that comes later begins a new round, and errors name it. Several threads may
    push; one at a time is served.

    Args:
        problem: The problem to load for.
        format: How the pushed tensors are stored; see `declared_format`.
        experts: The logical expert of each of this rank's L physical experts. Default: as the
            problem places them.
        dequantize: Convert weights to the problem's dtype, whose scheme must be "none".
        interleaved: Rows of pushed gate_up matrices ("w13") alternate between gate and up.
        transposed: Pushed stacks of all experts hold matrices as (in, out).
        device: Where the weights are put together.
        out: The weights of another loader of the same problem, to be loaded again in place.
        name: The layer's name, for errors.

    Attributes:
        out: w13 (L, 2I, H or H / 2) and w2 (L, H, I or I / 2), which pushing fills. Empty after
            `release`.

    Raises:
        WeightsError: The problem does not fit the format.
    """

    def __init__(
        self,
        problem: MoEProblem,
        format: Format,
        *,
        experts: Sequence[int] | None = None,
        dequantize: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        name: str = "experts",
        out: dict[str, Tensor] | None = None,
    ) -> None:
        self.problem, self.format, self.name = problem, format, name
        self.interleaved, self.transposed = interleaved, transposed
        local = local_experts(problem, experts)
        self.device = torch.device(device)
        self._held = Tensors(name)
        gate, up = ("w1", "w3") if problem.activation.gated else ("", "w1")  # the shards
        names = per_expert("experts", gate, up, "w2")
        self._share = Share(self._held, names, 0, problem, local, dequantize, format)
        if wrong := self._share.setting_fault():
            raise WeightsError(f"{name}: {wrong}")
        if not format.dtype:  # convert to the problem's dtype, as engines do
            self._share.dequantize = True
        wanted = self._share.wanted(sorted(set(self._share.experts)))
        self._wanted = dict.fromkeys(stored.name for stored in wanted)
        # Whether weights are placed as they come, without their scales or order.
        ordered = problem.parallel.tp_size == 1 or "g_idx" not in format.parts
        self._direct = not format.dtype or (ordered and not dequantize)
        # Where each weight goes, for all replicas of its expert.
        self._sites: dict[str, list[tuple[int, str, Piece]]] = defaultdict(list)
        for slot, which in itertools.product(range(len(local)), ("w13", "w2")):
            for piece in self._share.of(which):
                called = self._share.name(piece.template, local[slot], self.weight_suffix)
                self._sites[called].append((slot, which, piece))
        self._reader: Reader | None = None
        self._pushed: dict[str, int] = {}  # each name, and the physical expert it was pushed for
        self._lock = threading.RLock()
        self._converted = False  # whether all that was pushed is in `out` and in the reader
        self._finished = False  # whether a round has ended
        self.out: dict[str, Tensor] = {}
        if out is not None:
            self.out = out
        else:
            self.allocate()

    # -- names ------------------------------------------------------------------------------

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The names that tensors may have: "weight", "weight_scale", "bias" and so on."""
        biases = [BIAS.suffix] * self.problem.has_bias
        parts = [part.suffix for part in self.format.parts.values()]
        return tuple(dict.fromkeys([*parts, *self.format.ignored, *biases]))

    @property
    def weight_suffix(self) -> str:
        """The suffix of the tensor whose values are in `out`."""
        return self.format.weight.suffix

    def shards(self, which: str) -> tuple[str, ...]:
        """Return the shards that are pushed into "w13" or "w2"."""
        if which == "w2":
            return ("w2",)
        return ("w1", "w3", "w13") if self.problem.activation.gated else ("w1",)

    # -- storage ----------------------------------------------------------------------------

    def allocate(self) -> None:
        """Allocate what `release` freed of `out`."""
        weight = self.problem.quant.weight
        dtype = self.problem.dtype if weight is None else weight.torch_dtype
        for which, shape in loaded_shapes(self.problem).items():
            if which not in self.out:
                self.out[which] = torch.empty(shape, dtype=dtype, device=self.device)

    def release(self, *names: str) -> None:
        """Free "w13" or "w2" of `out`, and end the round; the next one allocates it again."""
        for which in names:
            self.out.pop(which, None)
        self._reader = None

    # -- a round of loading -----------------------------------------------------------------

    @property
    def experts(self) -> tuple[int, ...]:
        """The logical expert of each of this rank's physical experts."""
        return tuple(self._share.experts)

    @property
    def loading(self) -> bool:
        """Return whether a round of loading has begun and is not finished."""
        return self._reader is not None

    def lacking(self) -> str:
        """Say which tensors this round still needs, and which one began it; "" for none."""
        pushed = self._pushed if self.loading else {}
        if not (missing := [name for name in self._wanted if name not in pushed]):
            return ""
        first = next(iter(self._pushed), "") if self.loading and self._finished else ""
        began = (
            first and f"{first} came after a complete round of loading and began a new one, and "
        )
        return (
            f"{began}{len(missing)} of {len(self._wanted)} tensors of this rank were not loaded: "
            f"{listed(missing)}"
        )

    def _begin(self) -> Reader:
        if self._reader is None:
            self.allocate()
            clear_padding(self._share, self.out)
            self._pushed, self._converted = {}, False
            self._reader = Reader(self._share, self.out)
        return self._reader

    @torch.no_grad()
    def push(self, suffix: str, shard: str, expert: int, tensor: Tensor) -> bool:
        """Load one tensor, or one of all experts.

        Args:
            suffix: Which tensor of the matrix, one of `suffixes`.
            shard: "w1" (gate), "w3" (up), "w2" (down) or "w13" (gate and up in one tensor).
                Experts without a gate have "w1" and "w2".
            expert: The physical expert. It has no effect for a stack.
            tensor: The whole tensor as a checkpoint stores it, on any device, for one expert; or a
                stack for all experts, or for this rank's `experts` in their order. It is not kept.

        Returns:
            Whether this rank needs it.

        Raises:
            WeightsError: The tensor does not fit, or was pushed before in this round. It is not
                loaded, and the round goes on. (Wrong values show in `finish`.)
        """
        self._check(suffix, shard, expert, tensor)
        parts = (*self.format.parts.values(), BIAS)
        part = next((part for part in parts if part.suffix == suffix), None)
        if part is None:
            return int(expert) % self.problem.num_experts in self._share.experts
        given = [(shard, tensor)]
        if shard == "w13":
            halves = self._halves(suffix, part, tensor)
            given = list(zip(("w1", "w3"), halves, strict=True))
        needed: dict[str, _Given] = {}
        names = self._share.names
        templates = {"w1": names.gate or names.up, "w2": names.down, "w3": names.up}
        for each, half in given:
            for physical, logical, one in self._by_expert(suffix, part, each, expert, half):
                name = self._share.name(templates[each], logical, suffix)
                if name in self._wanted:  # all replicas of an expert have the same
                    needed.setdefault(name, _Given(part, physical, one))
        with self._lock:
            if new := {name: one for name, one in needed.items() if self._is_new(name, one)}:
                self._take(new)
        return bool(needed)

    def finish(self) -> ExpertWeights:
        """End the round: return the experts, on `device`, with w13 and w2 in `out`.

        Raises:
            WeightsError: Lists tensors that were not pushed, and the round goes on; or tensors with
                wrong values, and the layer must be loaded again.
        """
        with self._lock:
            if lacking := self.lacking():
                raise WeightsError(f"{self.name}: {lacking}; load them, then call this again")
            reader = self._begin()
            if not self._converted:
                self._convert(reader)
            self._reader, self._finished = None, True
            try:
                return collect(reader).to(self.device)
            finally:
                self._held.entries.clear()

    def _check(self, suffix: str, shard: str, expert: int, tensor: Tensor) -> None:
        known = [s for which in ("w13", "w2") for s in self.shards(which)]
        if shard not in known:
            gate = "" if self.problem.activation.gated else " (its experts have no gate)"
            raise WeightsError(
                f"{self.name}: shard_id={shown(shard)}: expected one of {', '.join(known)}{gate}"
            )
        if suffix not in self.suffixes:
            raise WeightsError(
                f"{self.name} has no tensors {suffix!r}: experts stored as {self.format} have "
                f"{', '.join(self.suffixes)}"
            )
        P = self.problem.num_physical_experts
        if isinstance(expert, bool) or not isinstance(expert, Integral) or not 0 <= expert < P:
            raise WeightsError(f"{self.name}: expert_id={shown(expert)}: expected 0..{P - 1}")
        dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        if not dense or tensor.is_meta or tensor.is_nested:
            raise WeightsError(
                f"{self.name}: expert {expert}'s {shard}.{suffix} is {shown(tensor)}, expected a "
                "dense tensor with values"
            )

    def _is_new(self, name: str, given: _Given) -> bool:
        """Return whether a needed tensor is still to be loaded in this round. Raises WeightsError
        if it was loaded before, and not for another replica of its expert."""
        before = self._pushed.get(name) if self.loading else None
        if before == given.physical:
            raise WeightsError(
                f"{self.name}: {name} was already loaded; finish this round of loading with "
                "process_weights_after_loading() before updating weights"
            )
        return before is None

    def _take(self, given: Mapping[str, _Given]) -> None:
        """Place or keep ``given``, and convert the layer when it is complete."""
        reader = self._begin()
        for name, one in given.items():
            if self._direct and one.part is self.format.weight:
                self._hold(name, one.tensor.detach())
                for site in self._sites[name]:
                    reader.place(*site)
                del self._held.entries[name]
            else:
                self._hold(name, one.tensor.detach().to("cpu", copy=True))
            self._pushed[name] = one.physical
        if len(self._pushed) == len(self._wanted):
            self._convert(reader)

    def _hold(self, name: str, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        self._held.entries[name] = Entry(self._held.path, 0, shape, tensor.dtype, lambda: tensor)

    def _convert(self, reader: Reader) -> None:
        """Read what is kept, but for input scales, whose largest `finish` finds."""
        for slot in range(len(self._share.experts)):
            if not self._direct:
                reader.expert(slot)
            else:
                for which in ("w13", "w2"):
                    reader.finish(slot, which)
        inputs = self.format.parts.get("input_scale", BIAS).suffix
        for name in [name for name in self._held.entries if not name.endswith(f".{inputs}")]:
            del self._held.entries[name]
        self._converted = True

    # -- tensors of several matrices ------------------------------------------------------------

    def _halves(self, suffix: str, part: Part, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Split a tensor of gate and up, of one expert or all, into one of each. Raises
        WeightsError if the shape does not hold gate and up."""
        axes, unit = part.axes, part.grid[0]
        if unit < 0 or axes == "K":  # gate and up have the same
            return tensor, tensor
        I = self.problem.intermediate_size
        after = len(axes) + len(part.tail) - axes.find("N")
        if self._flips(part, tensor):
            after = 1
        fitting = [d for d, n in enumerate(tensor.shape) if n * unit == 2 * I]
        # Dimensions of 1 may be left out, so the dimension may not be where the format has it.
        axis = tensor.dim() - after
        if axis not in fitting and len(fitting) == 1:
            axis = fitting[0]
        if axis not in fitting or I % unit or "N" not in axes or (self.interleaved and unit > 1):
            raise WeightsError(
                f"{self.name}: w13.{suffix} is {tuple(tensor.shape)}, expected gate and up of {I} "
                "neurons each; load them as w1 and w3 if an entry covers rows of both"
            )
        if self.interleaved:
            gate, up = torch.unflatten(tensor, axis, (-1, 2)).unbind(axis + 1)
        else:
            gate, up = tensor.chunk(2, dim=axis)
        return gate, up

    def _flips(self, part: Part, tensor: Tensor) -> bool:
        """Return whether a tensor is a stack of matrices (in, out)."""
        return self.transposed and tensor.dim() == 3 and not part.fixed

    def _by_expert(
        self, suffix: str, part: Part, shard: str, expert: int, tensor: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (physical expert, its logical expert, its tensor). Raises WeightsError if the shape
        fits neither one expert nor a stack."""
        p = self.problem
        n, k = (p.hidden_size, p.intermediate_size)[:: 1 if shard == "w2" else -1]
        shape = part.shape(n, k)
        what = f"{self.name}: {shard}.{suffix}"
        if tensor.dtype not in part.dtypes:
            allowed = " or ".join(map(str, part.dtypes))
            raise WeightsError(f"{what} of expert {expert} is {tensor.dtype}, expected {allowed}")
        if fits(tensor.shape, shape, part):
            yield expert, p.logical_expert(expert), tensor
            return
        held: dict[int, Sequence[tuple[int, int]]] = {
            count: [(e, p.logical_expert(e)) for e in range(count)]
            for count in (p.num_experts, p.num_physical_experts)
        }
        mine = list(zip(p.local_experts, self._share.experts, strict=True))
        held.setdefault(p.num_local_experts, mine)
        for stack in (tensor.mT, tensor) if self._flips(part, tensor) else (tensor,):
            if stack.dim() and len(stack) in held and fits(stack.shape[1:], shape, part):
                for ids, each in zip(held[len(stack)], stack.unbind(), strict=True):
                    yield *ids, each
                return
        hint = ""
        if tuple(tensor.shape[-2:]) == shape[::-1]:
            hint = "; transpose it"
            if tensor.dim() == 3:
                hint += ", or construct the layer with is_fused_checkpoint_transposed=True"
        elif p.parallel.tp_size > 1:
            hint = "; load the whole tensor, and each rank takes its part"
        one, many = str(shape), str((p.num_experts, *shape))
        if part.grid == (-1, -1):
            one, many = "one number", f"{p.num_experts} numbers"
        raise WeightsError(
            f"{what} of expert {expert} is {tuple(tensor.shape)}, expected {one} for one expert "
            f"or {many} for all{hint}"
        )
