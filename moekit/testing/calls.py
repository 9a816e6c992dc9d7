"""Call a kernel with poisoned memory and watched inputs, and through test dispatchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends.local import LocalBatchedDispatcher, LocalDispatcher, local_ids
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import Dispatched, PackedWeights, Quantizer, Routing, Unreduced
from moekit.contract.pending import Pending
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.discovery.registry import Registry, registry
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.problem.quant import WIRE_SCHEMES
from moekit.problem.weights import ExpertWeights
from moekit.testing.cases import Case, device_of, generator
from moekit.testing.diagnose import assert_close, assert_right
from moekit.testing.memory import PoisonedWorkspace, poison, poisoned_allocations

# The kit's variants of `local`, named by the form in which tokens reach the experts.
# Quantized before the "transfer", where the experts take that; int32 ids.
QUANTIZED_WIRE = "kit_quantized_wire"
# A per-tensor scale arrives as one per row, which differs by source.
ROW_SCALES = "kit_row_scales"
# Several rows for a token, with one or three columns of int32 ids. Ids and router weights are
# strided in both dimensions, by other strides each.
ONE_COLUMN, THREE_COLUMNS = "kit_one_column", "kit_three_columns"
# BATCHED: spare capacity, in a part of a buffer. STANDARD: spare rows, after `num_rows`.
SPARE_CAPACITY, SPARE_ROWS = "kit_spare_capacity", "kit_spare_rows"
# Takes the sum over K from experts that leave it to the dispatcher, as the variant of `torch` does.
SUMS_ITSELF, LEAVES_SUMS = "kit_sums_itself", "kit_leaves_sums"

Spec = TypeVar("Spec", DispatcherSpec, ExpertsSpec)

# Rows of a buffer before those that arrive, and spare rows of each expert and of a call.
_BEFORE, _SPARE, _SPARE_ROWS = 16, 5, 300


def check_quantized(x: Tensor, scale: Tensor | None, problem: MoEProblem) -> None:
    """Assert that quantized tokens (..., R, H) and their scale have the forms of `Dispatched`."""
    activation = problem.quant.activation
    assert activation is not None
    columns = problem.hidden_size // activation.codes.per_byte
    assert x.dtype == activation.torch_dtype, f"x is {x.dtype}, expected {activation.torch_dtype}"
    assert x.shape[-1] == columns, f"x has {x.shape[-1]} columns, expected {columns}"
    assert scale is not None and scale.dtype == torch.float32, "expected x_scale in float32"
    allowed = {(*x.shape[:-1], problem.scales_per_row)}
    if activation.per_tensor:
        allowed.add((1,) * x.dim())
    assert tuple(scale.shape) in allowed, f"x_scale is {tuple(scale.shape)}, expected {allowed}"


class QuantizedWire(LocalDispatcher):
    """Checks the form of quantized tokens, on which other dispatchers rely.

    The experts must not modify the tokens that arrive.
    """

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        tokens = super().prepare(x_TH, routing, quantize).result()
        if quantize is not None:
            check_quantized(tokens.x, tokens.x_scale, self.problem)
        watch = Watch(x=tokens.x, x_scale=tokens.x_scale)
        return Pending.ready(replace(tokens, handle=watch))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        dispatched.handle.check("the experts", "the dispatcher's")
        return super().finalize(y, dispatched, out_TH)


class RowScales(LocalDispatcher):
    """Quantizes two parts of the batch separately, as two ranks would, and sends row scales.

    A dynamic scale of the second part is four times as large as necessary, so that confusing the
    scales changes the result.
    """

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = local_ids(routing.topk_ids, self.problem)
        if quantize is None:
            return Pending.ready(Dispatched(x_TH, None, ids, routing.topk_weights))
        valid, parts = (ids >= 0).any(dim=1), []
        middle = x_TH.shape[0] // 2
        activation = self.problem.quant.activation
        assert activation is not None
        for rows in (slice(0, middle), slice(middle, None)):
            x, scale = quantize(x_TH[rows], valid[rows])
            if rows.start == middle and not activation.static:
                x, scale = (x.float() / 4).to(x.dtype), scale * 4
            parts.append((x, scale.expand(x.shape[0], -1)))
        x, scale = (torch.cat(column) for column in zip(*parts, strict=True))
        return Pending.ready(Dispatched(x, scale.contiguous(), ids, routing.topk_weights))


class OneColumn(LocalDispatcher):
    """Sends a row for each assignment, so that ids have one column, and sums over K itself."""

    columns = 1

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        tokens = super().prepare(x_TH, routing, quantize).result()
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        columns, times = self.columns, self._times

        def repeated(rows: Tensor) -> Tensor:
            return rows[:, None].expand(-1, times, -1).reshape(-1, rows.shape[1])

        def divided(t: Tensor, step: int) -> Tensor:
            whole = F.pad(t, (0, columns * times - t.shape[1]), value=-1).view(-1, columns, 1)
            apart = F.pad(whole, (0, step - 1), value=-1).flatten(1)
            return F.pad(apart, (0, 1), value=-1)[:, : step * columns : step]

        x, scale = repeated(tokens.x), tokens.x_scale
        ids, weights = divided(tokens.topk_ids, 2), divided(tokens.topk_weights, 3)
        if scale is not None:
            scale = scale if scale.shape[0] == 1 else repeated(scale)
        else:
            x = x.masked_fill((ids < 0).all(dim=1, keepdim=True), float("nan"))
        return Pending.ready(Dispatched(x, scale, ids, weights))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        total_TH = y.view(len(out_TH), self._times, -1).sum(dim=1, dtype=torch.float32)
        return Pending.ready(out_TH.copy_(total_TH))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens * self._times

    @property
    def _times(self) -> int:
        return -(-self.problem.top_k // self.columns)


class ThreeColumns(OneColumn):
    """Sends a row for three assignments of a token, or for the rest of them."""

    columns = 3


class SpareCapacity(LocalBatchedDispatcher):
    """Has more capacity than tokens, as dispatchers with room for all ranks' tokens do.

    Rows arrive behind others of the same buffer, and the experts must not modify them.
    """

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        tokens = super().prepare(x_TH, routing, quantize).result()
        L, C, H = tokens.x.shape
        buffer = x_TH.new_empty((_BEFORE + L * (C + _SPARE), H))
        x_LCH = buffer[_BEFORE:].view(L, C + _SPARE, H)
        x_LCH[:, :C] = tokens.x
        handle = tokens.handle, Watch(x=x_LCH, expert_num_tokens=tokens.expert_num_tokens)
        return Pending.ready(replace(tokens, x=x_LCH, handle=handle))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        handle, watch = dispatched.handle
        watch.check("the experts", "the dispatcher's")
        tokens = replace(dispatched, handle=handle)
        return super().finalize(y[:, : len(out_TH)].contiguous(), tokens, out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens + _SPARE


class SpareRows(LocalDispatcher):
    """A dispatcher with room for more rows than arrive. Spare rows and their weights are NaN."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        tokens = super().prepare(x_TH, routing, quantize).result()
        assert tokens.topk_ids is not None and tokens.topk_weights is not None

        given = (tokens.x, nan := float("nan")), (tokens.topk_ids, -1), (tokens.topk_weights, nan)
        x, ids, weights = (F.pad(t, (0, 0, 0, _SPARE_ROWS), value=value) for t, value in given)
        count = torch.full((1,), len(x_TH), dtype=torch.int32, device=x_TH.device)
        names = tokens.adapter_ids
        names = None if names is None else F.pad(names, (0, _SPARE_ROWS))  # any value
        return Pending.ready(Dispatched(x, None, ids, weights, num_rows=count, adapter_ids=names))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        return super().finalize(y[: len(out_TH)], dispatched, out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens + _SPARE_ROWS


class SumsItself(LocalDispatcher):
    """Checks rows that experts leave to it, and sums them. taken: how often they did."""

    taken = 0

    def takes_unreduced(self, dispatched: Dispatched) -> bool:
        return True

    def finalize(
        self, y: Tensor | Unreduced, dispatched: Dispatched, out_TH: Tensor
    ) -> Pending[Tensor]:
        if isinstance(y, Tensor):
            return super().finalize(y, dispatched, out_TH)
        self.taken += 1
        ids, weights = dispatched.topk_ids, dispatched.topk_weights
        assert ids is not None and weights is not None
        check_unreduced(y, ids, self.problem.hidden_size, self.problem.dtype)
        self.weight_and_reduce(y.rows_NH, ids, weights, out_TH, y.places_RK)
        return Pending.ready(out_TH)


def check_unreduced(given: Unreduced, ids_RK: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    """Assert that rows have the form that `Unreduced` states."""
    rows, places = given.rows_NH, given.places_RK
    assert rows.dtype == dtype, f"rows_NH is {rows.dtype}, expected {dtype}"
    assert rows.dim() == 2 and rows.shape[1] == hidden_size and rows.stride(1) == 1, (
        f"rows_NH is {tuple(rows.shape)} with strides {rows.stride()}, expected (N, {hidden_size}) "
        "with unit stride in H"
    )
    if places is None:
        assert len(rows) >= ids_RK.numel(), f"{len(rows)} rows for {ids_RK.numel()} assignments"
        return
    assert (
        places.dtype == torch.int32 and places.is_contiguous() and places.shape == ids_RK.shape
    ), (
        f"places_RK is {places.dtype} {tuple(places.shape)}, expected contiguous int32 "
        f"{tuple(ids_RK.shape)}"
    )
    used = places[ids_RK >= 0]
    assert bool(((used >= 0) & (used < len(rows))).all()), f"places_RK names no row of {len(rows)}"


def by_assignment(tokens: Dispatched) -> Dispatched:
    """Return STANDARD tokens with a row for each of the R * K' assignments, of weight 1.

    Experts that reduce return the rows of `Unreduced` for them.
    """
    ids, scale = tokens.topk_ids, tokens.x_scale
    assert ids is not None
    R, K = ids.shape
    if scale is not None and len(scale) == R:
        scale = scale.repeat_interleave(K, 0)
    ones = torch.ones(R * K, 1, dtype=torch.float32, device=ids.device)
    return Dispatched(tokens.x.repeat_interleave(K, 0), scale, ids.reshape(-1, 1), ones)


def spread_rows(y_NH: Tensor, ids_RK: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return 2 N rows that hold the rows of y anywhere, and their places (R, K) in int32.

    The other rows are NaN, and so are rows whose id is -1.
    """
    order = torch.randperm(2 * len(y_NH), generator=generator("places", key))
    places = order[: len(y_NH)].to(y_NH.device)
    rows = y_NH.new_full((len(order), y_NH.shape[1]), float("nan"))
    rows[places] = y_NH.masked_fill(ids_RK.reshape(-1, 1) < 0, float("nan"))
    return rows, places.view_as(ids_RK).masked_fill(ids_RK < 0, -(2**30)).int()


class LeavesSums(TorchExperts):
    """Leaves two of three calls' sums to the dispatcher, in other calls on other ranks.

    Rows lie anywhere among rows of NaN, and places without an expert are no rows. left: how many
    calls it left.
    """

    left, calls = 0, 0

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        self.calls += 1
        if (self.calls + self.problem.parallel.rank) % 3 == 0:
            return None
        self.left += 1
        ids, device = tokens.topk_ids, tokens.x.device
        assert ids is not None
        (R, K), H = ids.shape, self.problem.hidden_size
        y = torch.empty(R * K, H, dtype=self.problem.dtype, device=device)
        self.apply(y, by_assignment(tokens), weights, workspace)
        return Unreduced(*spread_rows(y, ids, self.calls))


def kit_registry(
    base: Registry | None = None, extra: Iterable[DispatcherSpec | ExpertsSpec] = ()
) -> Registry:
    """Return a copy of ``base`` (default: the process's) with the kit's and ``extra`` specs."""
    copy = (base or registry()).copy()
    local, batched = copy.dispatcher("local"), copy.dispatcher("batched_reference")
    leaves = _of_kit(copy.expert("torch"), LEAVES_SUMS, LeavesSums, batch_invariant=False)
    known = {"dispatcher": set(copy.dispatchers), "experts backend": set(copy.experts)}
    for spec in (*_dispatchers(local, batched), leaves, *extra):
        kind = ExpertsSpec.kind if spec.fused else spec.kind
        if spec.name not in known[kind]:
            known[kind].add(spec.name)
            copy.register(spec)
    return copy


def _of_kit(base: Spec, name: str, kind: type, **changes: Any) -> Spec:
    target = f"{__name__}:{kind.__name__}"
    return replace(base, name=name, target=target, priority=-1000, **changes)


@cache  # each test asks, and a spec checks itself when it is made
def _dispatchers(local: DispatcherSpec, batched: DispatcherSpec) -> tuple[DispatcherSpec, ...]:
    """Return the specs of the kit's dispatchers, made from the core's."""
    wire: dict[str, Any] = {"wire_schemes": WIRE_SCHEMES}
    rows = {**wire, "ids_dtype": "int32", "batch_invariant": False}
    spare: dict[str, Any] = {"wire_schemes": frozenset(), "batch_invariant": False}
    return (
        _of_kit(local, QUANTIZED_WIRE, QuantizedWire, **wire, ids_dtype="int32"),
        _of_kit(local, ROW_SCALES, RowScales, **wire, batch_invariant=False),
        _of_kit(local, ONE_COLUMN, OneColumn, **rows),
        _of_kit(local, THREE_COLUMNS, ThreeColumns, **rows),
        _of_kit(local, SUMS_ITSELF, SumsItself, batch_invariant=False),
        _of_kit(batched, SPARE_CAPACITY, SpareCapacity, **spare),
        _of_kit(local, SPARE_ROWS, SpareRows, **spare),
    )


# Rows of memory around a call's tensors: more than a tile of rows, which a kernel may overrun.
AROUND = 256


class Inputs:
    """Buffers that hold the tokens and routings of every call, as engines have.

    A call's tensors are contiguous, and begin behind other rows of their storage.
    """

    def __init__(self, problem: MoEProblem, most: int) -> None:
        def rows(columns: int, dtype: torch.dtype) -> Tensor:
            whole = torch.empty(AROUND + most, columns, dtype=dtype, device=device_of(problem))
            return poison(whole)[AROUND:]

        self._x = rows(problem.hidden_size, problem.dtype)
        self._weights = rows(problem.top_k, torch.float32)
        self._ids = rows(problem.top_k, torch.int64)

    def hold(self, case: Case) -> Case:
        """Return the same call with its tokens and routing in the buffers."""
        T, r = len(case.x), case.routing
        routing = Routing(self._weights[:T].copy_(r.topk_weights), self._ids[:T].copy_(r.topk_ids))
        return replace(case, x=self._x[:T].copy_(case.x), routing=routing)


class Watch:
    """Remembers the bits of tensors, to find out which were modified."""

    def __init__(self, **tensors: Tensor | None) -> None:
        self._tensors = {name: t for name, t in tensors.items() if t is not None}
        self._before = {name: bits(t).clone() for name, t in self._tensors.items()}

    def check(self, when: str, whose: str = "the caller's") -> None:
        changed = [n for n, t in self._tensors.items() if not torch.equal(bits(t), self._before[n])]
        assert not changed, f"{when} modified {whose} {', '.join(changed)}"


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which compare equal even where it holds NaN."""
    whole = tensor.detach().contiguous()  # also of one element with another stride
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def pack(kernel: ModularKernel, weights: ExpertWeights) -> PackedWeights:
    """Return ``kernel.pack(weights)``, and assert that the weights are unchanged."""
    watch = Watch(**weights.tensors())
    with unchanged_process():
        packed = kernel.pack(weights)
    watch.check("pack")
    return packed


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


# What a library may change for the whole process, how to read it, and how to set it.
_MATMUL = torch.backends.cuda.matmul
_State = tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...]
_STATE: _State = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("number of threads", torch.get_num_threads, torch.set_num_threads),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("float32 matmul precision", torch.get_float32_matmul_precision,
     torch.set_float32_matmul_precision),
    ("random numbers", torch.get_rng_state, torch.set_rng_state),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled,
     torch.use_deterministic_algorithms),
    ("rounding of small numbers to zero",
     lambda: not bool(torch.full((), 1e-39, device="cpu") / 2), torch.set_flush_denormal),
    ("allow_bf16_reduced_precision_reduction of CUDA's products",
     *_attribute(_MATMUL, "allow_bf16_reduced_precision_reduction")),
    ("allow_fp16_reduced_precision_reduction of CUDA's products",
     *_attribute(_MATMUL, "allow_fp16_reduced_precision_reduction")),
    ("use of oneDNN", *_attribute(torch.backends.mkldnn, "enabled")),
)  # fmt: skip
_STATE_OF_CUDA: _State = (
    ("current device", torch.cuda.current_device, torch.cuda.set_device),
    ("current stream", torch.cuda.current_stream, torch.cuda.set_stream),
    ("random numbers of the GPU", torch.cuda.get_rng_state, torch.cuda.set_rng_state),
)


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Assert that torch's process-wide state does not change, and restore it."""
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state = (*_STATE, *_STATE_OF_CUDA) if cuda else _STATE
    before = [get() for _, get, _ in state]
    yield
    changed = []
    for (name, get, restore), value in zip(state, before, strict=True):
        after = get()
        same = torch.equal(value, after) if isinstance(value, Tensor) else value == after
        if not same:
            restore(value)
            changed.append(name)
    assert not changed, f"the call changed torch's {', '.join(changed)} for the whole process"


@contextmanager
def defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Change torch's default dtype and device, as engines do while they load and run a model.

    Args:
        device: of the tensors. On the CPU, the default device is another one.
    """
    before = torch.get_default_dtype()
    other = torch.device("meta") if device.type == "cpu" else device
    torch.set_default_dtype(dtype)
    try:
        with other:
            yield
    except RuntimeError as error:
        raise AssertionError(
            f"failed while torch's default dtype was {dtype} and its default device {other}: name "
            f"the dtype and the device of every tensor that you make ({error})"
        ) from error
    finally:
        torch.set_default_dtype(before)


def call(
    kernel: ModularKernel, packed: PackedWeights, case: Case, *, out: Tensor | None = None
) -> Tensor:
    """Call the kernel with poisoned memory, and watch every tensor of the caller.

    The workspace, new allocations and the output are NaN before the call. x, routing, packed
    weights and torch's process-wide state must be bit-identical afterwards. The result must be
    ``out`` itself.

    Args:
        out: (T, H); default: a new tensor, behind which nothing may be written.
    """
    x, routing = case.x, case.routing
    watch = Watch(x=x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    held = {**packed.experts, **packed.shared}
    if case.adapters is not None:
        packed = replace(packed, adapters=case.adapters)
        held |= case.adapters.tensors()
    packed_watch = Watch(**held)
    guarded = PoisonedWorkspace()
    workspace, kernel.workspace = kernel.workspace, guarded
    behind = x.new_empty(0)
    if out is None:
        whole = poison(x.new_empty(len(x) + AROUND, x.shape[1]))
        out, behind = whole[: len(x)], whole[len(x) :]
    try:
        with unchanged_process(), poisoned_allocations():
            result = kernel(x, packed, routing, out=out)
    finally:
        kernel.workspace = workspace
    assert bool(torch.isnan(behind).all()), "the call wrote behind its output"
    assert result.data_ptr() == out.data_ptr() and result.shape == out.shape, (
        "the call did not return the `out` it was given"
    )
    guarded.check()
    watch.check("the call")
    packed_watch.check("the call")
    return result


def call_into_part(kernel: ModularKernel, packed: PackedWeights, case: Case) -> Tensor:
    """Do `call` with an output inside of larger memory, around which nothing may be written."""
    T, H = case.x.shape
    whole = poison(case.x.new_empty(T + 2 * AROUND, H + 16))
    given = whole[AROUND:-AROUND, 8:-8]
    out = call(kernel, packed, case, out=given).clone()
    given.fill_(float("nan"))
    assert bool(torch.isnan(whole).all()), "wrote outside the given output"
    return out


def check_graph(
    run: Callable[[Tensor, Routing, Tensor], object], made: Sequence[tuple[Case, Tensor]]
) -> None:
    """Capture ``run(x, routing, out)`` once, and replay it with every case.

    Args:
        made: (case, its (T, H) fp32 reference), all with the same T.
    """
    first = made[0][0]
    x, out = torch.zeros_like(first.x), torch.empty_like(first.x)
    routing = Routing(torch.ones_like(first.routing.topk_weights), first.routing.topk_ids.clone())
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(x, routing, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, routing, out)
    for index, (case, ref) in enumerate(made):
        x.copy_(case.x)
        routing.topk_ids.copy_(case.routing.topk_ids)
        routing.topk_weights.copy_(case.routing.topk_weights)
        poison(out)
        graph.replay()
        assert_close(out, ref, case.problem, f"replay {index}", case=case)


def check_call(kernel: ModularKernel, case: Case, packed: PackedWeights | None = None) -> Tensor:
    """Do `call`, and compare the output with the oracle."""
    out = call(kernel, packed or pack(kernel, case.weights), case)
    assert_right(out, case)
    return out
