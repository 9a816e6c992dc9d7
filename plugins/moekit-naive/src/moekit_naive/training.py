"""The backward of `naive`: gradients are gathered as tokens are, and summed back as outputs are."""

from __future__ import annotations

from torch import Tensor

from moekit.plugin import Dispatched, Pending, TrainableDispatcher

from .dispatcher import NaiveDispatcher, _Handle


class TrainableNaive(NaiveDispatcher, TrainableDispatcher):
    """Ranks that hold the same tokens pass the same gradient; the first of them sends it."""

    def prepare_backward(self, grad_TH: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        handle: _Handle = dispatched.handle
        sizes = handle.sizes
        grad_RH = grad_TH.new_empty((sizes.rows, grad_TH.shape[1]))
        with self._transfers, self._one_launch(sizes) as works:
            self._gather(grad_TH, grad_RH, sizes, works)

        def arrive(sent: Tensor = grad_TH) -> Tensor:  # held until it is sent
            with self._transfers:
                for work in works:
                    work.wait()
            return grad_RH

        return Pending(arrive)

    def finalize_backward(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None, dispatched: Dispatched
    ) -> Pending[tuple[Tensor | None, Tensor | None]]:
        tokens = dispatched.handle.sizes.out[self.group.rank()]

        def summed(rows: Tensor | None) -> Pending[Tensor | None]:
            if rows is None:
                return Pending.ready(None)
            out = rows.new_zeros((tokens, rows.shape[1]))
            return self.finalize(rows, dispatched, out)  # type: ignore[return-value]

        of_x, of_weights = summed(grad_RH), summed(grad_RK)
        return Pending(lambda: (of_x.result(), of_weights.result()))
