"""The interfaces of backends that train: a forward that saves, and a backward in two steps.

A layer's gradients flow through a kernel in the reverse of its call::

    grad_TH -> prepare_backward -> backward_input -> finalize_backward -> gradients of x and weights
                                   backward_weight, while rows travel home

Shape suffixes: T tokens on this rank, K top-k, H hidden size, R dispatched rows, L local experts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moekit.contract.interfaces import (
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
)
from moekit.contract.pending import Pending


@dataclass(frozen=True)
class Wanted:
    """The gradients that a backward is asked for.

    x: of the tokens. topk_weights: of the router weights. weights: names of the weights that
    require one, of w13, w2, w13_bias and w2_bias.
    """

    x: bool
    topk_weights: bool
    weights: frozenset[str]


@dataclass(frozen=True)
class InputGradients:
    """The gradients that travel home, from `TrainableExperts.backward_input`.

    x: (R, H) in the problem's dtype, summed over K', zero in rows without a local expert; None if
    it is not wanted.
    topk_weights: (R, K') float32, zero where the id is -1; None if it is not wanted.
    kept: tensors that `backward_weight` needs, if weights are wanted.
    """

    x: Tensor | None
    topk_weights: Tensor | None
    kept: tuple[Tensor, ...] = ()


class TrainableExperts(PermuteExpertsUnpermute):
    """STANDARD experts with a backward. They weight by the router and sum over K' themselves.

    `pack` copies no unquantized weights: the packed tensors are views of the parameters, under
    their names in `ExpertWeights`. Tokens always come unquantized.
    """

    @abstractmethod
    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        """Do as a reducing `apply`, and return what the backward needs besides its arguments."""

    @abstractmethod
    def backward_input(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:
        """Return the gradients that travel home.

        Args:
            grad_RH: (R, H) gradient of y, contiguous, in the problem's dtype. Rows without a local
                expert may hold anything.
            tokens, weights: of `forward`.
            saved: what `forward` returned. Read only, as the backward may run twice.
        """

    @abstractmethod
    def backward_weight(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        saved: list[Tensor],
        kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor],
        add: bool,
    ) -> None:
        """Write the weights' gradients, accumulated in fp32; experts without rows get zeros.

        Args:
            kept: of `InputGradients`.
            into: the wanted weights' gradients by name, in the problem's dtype or float32, in the
                shapes of the packed weights.
            add: add to what ``into`` holds, and do not overwrite it.
        """

    @abstractmethod
    def saved_bytes(self, rows: int) -> int:
        """Return the bytes of what `forward` returns for ``rows`` rows."""


class TrainableDispatcher(PrepareAndFinalize):
    """A STANDARD dispatcher that moves gradients by the map of the call that moved the tokens.

    What ``Dispatched.handle`` holds, and its tensors, stay valid until the backward has ended, also
    if other calls come between. The backward may run twice, or never. `abandon` also ends a
    backward whose experts failed, in place of `finalize_backward`.
    """

    @abstractmethod
    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """Send the gradient of the output to the ranks of the experts, as `prepare` sent x.

        Args:
            grad_TH: (T, H), contiguous, in the problem's dtype.

        Returns:
            (R, H): the gradient of each row of ``y`` in `finalize`.
        """

    @abstractmethod
    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        """Bring gradients home: the sums over the ranks that computed a part of them.

        Args:
            grad_RH: `InputGradients.x`. None on all ranks or on none.
            grad_RK: `InputGradients.topk_weights`. None on all ranks or on none.

        Returns:
            Gradients of x (T, H) in the problem's dtype, and of the router weights (T, K) float32.
        """
