"""The interfaces of experts that take adapters (LoRA), and of experts that train them."""

from __future__ import annotations

from moekit.contract.interfaces import PermuteExpertsUnpermute
from moekit.contract.training import TrainableExperts


class AdapterExperts(PermuteExpertsUnpermute):
    """STANDARD experts that add the deltas of adapters. `ExpertsSpec.adapters` names the class.

    `apply` and `apply_unreduced` find two more things in calls of problems with ``adapters``:

        weights.adapters    the stack of S adapters, `Adapters`; None: compute the base alone
        tokens.adapter_ids  (R,) int32, the slot of each row, -1 for none

    With s = adapter_ids[r], they compute for each assignment of row r to expert e::

        h = W13 x + b13 + scaling[s] B13[s, e] (A13[s, e] x)   x as it arrived, dequantized
        y = W2 a + b2 + scaling[s] B2[s, e] (A2[s, e] a)       a = act(h), before the weighting

    If A and B of w13 or of w2 are missing, it has no delta. A row without an adapter, and a row
    whose delta is zero, have the bits that the same kernel gives them in a call without adapters.

    Slots hold any values in each call, ids name any slot in each row, and both may change between
    replays of a CUDA graph, so the host must decide nothing by their values. `workspace` and
    `transient_bytes` count the memory for ``problem.adapters``.
    """


class TrainableAdapterExperts(TrainableExperts, AdapterExperts):
    """Experts that train adapters over a frozen base. `ExpertsSpec.adapters_training` names it.

    ``Wanted.weights`` has names of `Adapters.tensors` only. Here g is the gradient of the output
    row, p the router weight, u = A13 x, v = A2 a, and s stands for scaling[s]::

        backward_input   q = W2' g + s A2' B2' g     the gradient of p is <q, a> + <g, b2>
                         dh = act'(h) p q            the gradient of x is the sum over k of
                                                     W13' dh + s A13' B13' dh
        backward_weight  of w2_b:  s p g v'          of w2_a:  s p (B2' g) a'
                         of w13_b: s dh u'           of w13_a: s (B13' dh) x'

    `backward_weight` writes sums over the rows of each slot and expert to ``into``, whose tensors
    are contiguous and have the full shapes, also where experts share a matrix. It writes zeros for
    slots and experts without rows.
    """
