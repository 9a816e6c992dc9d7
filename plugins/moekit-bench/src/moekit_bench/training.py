"""Steps of training: forward and backward of the experts block, with every gradient checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moekit.plugin import ExpertWeights, MoEProblem, Routing

from .cases import Case, relative_error, sampled_rows
from .internals import oracle
from .limits import bytes_per_expert
from .timer import Call, synchronize

_CHECKED_TOKENS, _CHECKED_EXPERTS = 32, 2
Gradients = Sequence[Tensor]


class Step:
    """A layer's forward and backward, as a call to time: (x, routing, the output's gradient) to the
    gradients of x, the router weights and the weights."""

    graph_safe = False  # users launch these steps one by one

    def __init__(self, layer: Call, weights: ExpertWeights) -> None:
        self.layer, self.weights = layer, list(weights.tensors().values())

    def __call__(self, x_TH: Tensor, routing: Routing, grad_TH: Tensor) -> Gradients:
        output, inputs = self._forward(x_TH, routing)
        return torch.autograd.grad(output, inputs, grad_TH)

    def _forward(self, x_TH: Tensor, routing: Routing) -> tuple[Tensor, list[Tensor]]:
        x, topk_weights = (t.detach().requires_grad_() for t in (x_TH, routing.topk_weights))
        output = self.layer(x, Routing(topk_weights, routing.topk_ids))
        return output, [x, topk_weights, *self.weights]

    def memory(self, x_TH: Tensor, routing: Routing, grad_TH: Tensor) -> dict[str, int]:
        """Return a result's fields: the bytes that a call saves for its backward, and a step's peak
        with the gradients, above what was there before; none on the CPU."""
        if x_TH.device.type != "cuda":
            return {}
        synchronize(x_TH.device)
        before = torch.cuda.memory_allocated(x_TH.device)
        torch.cuda.reset_peak_memory_stats(x_TH.device)
        output, inputs = self._forward(x_TH, routing)
        saved = torch.cuda.memory_allocated(x_TH.device) - before - output.nbytes
        torch.autograd.grad(output, inputs, grad_TH)
        peak = torch.cuda.max_memory_allocated(x_TH.device) - before
        return {"saved_bytes": saved, "peak_bytes": peak}


@dataclass(frozen=True)
class TrainingCase(Case):
    """A case whose inputs include the gradient of the output."""

    @classmethod
    def of(cls, case: Case) -> TrainingCase:
        """Return the case of a step. Its products are three forwards'; it reads weights twice and
        writes their gradients, reads x and the output's gradient, writes the output and the
        gradient of x, and writes and reads h."""
        p, done = case.problem, case.work
        weights = 3 * done.active_experts * bytes_per_expert(case.weights)
        rows = 4 * case.tokens * p.hidden_size + 2 * done.rows * p.w13_rows
        work = replace(done, flop=3 * done.flop, bytes=weights + rows * p.dtype.itemsize)
        made = [(x, routing, torch.randn_like(x)) for x, routing in case.inputs]
        return cls(**vars(case) | {"work": work, "inputs": made})

    def judge(self) -> Callable[[Gradients], float]:
        """Return what takes the gradients of the first input, and returns the largest error of one
        of them against autograd of the fp32 oracle: of up to 32 tokens, and of the matrices of two
        experts."""
        x, routing, grad = self.inputs[0]
        tokens = sampled_rows(self.tokens, _CHECKED_TOKENS, x.device)
        experts = sampled_rows(self.problem.num_local_experts, _CHECKED_EXPERTS, x.device)
        chosen = Routing(routing.topk_weights[tokens], routing.topk_ids[tokens])
        held = self.weights._map(torch.Tensor.detach)
        wants = _gradients(self.problem, x[tokens], held, chosen, grad[tokens])
        of_each = [self._of_expert(expert) for expert in experts.tolist()]
        wants += [torch.cat(matrices) for matrices in zip(*of_each, strict=True)]
        rows = [tokens, tokens] + [experts] * len(held.tensors())
        return lambda made: max(map(relative_error, made, rows, wants))

    def _of_expert(self, expert: int) -> list[Tensor]:
        """Return the gradients (1, ...) of an expert's tensors in fp32, as if it were alone."""
        x, routing, grad = self.inputs[0]
        row, slot = (routing.topk_ids == expert).nonzero(as_tuple=True)
        alone = self.problem.replace(num_experts=1, top_k=1, dtype=torch.float32)
        own = self.weights.select([expert])._map(lambda t: t.detach().float().requires_grad_())
        topk_weights = routing.topk_weights[row, slot, None]
        chosen = Routing(topk_weights, torch.zeros_like(topk_weights, dtype=torch.int32))
        return _gradients(alone, x[row], own, chosen, grad[row])[2:]


def _gradients(
    problem: MoEProblem, x: Tensor, weights: ExpertWeights, routing: Routing, grad: Tensor
) -> list[Tensor]:
    """Return the oracle's gradients of x, the router weights, and weights that require one."""
    x, topk_weights = (t.float().requires_grad_() for t in (x, routing.topk_weights))
    output = oracle(x, weights, Routing(topk_weights, routing.topk_ids), problem)
    inputs = [x, topk_weights, *(t for t in weights.tensors().values() if t.requires_grad)]
    if not output.requires_grad:  # no token has an expert
        return list(map(torch.zeros_like, inputs))
    return list(torch.autograd.grad(output, inputs, grad.float(), materialize_grads=True))
