"""Dispatchers without experts, over numbers of tokens on each rank (docs/bench.md)."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

from moekit.plugin import Dispatched, MoEProblem, PrepareAndFinalize, dequantize, quantize

from .cases import relative_error
from .ranks import Task, local_device, made_once
from .records import Result
from .timer import Prepared, Timer

# Each rank adds one rounding of its part, and the sum is rounded; quantization is not counted.
_BOUND = 2e-2


def measure_dispatch(problem: MoEProblem, task: Task) -> list[Result]:
    """Return this rank's measurements, in a list of one. Collective."""
    dispatcher = made_once(task, problem, "", lambda: task.spec.load()(task.spec, problem))
    return [_RoundTrips(dispatcher, task).measure()]


class _RoundTrips:
    """One rank's dispatcher and inputs."""

    def __init__(self, dispatcher: PrepareAndFinalize, task: Task) -> None:
        self.dispatcher, self.task, self.problem = dispatcher, task, dispatcher.problem
        self.device = local_device(self.problem.device.type)
        self.timer = Timer(self.device, ranks=True)
        self.graph_safe = task.spec.graph_safe
        made = task.inputs_of(self.problem.parallel.ep_rank, self.device)
        dtype = torch.int64 if task.spec.ids_dtype == "int64" else torch.int32
        self.inputs = [(x, replace(r, topk_ids=r.topk_ids.to(dtype))) for x, r in made]
        self.sent = [self._quantized(x) for x, _ in made]
        self.outs = [torch.empty_like(x) for x, _ in made]
        self.blank: dict[torch.Size, Tensor] = {}

    def __call__(self, index: int) -> None:
        self._combine(index, self._dispatch(index))

    def measure(self) -> Result:
        task = self.task
        error = max(self._error(index) for index in range(len(self.inputs)))
        indices = [(index,) for index in range(len(self.inputs))]
        prepared = Prepared(self, indices, self.device, timer=self.timer)
        timing = prepared.time(task.settings.replays)
        dispatch, combine = self._phases(timing.host_us or 0.0)
        return timing.judged(
            error,
            _BOUND,
            dispatch_us=statistics.median(dispatch),
            combine_us=statistics.median(combine),
            num_sms=self.dispatcher.num_sms,
            buffer_bytes=self.dispatcher.buffer_bytes(),
        )

    # -- the two phases -----------------------------------------------------------------------

    def _dispatch(self, index: int) -> Dispatched:
        (x, routing), (q, scale) = self.inputs[index], self.sent[index]
        quantizer = None if scale is None else lambda *_: (q, scale)
        return self.dispatcher.prepare(x, routing, quantizer).result()

    def _combine(self, index: int, tokens: Dispatched, y: Tensor | None = None) -> Tensor:
        y = self._output(tokens) if y is None else y
        return self.dispatcher.finalize(y, tokens, self.outs[index]).result()

    def _output(self, tokens: Dispatched) -> Tensor:
        """Return a tensor where experts would have written: the dispatcher's own, if it has one."""
        if (place := self.dispatcher.output(tokens)) is not None:
            return place
        shape = tokens.x.shape
        if shape not in self.blank:
            self.blank[shape] = torch.zeros(shape, dtype=self.problem.dtype, device=self.device)
        return self.blank[shape]

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        activation = self.problem.quant.activation
        if activation is None or self.problem.quant.name not in self.task.spec.wire_schemes:
            return x, None
        static = None
        if activation.static:
            static = torch.full((1, 1), 6.0 / activation.qmax, device=x.device)
        return quantize(x, activation, static)

    def _phases(self, host_us: float) -> tuple[list[float], list[float]]:
        """Return the microseconds of each dispatch and of each combine.

        A GPU starts when all round trips of a turn are enqueued. The host takes longer for these
        than for a long run, whose time for each round trip is ``host_us``.
        """
        timer, dispatch, combine = self.timer, list[float](), list[float]()
        for _ in range(self.task.settings.replays):
            timer.drain()
            timer.occupy(4 * host_us * len(self.inputs) + 200.0)
            marks = []
            for index in range(len(self.inputs)):
                start = timer.mark()
                tokens = self._dispatch(index)
                middle = timer.mark()
                self._combine(index, tokens)
                marks.append((start, middle, timer.mark()))
            timer.drain()
            dispatch += [timer.between(start, middle) for start, middle, _ in marks]
            combine += [timer.between(middle, end) for _, middle, end in marks]
        return dispatch, combine

    # -- the error -----------------------------------------------------------------------------

    def _error(self, index: int) -> float:
        """Return the relative error of a call whose experts return their input."""
        tokens = self._dispatch(index)
        x = self._dequantized(tokens.x, tokens.x_scale)
        if tokens.expert_num_tokens is not None:
            real = torch.arange(x.shape[1], device=x.device) < tokens.expert_num_tokens[:, None]
            y = torch.where(real[..., None], x, float("nan"))
        else:
            assert tokens.topk_ids is not None and tokens.topk_weights is not None
            used = tokens.topk_ids >= 0
            weights = torch.where(used, tokens.topk_weights, 0.0).sum(dim=1, keepdim=True)
            y = torch.where(used.any(dim=1, keepdim=True), x * weights, 0.0)
        self.outs[index].fill_(float("nan"))
        out = self._combine(index, tokens, y.to(self.problem.dtype))
        _, routing = self.inputs[index]
        want = self._dequantized(*self.sent[index]) * routing.topk_weights.sum(1, keepdim=True)
        return relative_error(out, torch.arange(out.shape[0], device=out.device), want)

    def _dequantized(self, x: Tensor, scale: Tensor | None) -> Tensor:
        activation = self.problem.quant.activation
        if scale is None or activation is None:
            return x.float()
        return dequantize(x, scale, activation)
