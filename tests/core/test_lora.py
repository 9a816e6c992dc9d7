"""Adapters of experts as data: layouts, what does not fit, and the stack in fixed memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from right_fused import acme_moe
from torch import Tensor

import moekit
from moekit import Dispatched, MoEProblem, registry
from moekit.backends.adapted_rows import AdaptedRows
from moekit.backends.sorted_rows import SortedRows
from moekit.backends.torch_training import TrainableTorch
from moekit.errors import (
    BackendBroken,
    InvalidInput,
    InvalidProblem,
    Unsupported,
    WeightsError,
)
from moekit.lora import Adapter, AdapterSlots, Stack, read, tensors_of
from moekit.plugin import Pending, Wanted
from moekit.testing import oracle, relative_error
from moekit.testing.adapters import random_adapters
from moekit.testing.cases import make_case, random_weights

MODULE = "model.layers.3.mlp.experts"
E, H, I, R = 5, 24, 16, 4
CONFIG = {"r": R, "lora_alpha": 8.0}


def problem(**changes: Any) -> MoEProblem:
    sizes = dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=I)
    given = dict(dtype=torch.float32, device="cpu", adapters=AdapterSlots(2, R, separate=True))
    return MoEProblem(**{**sizes, **given, **changes})


def adapter(groups: int = 1, shared: bool = False, **changes: Any) -> Adapter:
    draw = torch.Generator().manual_seed(groups)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    first = 1 if shared else E
    values = dict(w13_a=made(first, groups, R, H), w13_b=made(E, 2 * I, R), w2_a=made(E, R, I),
                  w2_b=made(first, H, R))  # fmt: skip
    return Adapter(**{"scaling": 2.0, **values, **changes})


def same(a: Adapter, b: Adapter) -> bool:
    """Return whether both give the same matrices B A to every expert."""
    wide = problem()
    held = [Stack(wide, "cpu") for _ in range(2)]
    for stack, each in zip(held, (a, b), strict=True):
        stack.load("x", each)
    left, right = (s.adapters.tensors() for s in held)
    return a.scaling == b.scaling and all(torch.equal(t, right[n]) for n, t in left.items())


# -- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", ["fused", "packed", "experts"])
def test_layouts_are_written_and_read(layout: str, groups: int, shared: bool) -> None:
    given = adapter(groups, shared)
    if (layout, groups) == ("fused", 2):
        with pytest.raises(WeightsError, match="gate and up have an A each"):
            tensors_of(given, MODULE, layout)
        return
    stored = tensors_of(given, MODULE, layout)
    assert all(t.is_contiguous() and n.startswith("base_model.model.") for n, t in stored.items())
    assert same(read(stored, CONFIG, problem(), MODULE), given)


def test_fused_layout_is_peft_s() -> None:
    """Experts vary slowest in A and fastest in B: W + B A by PEFT's own formula."""
    given = adapter()
    stored = tensors_of(given, MODULE)
    where = f"base_model.model.{MODULE}"
    for inner, name in ((".base_layer", "w13"), ("", "w2")):
        a, b = (stored[f"{where}{inner}.lora_{side}.weight"] for side in "AB")
        want = torch.einsum("ore,eri->eoi", b.reshape(len(b), R, E), a.reshape(E, R, -1))
        ours_a = given.w13_a[:, 0] if name == "w13" else given.w2_a
        assert torch.allclose(getattr(given, f"{name}_b") @ ours_a, want, atol=1e-5)


def test_transposed_parameters_are_told_by_shapes() -> None:
    """PEFT before 0.19.1 took the parameters (E, out, in) for (E, in, out)."""
    given, where = adapter(), f"base_model.model.{MODULE}"
    old = {}
    for inner, a, b in ((".base_layer", given.w13_a[:, 0], given.w13_b),
                        ("", given.w2_a, given.w2_b)):  # fmt: skip
        old[f"{where}{inner}.lora_A.weight"] = b.mT.reshape(-1, b.shape[1])
        old[f"{where}{inner}.lora_B.weight"] = a.permute(2, 1, 0).reshape(a.shape[2], -1)
    assert same(read(old, CONFIG, problem(), MODULE), given)


