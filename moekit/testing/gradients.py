"""The gradient kit: every gradient of a backend is compared with autograd of the fp32 oracle.

`GradientConformance` tests experts, `moekit.testing.gradient_ranks` dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.contract.training import TrainableExperts
from moekit.kernel import ModularKernel
from moekit.problem import DTYPES, MoEProblem
from moekit.problem.activation import ACTIVATIONS, CLAMPABLE, Activation
from moekit.problem.quant import SCHEMES
from moekit.problem.weights import ExpertWeights
from moekit.testing.base import OfAnotherClass, over, sizes_of
from moekit.testing.calls import Watch, same_bits
from moekit.testing.cases import (
    SEED_VARIABLE,
    SHARES,
    UNUSUAL,
    Case,
    case_of_counts,
    device_of,
    generator,
    make_case,
    random_weights,
    seed,
)  # fmt: skip
from moekit.testing.compare import Tolerance, beyond_bound, tolerance
from moekit.testing.diagnose import Draws, beyond_rounding
from moekit.testing.experts_base import ExpertsBase
from moekit.testing.invariance import rows_of
from moekit.testing.memory import beyond_stated, measure, most_memory, poisoned_allocations
from moekit.training.kernel import TrainableKernel

Gradients = dict[str, Tensor]

# The errors of rows, elements and means, in units of the bounds on outputs (seen: 3.13).
_WIDER = 4
# The elements of weights' gradients are sums of products of two values, and both may be large.
_WIDER_OF_PRODUCTS = 8

# What is unusual in a call -> its routing, its tokens (None: the usual number), and changes of the
# problem. Every call has biases if the backend declares them.
_CALLS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    **{name: (kind, None, changes) for name, (kind, changes) in UNUSUAL.items()},
    "random": ("random", None, {}),
    "hot_expert": ("hot", None, {}),
    "no_tokens": ("random", 0, {}),
    "one_token": ("random", 1, {}),
    "top_8": ("masked", None, {"num_experts": 9, "top_k": 8}),
    "share_of_experts": ("masked", None, {"parallel": SHARES["of experts"]}),
    "slice_of_experts": ("masked", None, {"parallel": SHARES["of I"]}),
    "many_rows": ("one_expert", 1500, {}),
}

# Forms of an incoming gradient (T, H). sum().backward() makes strides of 0.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape),
    "transposed": lambda t: t.T.contiguous().T,
    "sliced": lambda t: torch.stack((t, torch.full_like(t, 7)), dim=2)[:, :, 0],
}


# -- gradients of a call, and the right ones ---------------------------------------------------


def inputs_of(case: Case) -> Gradients:
    """Return what may require a gradient, by name: x, topk_weights, and adapters or weights."""
    held = case.weights if case.adapters is None else case.adapters
    return {"x": case.x, "topk_weights": case.routing.topk_weights, **held.tensors()}


def leaves(case: Case, wanted: Sequence[str] | None = None) -> Case:
    """Return the same call with copies of its tensors, of which the wanted require a gradient."""

    def leaf(name: str, t: Tensor) -> Tensor:
        copy = t.detach().clone() if t.is_contiguous() else t.detach()  # experts share adapters
        asked = copy.is_floating_point() if wanted is None else name in wanted
        return copy.requires_grad_(asked)

    made: dict[str, Any] = {name: leaf(name, t) for name, t in inputs_of(case).items()}
    x, topk_weights = made.pop("x"), made.pop("topk_weights")
    routing, held = replace(case.routing, topk_weights=topk_weights), "adapters"
    if case.adapters is None:
        held = "weights"
    return replace(case, x=x, routing=routing, **{held: replace(getattr(case, held), **made)})


def random_grad(case: Case, key: object = 0) -> Tensor:
    """Return a gradient of the output (T, H), with NaN for tokens without an expert."""
    made = torch.randn(case.x.shape, generator=generator("grad", key))
    made *= 0.5 + torch.rand(len(made), 1, generator=generator("sizes", key))
    made[(case.routing.topk_ids < 0).all(dim=1).cpu()] = float("nan")
    return made.to(case.problem.dtype).to(case.x.device)


def right_gradients(case: Case, grad: Tensor, **around: Any) -> Gradients:
    """Return the gradients of the oracle by autograd, in fp32. around: as for `Case.reference`.

    Quantized weights have none, and neither have weights under adapters. w2's bias has one on
    every rank of tensor parallelism, though only the first adds it.
    """
    problem, weights = case.problem.replace(dtype=torch.float32), case.weights
    frozen = problem.quant.weight is not None
    wide = replace(case, problem=problem, x=case.x.float(),
                   weights=weights if frozen else weights._map(Tensor.float),
                   adapters=case.adapters and case.adapters.to(torch.float32))  # fmt: skip
    given = leaves(wide, ("x", "topk_weights") if frozen and case.adapters is None else None)
    asked = {name: t for name, t in inputs_of(given).items() if t.requires_grad}
    with torch.enable_grad():
        if (b := given.weights.w2_bias) is not None and (p := problem.parallel).tp_rank:
            first = problem.replace(parallel=replace(p, tp_rank=0))
            zero = replace(given.weights, w2_bias=b - b.detach())
            given = replace(given, problem=first, weights=zero)
        out = given.reference(**around)
    if not out.requires_grad:  # no token has an expert
        return {name: torch.zeros_like(t) for name, t in asked.items()}
    made = torch.autograd.grad(out, list(asked.values()), grad.float(), materialize_grads=True)
    return dict(zip(asked, made, strict=True))


def call_of(kernel: ModularKernel, case: Case, **options: Any) -> Tensor:
    """Call the kernel with poisoned memory. Frozen experts are packed, and may have adapters."""
    weights: Any = case.weights
    if case.adapters is not None:
        weights = replace(weights, adapters=case.adapters)
    with poisoned_allocations():
        return kernel(case.x, weights, case.routing, **options)


def backward(out: Tensor, grad: Tensor | None = None, **options: Any) -> None:
    """Run a backward with poisoned memory."""
    with poisoned_allocations():
        torch.autograd.backward(out, grad, **options)


def found_gradients(case: Case) -> Gradients:
    """Return the gradients that a call's leaves have."""
    return {name: t.grad for name, t in inputs_of(case).items() if t.grad is not None}


