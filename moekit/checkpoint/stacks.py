"""Split tensors that hold several matrices, as loaders push them, into one matrix's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moekit.checkpoint.share import fits
from moekit.errors import WeightsError
from moekit.formats.format import Part
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class Splitter:
    """Knows the shapes of a layer's tensors. See `PushedExperts` for the arguments."""

    problem: MoEProblem
    name: str
    experts: Sequence[int]
    interleaved: bool
    transposed: bool

    def halves(self, suffix: str, part: Part, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Split a tensor of gate and up, of one expert or all, into one of each.

        Raises:
            WeightsError: The shape does not hold gate and up.
        """
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

    def by_expert(
        self, suffix: str, part: Part, shard: str, expert: int, tensor: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (physical expert, its logical expert, its tensor).

        Raises:
            WeightsError: The shape fits neither one expert nor a stack.
        """
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
        mine = list(zip(p.local_experts, self.experts, strict=True))
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