def test_square_parameters_need_the_version() -> None:
    square = problem(hidden_size=2 * I)
    only = replace(adapter(), w13_a=torch.randn(E, 1, R, 2 * I), w2_a=None, w2_b=None)
    stored = tensors_of(only, MODULE)
    with pytest.raises(WeightsError, match="state peft_version >= 0.19.1"):
        read(stored, CONFIG, square, MODULE)
    made = read(stored, {**CONFIG, "peft_version": "0.21.2"}, square, MODULE)
    assert torch.equal(made.w13_a, only.w13_a) and torch.equal(made.w13_b, only.w13_b)


def test_alternating_rows_and_names_of_mixtral() -> None:
    given = adapter(2)
    stored = tensors_of(given, MODULE, "experts")
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for long, name in short.items():
        stored = {n.replace(long, name): t for n, t in stored.items()}
    assert same(read(stored, CONFIG, problem(), MODULE), given)
    alternating = torch.stack(adapter().w13_b.chunk(2, dim=1), dim=2).flatten(1, 2)
    stored = tensors_of(replace(adapter(), w13_b=alternating), MODULE)
    assert same(read(stored, CONFIG, problem(), MODULE, interleaved=True), adapter())


@pytest.mark.parametrize(("stabilized", "scaling"), [(False, 2.0), (True, 4.0)])
def test_scaling(stabilized: bool, scaling: float) -> None:
    config = {**CONFIG, "use_rslora": stabilized}
    assert read(tensors_of(adapter(), MODULE), config, problem(), MODULE).scaling == scaling


# -- what does not fit ---------------------------------------------------------------------------


def _without(part: str) -> dict[str, Tensor]:
    return {n: t for n, t in tensors_of(adapter(2), MODULE, "experts").items() if part not in n}


def _with(name: str, of: str) -> dict[str, Tensor]:
    """Return the tensors of each expert, and others by ``name`` for those with ``of`` in theirs."""
    stored = _without("-")
    return {**stored, **{n.replace(of, name): t for n, t in stored.items() if of in n}}


FAULTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "another module": (
        lambda: tensors_of(adapter(), "model.layers.4.mlp.experts"), {}, {},
        "no tensor is for 'model.layers.3.mlp.experts', only for model.layers.4.mlp.experts",
    ),
    "another model": (
        lambda: tensors_of(adapter(), MODULE), {}, {"hidden_size": 40}, "is it of this model?",
    ),
    "another number of experts": (
        lambda: tensors_of(adapter(), MODULE), {}, {"num_experts": 7}, "expected .7 r, in.",
    ),
    "packed of another model": (
        lambda: tensors_of(adapter(), MODULE, "packed"), {}, {"hidden_size": 40},
        r"w13_a is \(5, 1, 4, 24\).*expected \(5 or 1, 1 or 2, r, 40\); w2_b",
    ),
    "missing experts": (
        lambda: _without("experts.3."), {}, {}, "lacks experts 3, and the layer has 5",
    ),
    "too many experts": (
        lambda: tensors_of(adapter(2), MODULE, "experts"), {}, {"num_experts": 4},
        "has 5 experts, and the layer has 4",
    ),
    "no B": (lambda: _without("2.gate_proj.lora_B"), {}, {}, "A or B is missing for 2.gate_proj"),
    "unknown names": (
        lambda: {n.replace("down", "odd"): t for n, t in _without("-").items()}, {}, {},
        "unknown names: 0.odd_proj",
    ),
    "two names": (lambda: _with("w2", "down_proj"), {}, {}, "the same matrices as 0.w2, 1.w2"),
    "gate twice": (lambda: _with("w13", "gate_proj"), {}, {}, "the same matrices as gate, up"),
    "packed and each": (
        lambda: {**_without("-"), **tensors_of(adapter(), MODULE, "packed")}, {}, {},
        "down has 6 experts|the same matrices as gate, up",
    ),
    "two adapters": (
        lambda: _with("lora_A.other.weight", "lora_A.weight"), {}, {},
        "experts.0.gate_proj has several matrices A",
    ),
    "more than A and B": (
        lambda: _with("lora_magnitude_vector", "lora_A"), {}, {},
        "unknown name: .*experts.0.gate_proj.lora_magnitude_vector",
    ),
    "another rank": (lambda: _without("-"), {"r": 8}, {}, "have rank 4, and the config says r=8"),
    "DoRA": (lambda: _without("-"), {"use_dora": True}, {}, "config has use_dora"),
    "alpha_pattern": (lambda: _without("-"), {"alpha_pattern": {"a": 1}}, {}, "alpha_pattern"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_files_that_do_not_fit(case: str) -> None:
    made, config, changes, says = FAULTS[case]
    with pytest.raises(WeightsError, match=says):
        read(made(), {**CONFIG, **config}, problem(**changes), MODULE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w2_b": None}, "w2 has A only"),
        ({"w2_b": torch.randn(E, H, 3)}, "A of rank 4, and B of rank 3"),
        ({"w13_a": torch.randn(E, 3, R, H)}, "3 groups"),
        ({"scaling": float("inf")}, "its scaling is inf"),
        ({"w13_b": torch.randn(E, I, R)}, r"expected \(5 or 1, 32, r\)"),
        (dict.fromkeys(("w13_a", "w13_b", "w2_a", "w2_b")), "it has no matrices"),
    ],
)
def test_adapters_that_do_not_fit(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        adapter(**change).check(problem())


# -- the stack -----------------------------------------------------------------------------------


def test_adapters_are_loaded_replaced_and_dropped_in_place() -> None:
    p = problem()
    kernel = moekit.compose(p)
    stack, case = Stack(p, "cpu"), make_case(p, 9)
    weights = stack.on(kernel.pack(case.weights))
    places = [t.data_ptr() for t in (*stack.adapters.tensors().values(), stack.adapters.scaling)]

    def check(names: list[str | None]) -> Tensor:
        routing = replace(case.routing, adapter_ids=stack.ids(names))
        out = kernel(case.x, weights, routing)
        want = oracle(case.x, case.weights, routing, p, stack.adapters)
        assert relative_error(out, want) < 1e-5
        return out

    assert stack.load("a", adapter()) == 0 and stack.load("b", adapter(2)) == 1
    first = check(["a", None, "b"] * 3)
    with pytest.raises(InvalidInput, match="all 2 slots are taken: drop one before 'c'"):
        stack.load("c", adapter())
    smaller = adapter(w13_a=None, w13_b=None, w2_a=torch.randn(E, 1, I), w2_b=torch.randn(E, H, 1))
    assert stack.load("a", smaller) == 0
    assert not torch.equal(check(["a", None, "b"] * 3)[0], first[0])
    ids = stack.ids(["a"] * 9)
    stack.drop("a")
    with pytest.raises(InvalidInput, match="name a slot that holds no adapter"):
        kernel(case.x, weights, replace(case.routing, adapter_ids=ids))
    unchecked = moekit.compose(p, checked=False)
    out = unchecked(case.x, weights, replace(case.routing, adapter_ids=ids))
    assert bool(out.isnan().all())  # never silently the base
    with pytest.raises(InvalidInput, match=r"no adapter 'a' \(loaded: \['b'\]\)"):
        stack.ids(["a"])
    assert stack.load("c", adapter()) == 0
    check(["c", "b", None] * 3)
    held = (*stack.adapters.tensors().values(), stack.adapters.scaling)
    assert [t.data_ptr() for t in held] == places


def test_too_large_a_rank_and_separate_matrices() -> None:
    stack = Stack(problem(adapters=AdapterSlots(1, 2)), "cpu")
    with pytest.raises(WeightsError, match="rank is 4, and there is room for 2.*an A each"):
        stack.load("x", adapter(2))
    assert not stack.slots


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e6, torch.float16)])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    """A kernel may multiply them by zeros, for tokens of other adapters."""
    stack, made = Stack(problem(dtype=dtype), "cpu"), adapter()
    assert made.w2_b is not None
    made.w2_b[-1, -1, -1] = value
    with pytest.raises(WeightsError, match=f"w2_b has NaN or infinite values as {dtype}"):
        stack.load("x", made)
    assert not stack.slots


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([0, 2, -1], dtype=torch.int32), r"adapter_ids span \[-1, 2\]"),
        (torch.tensor([0, -2, 0], dtype=torch.int32), r"adapter_ids span \[-2, 0\]"),
        (torch.tensor([0, 1, 0]), r"adapter_ids are \(3,\) torch.int64"),
        (torch.zeros(2, dtype=torch.int32), r"expected \(3,\) int32"),
        (None, "adapter_ids must name one of 2 adapters, or -1"),
    ],
)
def test_ids_that_are_wrong(ids: Tensor | None, says: str) -> None:
    p = problem()
    kernel, case = moekit.compose(p), make_case(p, 3)
    weights = replace(kernel.pack(case.weights), adapters=random_adapters(p))
    with pytest.raises(InvalidInput, match=says):
        kernel(case.x, weights, replace(case.routing, adapter_ids=ids))