def gradients(
    kernel: ModularKernel, case: Case, grad: Tensor, *, times: int = 1, **options: Any
) -> Gradients:
    """Return the gradients of a call and its backward, which runs ``times`` times, under poison.

    The caller's tensors must be unchanged afterwards.
    """
    watch = Watch(**inputs_of(case), topk_ids=case.routing.topk_ids, grad=grad)
    out = call_of(kernel, case, **options)
    for _ in range(times):
        backward(out, grad, retain_graph=times > 1)
    watch.check("the call and its backward")
    return found_gradients(case)


def differentiate(
    kernel: TrainableKernel,
    made: Sequence[tuple[Case, Tensor]],
    way: str,
    wanted: Sequence[str] | None = None,
) -> list[Gradients]:
    """Make calls and their backwards, and return the gradients of each.

    Args:
        made: each call, and the gradient of its output.
        way: first_first, last_first: all calls, and one without gradients, run before the first
            backward. twice: each backward runs twice. dropped: the first call has no backward.
            Otherwise each backward follows its call.
        wanted: what requires a gradient, by name. Default: everything.
    """
    given = [leaves(case, wanted) for case, _ in made]
    if way in ("first_first", "last_first"):
        outs = [call_of(kernel, case) for case in given]
        call_of(kernel, made[-1][0])
        for index in sorted(range(len(outs)), reverse=way == "last_first"):
            backward(outs[index], made[index][1])
    else:
        for index, (case, (_, grad)) in enumerate(zip(given, made, strict=True)):
            if way == "dropped" and not index:
                call_of(kernel, case)
            else:
                gradients(kernel, case, grad, times=2 if way == "twice" else 1)
    return [found_gradients(case) for case in given]


