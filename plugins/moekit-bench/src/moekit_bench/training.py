"""Steps of training: forward and backward of the experts block, with every gradient checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moekit.plugin import Adapters, ExpertWeights, MoEProblem, Routing

from .cases import Case, relative_error, sampled_rows
from .internals import oracle
from .limits import bytes_per_expert
from .timer import Call, synchronize

_CHECKED_TOKENS, _CHECKED_EXPERTS = 32, 2
Gradients = Sequence[Tensor]


class Step:
    """A layer's forward and backward, as a call to time: (x, routing, the output's gradient) to the
    gradients of x, the router weights, and the weights or the adapters over them."""

    graph_safe = False  # users launch these steps one by one

    def __init__(self, layer: Call, weights: ExpertWeights) -> None:
        self.layer, self.adapters = layer, getattr(layer, "adapters", None)
        self.trained = _trained(self.adapters or weights)

    def __call__(self, x_TH: Tensor, routing: Routing, grad_TH: Tensor) -> Gradients:
        output, inputs = self._forward(x_TH, routing)
        return torch.autograd.grad(output, inputs, grad_TH)

    def _forward(self, x_TH: Tensor, routing: Routing) -> tuple[Tensor, list[Tensor]]:
        x, topk_weights = (t.detach().requires_grad_() for t in (x_TH, routing.topk_weights))
        output = self.layer(x, replace(routing, topk_weights=topk_weights))
        return output, [x, topk_weights, *self.trained]

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
        """Return the case of a step. Its products are three forwards' (frozen: two); it reads
        weights twice and writes their gradients, reads x and the output's gradient, writes the
        output and the gradient of x, and writes and reads h."""
        p, done, passes = case.problem, case.work, 3 if _trained(case.weights) else 2
        weights = passes * done.active_experts * bytes_per_expert(case.weights)
        rows = 4 * case.tokens * p.hidden_size + 2 * done.rows * p.w13_rows
        work = replace(done, flop=passes * done.flop, bytes=weights + rows * p.dtype.itemsize)
        made = [(x, routing, torch.randn_like(x)) for x, routing in case.inputs]
        return cls(**vars(case) | {"work": work, "inputs": made})

    def judge(self, call: Any) -> Callable[[Gradients], float]:
        """Return what takes the gradients of the first input, and returns the largest error of one
        of them against autograd of the fp32 oracle: of up to 32 tokens, and of the matrices of two
        experts."""
        adapters = getattr(call, "adapters", None)
        x, routing, grad = self.inputs_of(call)[0]
        tokens = sampled_rows(self.tokens, _CHECKED_TOKENS, x.device)
        experts = sampled_rows(self.problem.num_local_experts, _CHECKED_EXPERTS, x.device)
        chosen, held = routing.part(tokens, len(tokens)), self.weights.detach()
        wants = _gradients(self.problem, x[tokens], held, chosen, grad[tokens], adapters)[:2]
        of_each = [self._of_expert(expert, call) for expert in experts.tolist()]
        wants += [torch.cat(matrices) for matrices in zip(*of_each, strict=True)]
        rows = [tokens, tokens] + [experts] * len(wants[2:])

        def error_of(made: Gradients) -> float:
            by_expert = made[2:] if adapters is None else [t.transpose(0, 1) for t in made[2:]]
            return max(map(relative_error, [*made[:2], *by_expert], rows, wants))

        return error_of

    def _of_expert(self, expert: int, call: Any) -> list[Tensor]:
        """Return the gradients (1, ...) of an expert's tensors in fp32, as if it were alone: of its
        weights, or of its matrices of the adapters."""
        x, routing, grad = self.inputs_of(call)[0]
        row, slot = (routing.topk_ids == expert).nonzero(as_tuple=True)
        alone = self.problem.replace(num_experts=1, top_k=1, dtype=torch.float32)
        own, adapters = self.weights.detach().select([expert]), getattr(call, "adapters", None)
        if adapters is not None:
            mine = {name: _parameter(t[:, [expert]]) for name, t in adapters.tensors().items()}
            adapters = replace(adapters, **mine)
        elif _trained(self.weights):
            own = own._map(_parameter)
        topk_weights = routing.topk_weights[row, slot, None]
        ids = torch.zeros_like(topk_weights, dtype=torch.int32)
        chosen = replace(routing.part(row, len(row)), topk_weights=topk_weights, topk_ids=ids)
        made = _gradients(alone, x[row], own, chosen, grad[row], adapters)[2:]
        return made if adapters is None else [t.transpose(0, 1) for t in made]


def _trained(held: ExpertWeights | Adapters) -> list[Tensor]:
    return [t for t in held.tensors().values() if t.requires_grad]


def _parameter(value: Tensor) -> Tensor:
    return value.detach().float().requires_grad_()


def _gradients(
    problem: MoEProblem, x: Tensor, weights: ExpertWeights, routing: Routing, grad: Tensor,
    adapters: Adapters | None,
) -> list[Tensor]:  # fmt: skip
    """Return the oracle's gradients of x, the router weights, and of all else that requires one."""
    x, topk_weights = (t.float().requires_grad_() for t in (x, routing.topk_weights))
    output = oracle(x, weights, replace(routing, topk_weights=topk_weights), problem, adapters)
    inputs = [x, topk_weights, *_trained(adapters or weights)]
    if not output.requires_grad:  # no token has an expert
        return list(map(torch.zeros_like, inputs))
    return list(torch.autograd.grad(output, inputs, grad.float(), materialize_grads=True))