def test_stacks_that_are_wrong() -> None:
    p = problem()
    kernel, case = moekit.compose(p), make_case(p, 3)
    packed, stack = kernel.pack(case.weights), random_adapters(p)
    routing = replace(case.routing, adapter_ids=torch.zeros(3, dtype=torch.int32))
    wrong = {
        "w2_a is .* expected": replace(stack, w2_a=stack.w2_a.half()),
        "w2_b has strides .* contiguous": replace(stack, w2_b=stack.w2_b.mT.contiguous().mT),
        "one is missing": replace(stack, w13_b=None),
        "scaling is": replace(stack, scaling=stack.scaling[:1]),
        "require a gradient": replace(stack, w2_b=stack.w2_b.clone().requires_grad_()),
    }
    for says, adapters in wrong.items():
        with pytest.raises(WeightsError, match=says):
            kernel(case.x, replace(packed, adapters=adapters), routing)
    with pytest.raises(WeightsError, match="but no adapters: pass Stack.on"):
        kernel(case.x, packed, routing)
    plain = moekit.compose(p.replace(adapters=None))
    for given, call in ((stack, case.routing), (None, routing)):
        with pytest.raises(WeightsError, match="the kernel was composed without"):
            plain(case.x, replace(plain.pack(case.weights), adapters=given), call)


def test_scaling_has_no_gradient() -> None:
    p = problem().replace(training=True)
    kernel, case = moekit.compose(p), make_case(p, 3)
    stack = random_adapters(p)
    stack.scaling.requires_grad_()
    with pytest.raises(WeightsError, match="scaling requires a gradient"):
        kernel(case.x, replace(kernel.pack(case.weights), adapters=stack), case.routing)


@pytest.mark.parametrize("top_k", [1, 2])
def test_dispatchers_that_reorder_rows_say_whose_they_are(top_k: int) -> None:
    p, known = problem(top_k=top_k), registry().copy()
    spec = acme_moe.moekit_dispatchers()[0]
    known.register(spec)
    case, adapters = make_case(p, 9), random_adapters(p)
    ids = torch.tensor([0, 1, -1] * 3, dtype=torch.int32)
    routing = replace(case.routing, adapter_ids=ids)
    kernel = moekit.compose(p, "acme_sorted", "torch", backends=known)
    weights = replace(kernel.pack(case.weights), adapters=adapters)
    want = oracle(case.x, case.weights, routing, p, adapters)
    assert relative_error(kernel(case.x, weights, routing), want) < 1e-5
    prepare = kernel.dispatcher.prepare
    kernel.dispatcher.prepare = lambda x, routing, quantize: Pending.ready(
        replace(prepare(x, routing, quantize).result(), adapter_ids=None)
    )
    with pytest.raises(BackendBroken, match="which adapter .LoRA. each row has: correct it"):
        kernel(case.x, weights, routing)


