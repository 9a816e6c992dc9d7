"""Composition: what a user may pass, what is refused, who owns which memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

import moekit
from moekit import ExpertWeights, MoEProblem, Pending, Routing, Workspace
from moekit.backends.local import LocalDispatcher
from moekit.backends.reference import oracle
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import BufferSpec
from moekit.contract.sums import Sums
from moekit.errors import (
    CapacityExceeded,
    InvalidInput,
    MoekitError,
    Unsupported,
    WeightsError,
)
from moekit.selection.composite import composite
from moekit.testing import assert_close, relative_error
from moekit.testing.calls import SUMS_ITSELF, kit_registry
from moekit.testing.cases import make_case

T, K, E, H, I = 9, 2, 4, 64, 48
PROBLEM = MoEProblem(
    num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype=torch.float32, device="cpu"
)


def weights(problem: MoEProblem = PROBLEM) -> ExpertWeights:
    p = problem
    return ExpertWeights(
        torch.randn(p.num_local_experts, p.w13_rows, p.hidden_size, dtype=p.dtype) / 8,
        torch.randn(p.num_local_experts, p.hidden_size, p.local_intermediate_size, dtype=p.dtype)
        / 8,
    )


def tokens(n: int = T) -> tuple[torch.Tensor, Routing]:
    return torch.randn(n, H), moekit.route(torch.randn(n, E), K)


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_out_and_shared() -> None:
    kernel, w = moekit.compose(PROBLEM, experts="torch"), weights()
    packed = kernel.pack(w)
    x, routing = tokens()
    out = torch.full_like(x, float("nan"))
    assert kernel(x, packed, routing, out=out) is out
    want = oracle(x, w, routing, PROBLEM)
    assert rms(out, want) < 1e-5
    strided = torch.full((T, 2 * H), float("nan"))[:, ::2]
    kernel(x, packed, routing, out=strided)
    assert rms(strided, want) < 1e-5
    both = kernel(x, packed, routing, shared=lambda x: 3 * x)
    assert rms(both, want + 3 * x) < 1e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, r: (x[:, :-1], r), r"x has shape \(9, 63\), expected \(T, 64\)"),
        (lambda x, r: (x.bfloat16(), r), "x is torch.bfloat16, expected torch"),
        (lambda x, r: (x, replace(r, topk_ids=r.topk_ids[:-1])), r"topk_ids has shape \(8, 2\)"),
        (lambda x, r: (x, replace(r, topk_weights=r.topk_weights[:, :1])), "topk_weights has sh"),
        (lambda x, r: (x, replace(r, topk_ids=r.topk_ids.float())), "expected int32 or int64"),
        (lambda x, r: (x, replace(r, topk_weights=r.topk_weights.half())), "expected float32"),
        (lambda x, r: (x, replace(r, topk_ids=r.topk_ids + E)), r"topk_ids span .*0\.\.3"),
        (lambda x, r: (x, replace(r, topk_ids=r.topk_ids - 5)), "topk_ids span"),
        (lambda x, r: (x, replace(r, topk_weights=r.topk_weights / 0)), "NaN or infinity"),
        (lambda x, r: (x.to("meta"), r), "on cpu, x on meta"),
    ],
)
def test_bad_calls_name_the_value_and_change_nothing(change, said: str) -> None:
    kernel = moekit.compose(PROBLEM)
    packed = kernel.pack(weights())
    x, routing = tokens()
    bad_x, bad_routing = change(x, routing)
    before = x.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    with pytest.raises(InvalidInput, match=said):
        kernel(bad_x, packed, bad_routing)
    after = x, routing.topk_ids, routing.topk_weights
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert kernel(x, packed, routing).isfinite().all()


def test_bad_out_and_foreign_weights() -> None:
    kernel = moekit.compose(PROBLEM, experts="torch")
    packed = kernel.pack(weights())
    x, routing = tokens()
    with pytest.raises(InvalidInput, match="shares memory"):
        kernel(x, packed, routing, out=x)
    rows = torch.randn(T + 1, H)
    with pytest.raises(InvalidInput, match="shares memory"):
        kernel(rows[:-1], packed, routing, out=rows[1:])
    with pytest.raises(InvalidInput, match="out shares memory with x, the routing or"):
        kernel(x, packed, routing, out=packed["w2"].view(-1)[: T * H].view(T, H))
    drawn = torch.rand(T, H)
    given = moekit.Routing(drawn.view(-1)[: T * K].view(T, K), routing.topk_ids)
    with pytest.raises(InvalidInput, match="out shares memory"):
        kernel(x, packed, given, out=drawn)
    both = torch.randn(2 * T, H)  # one allocation, two halves: fine
    kernel(both[:T], packed, routing, out=both[T:])
    with pytest.raises(InvalidInput, match="expected .*float32"):
        kernel(x, packed, routing, out=x.double())
    other = moekit.compose(PROBLEM, experts="reference").pack(weights())
    with pytest.raises(WeightsError, match="packed for 'reference', this kernel runs 'torch'"):
        kernel(x, other, routing)


def test_weights_of_another_problem() -> None:
    """Same backend, so only what they were packed for tells; tokens may be limited otherwise."""
    x, routing = tokens()
    packed = moekit.compose(PROBLEM, experts="torch").pack(weights())
    for change, said in (
        ({"num_experts": 2 * E}, f"num_local_experts={E}, not {2 * E}"),
        ({"intermediate_size": I // 2}, f"local_intermediate_size={I}, not {I // 2}"),
        ({"quant": "fp8_channel_token"}, "scheme='none', not 'fp8_channel_token'"),
        ({"has_bias": True}, "has_bias=False, not True"),
    ):
        other = moekit.compose(PROBLEM.replace(**change), experts="torch")
        with pytest.raises(WeightsError, match=said):
            other(x, packed, routing)
    small = moekit.compose(PROBLEM.replace(max_num_tokens=T), experts="torch")
    assert torch.isfinite(small(x, packed, routing)).all()


def test_forgotten_steps_are_named() -> None:
    kernel, w = moekit.compose(PROBLEM, experts="torch"), weights()
    x, routing = tokens()
    with pytest.raises(WeightsError, match="are ExpertWeights.*pack them with this kernel"):
        kernel(x, w, routing)
    packed = kernel.pack(w)
    for shared, said in (
        (lambda x: x[:1], r"returned \(1, 64\)"),
        (lambda x: x.double(), "float64"),
    ):
        with pytest.raises(InvalidInput, match=said):
            kernel(x, packed, routing, shared=shared)


def test_weights_that_require_a_gradient_are_packed_only_without_gradients() -> None:
    w = weights()
    parameters = ExpertWeights(torch.nn.Parameter(w.w13), torch.nn.Parameter(w.w2))
    x, routing = tokens()
    kernel = moekit.compose(PROBLEM, experts="torch")
    with pytest.raises(WeightsError, match=r"w13, w2 require a gradient.*pass weights.detach\(\)"):
        kernel.pack(parameters)
    with pytest.raises(WeightsError, match="the weights w2 require a gradient"):
        kernel.pack(ExpertWeights(w.w13, parameters.w2))
    expected = kernel(x, kernel.pack(w), routing)
    with torch.no_grad():
        packed = kernel.pack(parameters)
    for made in (packed, kernel.pack(parameters.detach())):
        assert torch.equal(kernel(x, made, routing), expected)
        assert not any(t.requires_grad for t in made.experts.values())
    assert parameters.w13.requires_grad


def test_capacity() -> None:
    kernel = moekit.compose(PROBLEM.replace(max_num_tokens=4))
    packed = kernel.pack(weights())
    with pytest.raises(CapacityExceeded, match="9 tokens, but max_num_tokens=4"):
        kernel(tokens()[0], packed, tokens()[1])


def test_results_travel_while_the_next_experts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """start, start, run, run, result, result: nothing is waited for before its time, or twice."""
    kernel, w, log = moekit.compose(PROBLEM, experts="torch"), weights(), []
    packed, calls = kernel.pack(w), [tokens(n) for n in (5, 7)]

    def logging(name: str, owner: object, waits: bool) -> None:
        inner = getattr(owner, name)

        def logged(x, *args):
            log.append((name, len(x)))
            made = inner(x, *args)
            return (
                Pending(lambda: log.append((f"{name}d", len(x))) or made.result())
                if waits
                else made
            )

        monkeypatch.setattr(owner, name, logged)

    logging("prepare", kernel.dispatcher, True)
    logging("apply", kernel.experts, False)
    logging("finalize", kernel.dispatcher, True)
    first, second = [kernel.start(x, packed, routing) for x, routing in calls]
    first.run()
    first.run()
    second.run()
    outs = [call.result() for call in (first, second, first)]
    assert log == [
        ("prepare", 5), ("prepare", 7),
        ("prepared", 5), ("apply", 5), ("finalize", 5),
        ("prepared", 7), ("apply", 7), ("finalize", 7),
        ("finalized", 5), ("finalized", 7),
    ]  # fmt: skip
    assert outs[2] is outs[0]
    for out, (x, routing) in zip(outs, calls, strict=False):
        torch.testing.assert_close(out, oracle(x, w, routing, PROBLEM))


def test_a_call_that_failed_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, runs = moekit.compose(PROBLEM, experts="torch"), []
    packed, (x, routing) = kernel.pack(weights()), tokens()
    started = kernel.start(x, packed, routing)
    with monkeypatch.context() as broken:
        broken.setattr(kernel.experts, "apply", lambda *args: runs.append(1) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            started.run()
    for step in (started.run, started.result):
        with pytest.raises(MoekitError, match="failed before, start another: ZeroDivisionError"):
            step()
    assert runs == [1] and kernel(x, packed, routing).isfinite().all()


def test_workspace_is_one_arena_that_grows() -> None:
    arena = Workspace()
    small = [BufferSpec((3, 5), torch.float32), BufferSpec((7,), torch.bfloat16)]
    cpu = torch.device("cpu")
    scratch = arena.take(small, cpu)
    a, b = scratch
    assert a.shape == (3, 5) and b.dtype == torch.bfloat16
    assert a.data_ptr() + a.nbytes <= b.data_ptr() and b.data_ptr() % 2 == 0
    scratch.give_back()
    assert arena.nbytes == Workspace.nbytes_for(small)
    again = arena.take(small, cpu)
    assert again[0].data_ptr() == a.data_ptr()
    other = arena.take(small, cpu)
    assert other[0].data_ptr() != a.data_ptr(), "two calls at one time have the same memory"
    for taken in (again, other, other):
        taken.give_back()
    assert arena.nbytes == 2 * Workspace.nbytes_for(small)
    large = Workspace()
    for specs in (small, [BufferSpec((1000,), torch.float32)], [BufferSpec((0, 4), torch.float32)]):
        scratch = large.take(specs, cpu)
        assert [t.shape for t in scratch] == [spec.shape for spec in specs]
        scratch.give_back()
    assert large.nbytes == 4096, "an arena that was outgrown is still there"


def test_layers_share_the_arena() -> None:
    arena = Workspace()
    first = moekit.compose(PROBLEM, experts="torch", workspace=arena)
    second = moekit.compose(PROBLEM.replace(has_bias=False), experts="torch", workspace=arena)
    x, routing = tokens()
    first(x, first.pack(weights()), routing)
    held = arena.nbytes
    second(x, second.pack(weights()), routing)
    assert arena.nbytes == held


def test_memory_needs_a_token_count() -> None:
    kernel = moekit.compose(PROBLEM)
    with pytest.raises(InvalidInput, match="num_tokens=None: it must be an integer"):
        kernel.memory()
    assert kernel.memory(128).total > kernel.memory(16).total > 0
    for wrong in (-1, 2.5, True):
        with pytest.raises(InvalidInput, match=f"num_tokens={wrong}: it must be an integer"):
            kernel.memory(wrong)
        with pytest.raises(InvalidInput, match="it must be an integer of at least 0"):
            kernel.warmup(kernel.pack(weights()), wrong)
    assert moekit.compose(PROBLEM.replace(max_num_tokens=16)).memory() == kernel.memory(16)


def test_reprs_say_what_a_person_wants_to_know() -> None:
    kernel = moekit.compose(PROBLEM, experts="torch")
    assert repr(kernel) == (
        "ModularKernel(local + torch: 4 experts, top 2, hidden 64, intermediate 48, float32, "
        "quant none, silu on cpu, summed by the experts, checked)"
    )
    assert repr(kernel.pack(weights())) == (
        "PackedWeights(torch: w13 (4, 96, 64) float32, w2 (4, 64, 48) float32; 144 KiB on cpu)"
    )
    report = moekit.MemoryReport(16, 3 << 30, 5 << 20, 100)
    assert repr(report) == (
        "MemoryReport(16 tokens: workspace 3 GiB, intermediate 5 MiB, buffers 100 B, total 3 GiB)"
    )


def test_gradients_are_refused() -> None:
    kernel = moekit.compose(PROBLEM)
    packed, (x, routing) = kernel.pack(weights()), tokens()
    tracked = x.clone().requires_grad_()
    with pytest.raises(InvalidInput, match="x requires a gradient.*x.detach"):
        kernel(tracked, packed, routing)
    scores = moekit.Routing(routing.topk_weights.clone().requires_grad_(), routing.topk_ids)
    with pytest.raises(InvalidInput, match="topk_weights requires a gradient"):
        kernel(x, packed, scores)
    with torch.no_grad():
        assert torch.equal(kernel(tracked, packed, scores), kernel(x, packed, routing))


def test_warmup_grows_the_arena_beforehand() -> None:
    arena = Workspace()
    kernel = moekit.compose(PROBLEM, experts="torch", workspace=arena)
    packed = kernel.pack(weights())
    drawn = torch.random.get_rng_state()
    kernel.warmup(packed, 32)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    held = arena.nbytes
    kernel(tokens()[0], packed, tokens()[1])
    assert arena.nbytes == held > 0


def test_warmup_of_the_calls_that_a_caller_does_not_make(monkeypatch) -> None:
    kernel, made = moekit.compose(PROBLEM, experts="torch"), []
    packed = kernel.pack(weights())
    monkeypatch.setattr(
        moekit.ModularKernel,
        "__call__",
        lambda self, x, packed, routing: made.append((len(x), routing.topk_ids.dtype)),
    )
    kernel.warmup(packed, 12, ids_dtype=torch.int32, above=2)
    assert made == [(tokens, torch.int32) for tokens in (12, 8, 4)]
    made.clear()
    kernel.warmup(packed, 3, above=8)
    assert made == [(3, torch.int64), (3, torch.int32)]
    made.clear()
    monkeypatch.setattr(kernel.experts, "tuning", contextlib.ExitStack)
    kernel.warmup(packed, 3, ids_dtype=torch.int32, above=8)
    assert [tokens for tokens, _ in made] == [3, 2, 1]


@pytest.mark.parametrize("dispatcher", ["local", "batched_reference"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "fp8_block"])
def test_experts_that_take_quantized_tokens_alone(dispatcher: str, scheme: str) -> None:
    """Also packed ones, two values a byte."""
    registry = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    spec = replace(registry.expert("reference"), name="quantized_alone", takes_unquantized=False)
    registry.register(spec)
    problem = PROBLEM.replace(quant=moekit.SCHEMES[scheme])
    kernel = moekit.compose(problem, dispatcher, spec.name, backends=registry)
    case = make_case(problem, 9)
    out = kernel(case.x, kernel.pack(case.weights), case.routing)
    assert_close(out, case.reference(), problem)
    assert relative_error(out, case.reference()) > 1e-2, "not quantized"


def test_priority_may_depend_on_the_problem() -> None:
    registry = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})

    def prefer(problem: moekit.MoEProblem) -> int:
        return 1 if problem.quant.name == "int8_w8a16" else -1

    registry.register(replace(registry.expert("torch"), name="picky", prefer=prefer))
    chosen = {
        scheme: moekit.explain(
            PROBLEM.replace(quant=moekit.SCHEMES[scheme]), backends=registry
        ).chosen.experts
        for scheme in ("none", "int8_w8a16")
    }
    assert chosen == {"none": "torch", "int8_w8a16": "picky"}
    assert composite("torch:7|picky", registry.expert).priority_for(PROBLEM) == -1


@pytest.mark.parametrize("wrong", [lambda problem: 10**9, lambda problem: 1 / 0])
def test_a_priority_that_fails_is_a_reason(wrong) -> None:
    registry = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    registry.register(replace(registry.expert("torch"), name="picky", prefer=wrong))
    explanation = moekit.explain(PROBLEM, backends=registry)
    assert explanation.chosen.experts == "torch"
    with pytest.raises(
        Unsupported, match="prefer returned 1000000000, expected an integer|ZeroDivisionError"
    ):
        moekit.compose(PROBLEM, experts="picky", backends=registry)


class Aligned(TorchExperts):
    """Takes only operands that begin at multiples of 16 bytes, as libraries do."""

    def pack(self, weights):
        packed = super().pack(weights)
        assert not any(t.data_ptr() % 16 for t in weights.tensors().values())
        return packed

    def apply(self, y, tokens, weights, workspace):
        assert tokens.x.data_ptr() % 16 == y.data_ptr() % 16 == 0
        super().apply(y, tokens, weights, workspace)


class Odd(LocalDispatcher):
    """Takes aligned tokens, and lets them arrive behind others of any number."""

    def prepare(self, x_TH, routing, quantize):
        assert x_TH.data_ptr() % 16 == 0
        tokens = super().prepare(x_TH, routing, quantize).result()
        return Pending.ready(replace(tokens, x=moved(tokens.x)))


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins one element behind its storage."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


@pytest.mark.parametrize("dispatcher", ["local", "odd"])
def test_experts_get_aligned_operands(dispatcher: str) -> None:
    """Slices of a batch or of a checkpoint begin anywhere; vector loads would fault there."""
    backends = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    target = f"{__name__}:Aligned"
    backends.register(replace(backends.expert("torch"), name="aligned", target=target))
    target = f"{__name__}:Odd"
    backends.register(replace(backends.dispatcher("local"), name="odd", target=target))
    kernel = moekit.compose(PROBLEM, dispatcher, "aligned", backends=backends)
    case = make_case(PROBLEM, T)
    packed = kernel.pack(case.weights._map(moved))
    out = moved(torch.zeros(T, H))
    assert kernel(moved(case.x), packed, case.routing, out=out) is out
    assert_close(out, case.reference(), PROBLEM)


def test_a_profiler_shows_the_parts_of_a_call() -> None:
    kernel = moekit.compose(PROBLEM, experts="torch")
    packed, (x, routing) = kernel.pack(weights()), tokens()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kernel(x, packed, routing)
        kernel.start(x, packed, routing).result()
        with pytest.raises(InvalidInput):
            kernel(x[:, 1:], packed, routing)
    counted = {each.key: each.count for each in profile.key_averages()}
    names = ("dispatch: local", "experts: torch", "combine: local")
    assert [counted[f"moekit {name}"] for name in names] == [2, 2, 2]


@pytest.mark.parametrize(
    ("dispatcher", "experts", "changes", "sums"),
    [
        ("local", "torch", {}, Sums.BY_EXPERTS),
        (SUMS_ITSELF, "torch", {}, Sums.BY_EXPERTS_OR_DISPATCHER),
        ("local", "reference", {}, Sums.BY_KERNEL),
        ("batched_reference", "torch", {}, Sums.BY_DISPATCHER),
        ("local", "torch", {"batch_invariant": True}, Sums.BY_DISPATCHER),
    ],
)
def test_a_kernel_says_who_sums(dispatcher: str, experts: str, changes: dict, sums: Sums) -> None:
    problem = PROBLEM.replace(**changes)
    kernel = moekit.compose(problem, dispatcher, experts, backends=kit_registry())
    assert kernel.sums is sums and f"summed by {sums.value}" in repr(kernel)
    declared = Sums.BY_EXPERTS if sums is Sums.BY_EXPERTS_OR_DISPATCHER else sums
    assert kernel.explanation.chosen.sums is declared
    assert f"weighted and summed over top-k by {declared.value}" in str(kernel.explanation)


def test_warmup_passes_ids_of_every_dtype_that_a_call_may_have(monkeypatch) -> None:
    """Kernels compile for each dtype, and `local` does not convert ids."""
    kernel, seen = moekit.compose(PROBLEM, "local", "torch"), set()
    apply = type(kernel.experts).apply

    def noted(self, y, tokens, *rest):
        seen.add(tokens.topk_ids.dtype)
        return apply(self, y, tokens, *rest)

    monkeypatch.setattr(type(kernel.experts), "apply", noted)
    kernel.warmup(kernel.pack(weights()), 3)
    assert seen == {torch.int32, torch.int64}