def kept_beyond_stated(kernel: TrainableKernel, case: Case, times: int = 1) -> str:
    """Say what a call without a backward leaves behind, or keeps beyond the statements, or "".

    It may keep what `saved_bytes` says (h and lists), local ids, and x and routing that moved. The
    least of so many ``times`` counts, as threads of a library may free late.
    """
    device, call = case.x.device, partial(kernel, case.x, case.weights, case.routing)
    kept = [call()]
    left = min(measure(device, call)[1] for _ in range(times))
    held = min(measure(device, lambda: kept.append(call()))[1] for _ in range(times))
    held -= kept[0].nbytes
    p, rows = case.problem, kernel.dispatcher.max_rows(len(case.x))
    x = rows * p.hidden_size * p.dtype.itemsize * kernel.dispatcher.spec.moves_tokens
    h, lists = rows * p.top_k * p.w13_rows * p.dtype.itemsize, 16 * rows * p.top_k
    saved = kernel.experts.saved_bytes(rows)
    if left > 0:
        return f"{left} bytes are left of a call whose output is gone"
    if saved > (most := h + h // 50 + lists + 16 * p.num_local_experts):
        return f"saved_bytes says {saved}, h and lists have {most} bytes"
    if held > (most := saved + lists + (x and x + x // 50 + lists)):
        return f"a call keeps {held} bytes, by saved_bytes and its tokens {most}"
    return ""


def fault(
    found: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    case: Case,
    right: Callable[..., Gradients] | None,
) -> str:
    """Describe the first gradient of a call that is wrong or missing, or return "".

    right: Returns ``want`` for a case like this one, also ``around`` its products. None: no errors
        are compared with draws of rounding errors.
    """
    for name, wanted in want.items():
        said = _complaint(name, found[name], wanted, case, right) if name in found else "is missing"
        if said:
            return f"the gradient of {name} {said}"
    return ""


def _complaint(
    name: str, found: Tensor, want: Tensor, case: Case, right: Callable[..., Gradients] | None
) -> str:
    dtype = torch.float32 if name == "topk_weights" else case.problem.dtype
    if found.shape != want.shape or found.dtype not in (dtype, torch.float32):
        return f"is {found.dtype} {tuple(found.shape)}, expected {dtype} {tuple(want.shape)}"
    if bad := found.numel() - int(found.isfinite().sum()):
        return f"is NaN or infinite in {bad} of {found.numel()} elements"
    if name == "topk_weights" and bool(found[case.routing.topk_ids < 0].any()):
        return "is not zero where the id is -1"
    of_adapters = case.adapters is not None and name not in ("x", "topk_weights")

    def rows(gradient: Tensor) -> Tensor:
        """Return a matrix with a row for each token or expert, or one for all router weights."""
        if name == "topk_weights":
            return gradient.view(1, -1)
        return gradient.flatten(0, 1).flatten(1) if of_adapters else gradient.flatten(1)

    found, want = rows(found).float(), rows(want).float()
    moved, wanted = found.any(dim=1), want.any(dim=1)
    if of_adapters and len(lost := (wanted & ~moved).nonzero()):
        return f"is zero for matrices {lost.flatten().tolist()}"
    if len(wrong := (moved & ~wanted).nonzero()) and name != "topk_weights":
        whose = "tokens without an expert" if name == "x" else "experts without tokens"
        return f"is not zero for {whose}: {wrong.flatten().tolist()}"
    compare = partial(beyond_bound, found, want, _bound(name, case.problem))
    if not (said := compare(rounding=None)) or right is None:
        return said
    draws = Draws(case, result=lambda case, **around: rows(right(case, **around)[name]))
    return beyond_rounding(compare, draws)


def _bound(name: str, problem: MoEProblem) -> Tolerance:
    """Return the bounds on outputs, all but the RMS's wider: silu's slope magnifies roundings."""
    bound = tolerance(problem, effective_tokens=1)
    more = {name: _WIDER * getattr(bound, name) for name in ("row", "scale", "offset")}
    wider = _WIDER if name in ("x", "topk_weights") else _WIDER_OF_PRODUCTS
    return bound._replace(**more, element=wider * bound.element)


def assert_right_gradients(
    found: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    case: Case,
    grad: Tensor | None,
    what: str = "the call",
) -> None:
    """Assert that all gradients are the oracle's, up to the bounds on outputs.

    grad: The gradient of the output; None if ``want`` is a sum over calls.
    """
    right = None if grad is None else partial(right_gradients, grad=grad)
    if said := fault(found, want, case, right):
        raise AssertionError(
            f"{what}: {said}\n  problem: {case.problem!r}\n  repeat with {SEED_VARIABLE}={seed()}"
        )


# -- cases --------------------------------------------------------------------------------------


def exact_case(problem: MoEProblem, num_tokens: int) -> Case:
    """Return a call whose h are multiples of 1/2, so that no rounding moves one across a limit.

    Many of them are at a limit of 2, and beyond it.
    """
    case, draw = make_case(problem, num_tokens, "masked"), generator("exact")

    def halves(t: Tensor, most: int) -> Tensor:
        made = torch.randint(-most, most + 1, t.shape, generator=draw) / 2
        return made.to(t.dtype).to(t.device)

    few = torch.rand(case.x.shape, generator=draw) < 12 / problem.hidden_size
    x = torch.where(few.to(case.x.device), 2 * halves(case.x, 1), 0).where(~case.x.isnan(), case.x)
    of_h = {n: t for n, t in case.weights.tensors().items() if n.startswith("w13")}
    made: dict[str, Any] = {n: halves(t, 1 if n == "w13" else 3) for n, t in of_h.items()}
    return replace(case, x=x, weights=replace(case.weights, **made))


class GradientConformance(OfAnotherClass, ExpertsBase):
    """The gradient kit for experts that declare ``training``. Subclass it with ``backend``.

    Unless a test says otherwise, x, the router weights and all parameters require gradients, new
    memory is NaN, and the rows of tokens without an expert are NaN in x and in the incoming
    gradient, as are the router weights of ids of -1.
    """

    _interface, _names_class, _wants = TrainableExperts, "training", {"training": True}

    def _biased(self, **changes: Any) -> MoEProblem:
        return self._problem({"has_bias": True}, {}, **changes)

    def _case(self, kind: str = "masked", num_tokens: int | None = None, **changes: Any) -> Case:
        tokens = self._T if num_tokens is None else min(num_tokens, self._most_tokens)
        return make_case(self._biased(**changes), tokens, kind).physical()

    @property
    def _most_tokens(self) -> int:
        return 40 if self._interpreted else 10**6

    def _trainable(self, problem: MoEProblem) -> TrainableKernel:
        kernel = self._compose(problem, "local")
        assert isinstance(kernel, TrainableKernel)
        return kernel

    def _check_case(self, case: Case, what: str = "the call") -> None:
        """Compare a call with the oracle, and a second one, under autocast, with it in bits."""
        kernel, grad = self._trainable(case.problem), random_grad(case)
        found = gradients(kernel, leaves(case), grad)
        assert_right_gradients(found, right_gradients(case, grad), case, grad, what)
        other = torch.float16 if case.problem.dtype != torch.float16 else torch.bfloat16
        with torch.autocast(case.x.device.type, other):
            again = gradients(kernel, leaves(case), grad)
        differ = [name for name, t in found.items() if not same_bits(t, again[name])]
        assert not differ, f"{what}, made twice, once under autocast: {differ} have other bits"

    # -- calls ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", _CALLS)
    def test_gradients(self, name: str) -> None:
        """Calls in which one thing is unusual, in the main dtype and in float32."""
        kind, num_tokens, changes = _CALLS[name]
        self._check_case(self._case(kind, num_tokens, **changes))
        if "float32" in self._spec().dtypes and not self._interpreted:
            exact = self._find_problem(**changes, dtype=torch.float32)
            if isinstance(exact, MoEProblem):
                self._check_case(self._case(kind, num_tokens, **changes, dtype=exact.dtype))

    @over("dtype", DTYPES)
    def test_dtype_of_gradients(self, dtype: str) -> None:
        self._check_case(self._case("masked", dtype=DTYPES[dtype]))

    @pytest.mark.parametrize("tile", [16, 64, 128])
    def test_gradients_of_rows_per_expert(self, tile: int) -> None:
        """Experts have 0, 1, tile - 1, tile and tile + 1 rows."""
        if 3 * tile > self._most_tokens + 16:
            self._skip("Triton's interpreter is slow")
        counts = [0, 1, tile - 1, tile, tile + 1, 0]
        self._check_case(case_of_counts(self._biased(num_experts=6, top_k=1), counts))

    @over("name", sorted(ACTIVATIONS))
    def test_gradient_of_activation(self, name: str) -> None:
        """With and without biases and a clamp, with numbers below, at and beyond the limit."""
        made = 0
        for limit in (None, 2.0) if name in CLAMPABLE else (None,):
            for bias in (False, True):
                changes = {"activation": Activation(name, limit=limit), "has_bias": bias}
                problem = self._find_problem(**changes)
                if isinstance(problem, MoEProblem):
                    tokens = min(4 * self._T, self._most_tokens)
                    self._check_case(exact_case(problem, tokens), f"{changes}")
                    made += 1
        if not made:
            self._skip(str(problem))

    @over("scheme", SCHEMES)
    def test_gradients_through_frozen_experts(self, scheme: str) -> None:
        """Packed experts of every scheme pass gradients to x and to the router weights."""
        case = make_case(self._problem(quant=scheme), self._T, "masked")
        kernel, grad = self._trainable(case.problem), random_grad(case)
        names, frozen = ("x", "topk_weights"), kernel.pack(case.weights)
        given = replace(leaves(case, names), weights=frozen)  # type: ignore[arg-type]
        found, right = gradients(kernel, given, grad), right_gradients(case, grad)
        assert_right_gradients(found, {n: right[n] for n in names}, case, grad)

    def test_wanted_gradients(self) -> None:
        """Every subset of the inputs may require gradients; the others get none."""
        case = self._case(num_tokens=9)
        kernel, grad = self._trainable(case.problem), random_grad(case)
        right, names = right_gradients(case, grad), list(inputs_of(case))
        subsets = chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1))
        for wanted in list(subsets)[:: 7 if self._interpreted else 1]:
            found, what = gradients(kernel, leaves(case, wanted), grad), f"wanted: {wanted}"
            assert not set(found) - set(wanted), f"{what}; found: {sorted(found)}"
            assert_right_gradients(found, {n: right[n] for n in wanted}, case, grad, what)

    # -- calls together ---------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["first_first", "last_first", "twice", *FORMS])
    def test_backwards(self, way: str) -> None:
        """Two layers' backwards run in other orders, twice, or on gradients of other forms."""
        problem, made = self._biased(), []
        for key, tokens in enumerate((self._T, self._T + 4)):
            case = make_case(problem, tokens, "masked", key, random_weights(problem, key))
            made.append((case, FORMS.get(way, torch.clone)(random_grad(case, key))))
        found = differentiate(self._trainable(problem), made, way)
        for index, (case, grad) in enumerate(made):
            right = right_gradients(case, grad)
            if way == "twice":
                right, grad = {name: 2 * t for name, t in right.items()}, 2 * grad
            assert_right_gradients(found[index], right, case, grad, f"layer {index}, {way}")

    @pytest.mark.parametrize("into", ["grad", "buffer", "float32_buffer"])
    def test_accumulation(self, into: str) -> None:
        """Three micro-batches add to ``.grad``, or by ``add_to`` to what a buffer holds."""
        problem = self._biased()
        kernel, weights = self._trainable(problem), random_weights(problem)
        shared = leaves(make_case(problem, 0, weights=weights)).weights
        begun, options = dict[str, Any](), dict[str, Any]()
        if into != "grad":
            dtype = torch.float32 if into == "float32_buffer" else problem.dtype
            begun = {n: torch.randn_like(t, dtype=dtype) for n, t in weights.tensors().items()}
            buffers = ExpertWeights(**{n: t.clone() for n, t in begun.items()})
            options["add_to"] = buffers
        total: Gradients = {n: t.float() for n, t in begun.items()}
        for key, tokens in enumerate((self._T, 3, self._T + 4)):
            case = make_case(problem, tokens, ("idle", "masked")[key % 2], key, weights)
            grad = random_grad(case, key)
            right = right_gradients(case, grad)
            given = replace(leaves(case), weights=shared)
            found = gradients(kernel, given, grad, **options)
            mine = {n: right.pop(n) for n in ("x", "topk_weights")}
            assert_right_gradients(found, mine, case, grad, f"micro-batch {key}")
            for name, part in right.items():
                total[name] = total[name] + part if name in total else part
        if into != "grad":
            assert not (set(found) & set(total)), "add_to was given, and .grad is set as well"
            found = buffers.tensors()
            assert all(t.dtype == begun[n].dtype for n, t in found.items())
        assert_right_gradients(found, total, case, None, "three micro-batches")

    def test_changed_in_place(self) -> None:
        """The backward raises if a parameter has changed, and never computes with a changed x."""
        case = self._case()
        kernel, grad = self._trainable(case.problem), random_grad(case)
        right = right_gradients(case, grad)
        for name in inputs_of(case):
            given = leaves(case)
            out = call_of(kernel, given)
            with torch.no_grad():
                inputs_of(given)[name].mul_(1.5)
            try:
                backward(out, grad)
            except RuntimeError as error:
                assert "inplace" in str(error), error
                continue
            assert name in ("x", "topk_weights"), f"{name} changed before the backward: no error"
            assert_right_gradients(found_gradients(given), right, case, grad, f"{name} has changed")

    def _rows_to_measure(self) -> tuple[TrainableKernel, Case]:
        case = leaves(self._case("hot", 64 if self._on_cpu else 1000, num_experts=8, top_k=4))
        return self._trainable(case.problem), case

    def test_memory_of_calls_without_backward(self) -> None:
        """A call keeps what `saved_bytes` says, at most h and lists, until its output is gone."""
        said = kept_beyond_stated(*self._rows_to_measure())
        assert not said, said

    def test_memory_of_steps(self) -> None:
        """The peak of a call and its backward is at most kernel.memory() and what they return."""
        kernel, case = self._rows_to_measure()
        grad, inputs = random_grad(case), list(inputs_of(case).values())

        def step() -> None:
            torch.autograd.grad(kernel(case.x, case.weights, case.routing), inputs, grad)

        step()  # libraries allocate at their first call
        returned = sum(t.nbytes for t in (case.x, *inputs))
        said = beyond_stated(kernel, len(case.x), step, returned)
        assert not said, f"{said}; state the rest in saved_bytes() or transient_bytes()"

    def test_offsets_beyond_int32(self) -> None:
        """h and the sorted rows have over 2 ** 31 elements: offsets of rows need 64 bits."""
        if self._on_cpu:
            self._skip("takes tens of GB and the time of a GPU")
        problem, num_tokens = self._biased(**sizes_of(16, 8, 2048, 1024)), 140_000
        needed = 2 * self._trainable(problem).memory(num_tokens).total  # and what is returned
        with most_memory(device_of(problem)) as free:
            if free < needed:
                self._skip(f"takes {needed / 1e9:.0f} GB, and {free / 1e9:.1f} GB are free")
            case, last = make_case(problem, num_tokens), slice(-64, None)
            kernel, grad, few = self._trainable(problem), random_grad(case), rows_of(case, last)
            grad[:-64] = 0  # so that the oracle needs the last tokens alone
            found = gradients(kernel, leaves(case), grad)
            found |= {name: found[name][last] for name in ("x", "topk_weights")}
            assert_right_gradients(found, right_gradients(few, grad[last]), few, grad[last])