def test_what_takes_no_adapters_says_so() -> None:
    said = moekit.explain(problem()).reasons()
    assert "does not take adapters (LoRA)" in said["experts ktransformers"]
    assert any("no room for the ids" in r for r in said["dispatcher batched_reference"])
    trained = moekit.explain(problem(training=True)).reasons()
    assert any("does not take adapters (LoRA) of which" in r for r in trained["experts cutlass"])
    with pytest.raises(InvalidProblem, match="batch_invariant=True exclude each other"):
        problem(batch_invariant=True)
    with pytest.raises(InvalidProblem, match="at most 256"):
        AdapterSlots(1, 257)
    known = registry().copy()
    known.register(replace(registry().expert("torch"), name="other", adapters=None))
    for experts in ("ktransformers", "torch:4|other"):
        with pytest.raises(Unsupported, match="does not take adapters"):
            moekit.compose(problem(), experts=experts, backends=known)
    assert "2 adapters of rank 4" in repr(moekit.compose(problem()))


def test_weights_below_adapters_are_frozen() -> None:
    layer = moekit.FusedMoE(E, 2, H, I, params_dtype=torch.float32, device="cpu", trainable=True,
                            adapters=AdapterSlots(1, R))  # fmt: skip
    layer.load_weights(random_weights(layer.problem))
    layer.adapters.load("x", adapter())
    x, logits = torch.randn(6, H), torch.randn(6, E)
    with pytest.raises(WeightsError, match="w13, w2 require a gradient below adapters"):
        layer(x, logits)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    for matrix in layer.adapters.adapters.tensors().values():
        matrix.requires_grad_()
    layer(x, logits).pow(2).sum().backward()
    assert all(bool(t.grad.any()) for t in layer.adapters.adapters.tensors().values())


def test_adapters_do_not_migrate() -> None:
    from moekit.eplb import Rebalancer

    layer = moekit.FusedMoE(E, 2, H, I, params_dtype=torch.float32, device="cpu",
                            adapters=AdapterSlots(1, R))  # fmt: skip
    layer.load_weights(random_weights(layer.problem))
    with pytest.raises(Unsupported, match="adapters do not migrate"):
        Rebalancer.of([layer])


def test_a_stack_needs_room_in_the_problem() -> None:
    with pytest.raises(InvalidInput, match="the problem has no room"):
        Stack(problem(adapters=None), "cpu")


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_products_on_the_cpu(groups: int) -> None:
    """The GPU's code of the torch experts, whose grouped GEMM the CPU runs as well in bf16."""
    p = problem(dtype=torch.bfloat16, adapters=AdapterSlots(3, 8, separate=groups == 2))
    case, stack = make_case(p, 21, "masked"), random_adapters(p)
    slots = torch.arange(21, dtype=torch.int32) % 4 - 1
    tokens = Dispatched(case.x, None, case.routing.topk_ids, case.routing.topk_weights,
                        adapter_ids=slots)  # fmt: skip
    wanted = Wanted(True, True, frozenset(stack.tensors()))
    made = []
    for device in ("cpu", "sm90"):
        given = p.replace(device=device, training=True)
        experts = TrainableTorch(registry().expert("torch"), given)
        weights = replace(experts.pack(case.weights), adapters=stack)
        y, grad = torch.empty_like(case.x), torch.ones_like(case.x)
        saved = experts.forward(y, tokens, weights)
        found = experts.backward_input(grad, tokens, weights, saved, wanted)
        into = {n: torch.full(t.shape, torch.nan) for n, t in stack.tensors().items()}
        into["w2_b"] = into["w2_b"].bfloat16()
        experts.backward_weight(grad, tokens, saved, found.kept, into, False)
        made.append([y, found.x, found.topk_weights, *into.values()])
    assert AdaptedRows.of(
        tokens, weights, SortedRows.of(tokens.topk_ids, given), given
    ).rows.grouped
    for loops, grouped in zip(*made, strict=True):
        assert bool(grouped.isfinite().all())
        assert relative_error(grouped, loops.float()) < 2e-2
