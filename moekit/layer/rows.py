"""The arguments of one layer call, and its tokens as rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moekit.errors import InvalidInput
from moekit.layer.ranks import LayerRanks
from moekit.runtime.checks import check_tensor, check_tokens


class LayerInputs(NamedTuple):
    """The arguments of `FusedMoE.forward`."""

    x: Tensor
    router_logits: Tensor | None
    topk_weights: Tensor | None
    topk_ids: Tensor | None
    is_padding: Tensor | None
    max_tokens: int | None
    token_ids: Tensor | None = None


class TokenRows:
    """Flatten a call's tensors to rows and take this rank's share of them.

    Args:
        x: (..., H), the caller's tokens.
        hidden_size: H.
        max_tokens: The most tokens of any rank, if the caller knows it.
        ranks: The layer's ranks; under sequence parallelism each takes a share of the rows.

    Raises:
        InvalidInput: ``x`` has another shape, or more than ``max_tokens`` rows.
    """

    __slots__ = ("_flat", "_ranks", "_share", "_x", "num_tokens", "x_TH")

    def __init__(
        self, x: Tensor, hidden_size: int, max_tokens: int | None, ranks: LayerRanks
    ) -> None:
        check_tensor("x", x)
        if x.dim() < 2 or x.shape[-1] != hidden_size:
            raise InvalidInput(f"x must have shape (..., {hidden_size}) (got {tuple(x.shape)})")
        self._x, self._ranks = x, ranks
        self._flat = x.dim() == 2 and not ranks.splits
        rows = x if self._flat else x.flatten(0, -2)
        self.num_tokens = rows.shape[0]
        if max_tokens is not None and check_tokens(max_tokens, "max_tokens") < self.num_tokens:
            raise InvalidInput(
                f"max_tokens={max_tokens} is less than this rank's {self.num_tokens} tokens: pass "
                "the most tokens of any rank"
            )
        self._share = ranks.share(self.num_tokens)
        self.x_TH = rows[self._share] if ranks.splits else rows

    def take(self, name: str, tensor: Tensor, *width: int) -> Tensor:
        """Return the rows of ``tensor`` (..., *width); raise InvalidInput for another shape."""
        check_tensor(name, tensor)
        wanted = (*self._x.shape[:-1], *width)
        if tensor.shape != wanted:
            raise InvalidInput(
                f"{name} must have shape {wanted} for x {tuple(self._x.shape)} "
                f"(got {tuple(tensor.shape)})"
            )
        if self._flat:
            return tensor
        rows = tensor.flatten(0, self._x.dim() - 2)
        return rows[self._share] if self._ranks.splits else rows

    def restore(self, out_TH: Tensor) -> Tensor:
        """Return the outputs of these rows in the shape of x, gathered over the ranks."""
        if self._ranks.splits:
            out_TH = self._ranks.gather(out_TH, self.num_tokens)
        return out_TH if self._flat else out_TH.view(self._x.shape)
