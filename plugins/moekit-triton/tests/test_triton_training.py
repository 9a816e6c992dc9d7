"""The backward: autograd of the oracle decides what is right."""

from dataclasses import replace

import pytest
import torch
from moekit_triton import training
from moekit_triton.kernels.tiles import GemmTile
from moekit_triton.training import Tiles, TrainableTriton

import moekit
from moekit import ExpertWeights, MoEProblem, Routing
from moekit.plugin import Dispatched, Wanted
from moekit.testing import Case, oracle
from moekit.testing.gradients import (
    assert_right_gradients,
    gradients,
    inputs_of,
    leaves,
    random_grad,
    right_gradients,
)

ROWS = 16  # of a small tile
COUNTS = (0, 1, ROWS - 1, ROWS, ROWS + 1)  # rows of each expert
NAMES = ("w13", "w2", "w13_bias", "w2_bias")
LIMIT = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small(monkeypatch):
    """Let every product have several tiles in all dimensions."""
    tile = GemmTile(ROWS, 16, 16, group_m=2)
    monkeypatch.setattr(training, "choose_tiles", lambda *_: Tiles(*[tile] * 6))
    return tile


def test_tiles_are_chosen_once_for_a_size():
    problem = problem_of("cpu")
    assert training.choose_tiles(problem, 64) is training.choose_tiles(problem_of("cpu"), 64)


def problem_of(device, **changes) -> MoEProblem:
    sizes = dict(num_experts=len(COUNTS), top_k=2, hidden_size=40, intermediate_size=24)
    sizes |= dict(has_bias=True, dtype=torch.float32, device=device, training=True)
    return MoEProblem(**sizes | changes)


def parameters(p: MoEProblem) -> ExpertWeights:
    L, H, inner = p.num_local_experts, p.hidden_size, p.local_intermediate_size
    shapes = {"w13": (L, p.w13_rows, H), "w2": (L, H, inner)}
    if p.has_bias:
        shapes |= {"w13_bias": (L, p.w13_rows), "w2_bias": (L, H)}
    made = {name: (torch.randn(shape) / shape[-1] ** 0.5) for name, shape in shapes.items()}
    return ExpertWeights(**{n: t.to(p.device.type, p.dtype) for n, t in made.items()})


def inputs(p: MoEProblem, counts=COUNTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, ids and router weights: expert i has counts[i] rows, and unread values are NaN."""
    flat = torch.cat([torch.full((n,), i) for i, n in enumerate(counts)])
    tokens = max(*counts, -(-len(flat) // p.top_k)) + 3
    ids = torch.full((p.top_k * tokens,), -1)
    ids[: len(flat)] = flat  # by columns, so that a token has an expert only once
    ids = ids.view(p.top_k, tokens).T[torch.randperm(tokens)]
    ids = ids.gather(1, torch.rand(ids.shape).argsort(dim=1))
    x, weights = torch.randn(len(ids), p.hidden_size), torch.randn(ids.shape)
    x[(ids < 0).all(dim=1)], weights[ids < 0] = torch.nan, torch.nan
    weights[ids == 1] = 0.0
    return x.to(p.device.type, p.dtype), ids.to(p.device.type), weights.to(p.device.type)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm().clamp(min=1e-6))


def check(p: MoEProblem, weights: ExpertWeights, x, ids, topk_weights) -> list[torch.Tensor]:
    """Compare a call's gradients with the oracle's, and return them."""
    case = Case(p, weights, x, Routing(topk_weights, ids))
    kernel, grad = moekit.compose(p, "local", "triton"), random_grad(case)
    found = gradients(kernel, leaves(case), grad)
    assert_right_gradients(found, right_gradients(case, grad), case, grad)
    return [found[name] for name in inputs_of(case)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H, inner", [(256, 384), (128, 128)])  # a tile has 256 columns
@pytest.mark.parametrize(
    "counts", [(0, 1, 63, 64, 65, 129, 700, 0), (1029, *[0] * 7), (*[0] * 7, 1029)]
)
def test_specialized_warps(specialized, device, dtype, H, inner, counts):
    """Experts without rows, partial, half and whole tiles; two runs agree in all bits."""
    sizes = dict(hidden_size=H, intermediate_size=inner, num_experts=len(counts), has_bias=False)
    p = problem_of(device, dtype=dtype, **sizes)
    x, ids, topk_weights = inputs(p, counts)
    assert training.choose_tiles(p, ids.numel()).specialized
    made = check(p, parameters(p), x, ids, topk_weights)
    assert not any(t[i].any() for t in made[2:] for i, n in enumerate(counts) if not n)
    step = Step(p, counts)
    for into in (dtype, torch.float32):
        names = ("w13", "w2")
        found = step.gradients(names), step.gradients(names)
        ones = {n: torch.ones(t.shape, device=device, dtype=into) for n, t in found[0].items()}
        added = step.gradients(names, **ones)
        for name, t in found[0].items():
            assert torch.equal(t, found[1][name]), name
            assert relative(added[name], t.float() + 1.0) < 4e-3, name
            # Alone: then no other product copies the rows.
            assert torch.equal(step.gradients([name])[name], t), name
    held = step.weights.experts
    views = ExpertWeights(w13=held["w13"].mT.contiguous().mT, w2=held["w2"])
    step.weights = step.experts.pack(views)  # of which specialized warps read none
    for name, t in step.gradients(names).items():
        assert relative(t, found[0][name].float()) < 4e-3, name


def test_transposed_and_interleaved_parameters(device, small):
    """Views reach the kernels: nothing copies them. Calls without gradients read them as well."""
    p = problem_of(device, activation="swigluoai")
    plain = parameters(p)
    x, ids, topk_weights = inputs(p)
    views = {"w13": plain.w13.mT.contiguous().mT, "w2": plain.w2.mT.contiguous().mT}
    views |= {"w13_bias": plain.w13_bias, "w2_bias": plain.w2_bias}
    check(p, ExpertWeights(**views), x.T.contiguous().T, ids, topk_weights)
    experts = moekit.compose(p, "local", "triton").experts
    packed = experts.pack(ExpertWeights(**views))
    assert all(packed[name].data_ptr() == t.data_ptr() for name, t in views.items())
    x = torch.nan_to_num(x)
    kernel = moekit.compose(p, "local", "triton")
    with torch.no_grad():
        y = kernel(x, ExpertWeights(**views), Routing(topk_weights, ids))
    want = oracle(x, plain, Routing(torch.nan_to_num(topk_weights), ids), p)
    assert relative(y, want) < LIMIT[p.dtype]
    order = torch.arange(p.w13_rows).view(2, -1).T.reshape(-1)
    mixed = replace(plain, w13=plain.w13[:, order], w13_bias=plain.w13_bias[:, order])
    y_mixed = kernel(x, replace(mixed, interleaved=True), Routing(topk_weights, ids))
    assert torch.equal(y_mixed, y)


def test_views_reach_calls_that_leave_sums(device) -> None:
    """The kernels of calls without gradients read contiguous weights, and got views."""
    p = problem_of(device, has_bias=False, dtype=torch.bfloat16)
    plain, (x, ids, weights) = parameters(p), inputs(p)
    views = ExpertWeights(*(w.mT.contiguous().mT for w in (plain.w13, plain.w2)))
    kernel = moekit.compose(p, "local", "triton")
    tokens, found = Dispatched(torch.nan_to_num(x), None, ids, weights), []
    for held in (plain, views):
        scratch = kernel.workspace.take(kernel.experts.workspace(len(x)), x.device)
        rows = kernel.experts.apply_unreduced(tokens, kernel.experts.pack(held), scratch)
        assert rows is not None
        places = (
            torch.arange(ids.numel()).view_as(ids) if rows.places_RK is None else rows.places_RK
        )
        found.append(rows.rows_NH[places[ids >= 0].long()].clone())
    assert torch.equal(*found)


class Step:
    """The methods of the experts, called one after another."""

    def __init__(self, p: MoEProblem, counts=COUNTS) -> None:
        self.experts = moekit.compose(p, "local", "triton").experts
        assert type(self.experts) is TrainableTriton
        x, ids, topk_weights = inputs(p, counts)
        self.tokens = Dispatched(x, None, ids, topk_weights)
        self.weights = self.experts.pack(parameters(p))
        self.grad = torch.randn(x.shape).to(x)
        self.saved = self.experts.forward(torch.empty_like(x), self.tokens, self.weights)

    def inputs(self, wanted: Wanted):
        return self.experts.backward_input(self.grad, self.tokens, self.weights, self.saved, wanted)

    def gradients(self, names=NAMES, **into) -> dict[str, torch.Tensor]:
        wanted, held = Wanted(False, False, frozenset(names)), self.weights.experts
        add = bool(into)
        into = into or {n: torch.empty_like(held[n]) for n in names}
        kept = self.inputs(wanted).kept
        self.experts.backward_weight(self.grad, self.tokens, self.saved, kept, into, add)
        return into


def test_steps(device, small):
    """Two runs agree in all bits, subsets with the whole, and experts without rows get zeros."""
    step = Step(problem_of(device))
    everything = Wanted(True, True, frozenset(NAMES))
    first, again = step.inputs(everything), step.inputs(everything)
    end = int(step.saved[3][-1])  # rows behind it do not exist
    assert torch.equal(first.x, again.x) and torch.equal(first.topk_weights, again.topk_weights)
    assert all(torch.equal(a[:end], b[:end]) for a, b in zip(first.kept, again.kept, strict=True))
    made, twice = step.gradients(), step.gradients()
    for name in NAMES:
        assert torch.equal(made[name], twice[name]) and not made[name][0].any(), name
        assert torch.equal(step.gradients([name])[name], made[name]), name
    assert torch.equal(step.inputs(Wanted(True, False, frozenset())).x, first.x)
    only = step.inputs(Wanted(False, True, frozenset()))
    assert only.x is None and not only.kept
    assert torch.equal(only.topk_weights, first.topk_weights)
    assert not first.x[(step.tokens.topk_ids < 0).all(dim=1)].any()
    assert not first.topk_weights[step.tokens.topk_ids < 0].any()
    assert first.topk_weights[step.tokens.topk_ids == 1].all()  # also of a router weight of 0
    held = sum(t.nbytes for t in step.saved)
    assert step.experts.saved_bytes(len(step.grad)) == held


def test_weights_through_descriptors(device, monkeypatch):
    """Sizes in rows of whole 16 bytes, tiles that do not divide them, matrices in both orders."""
    tile = GemmTile(ROWS, 16, 16, tma=True)
    monkeypatch.setattr(training, "choose_tiles", lambda *_: Tiles(*[tile] * 6))
    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")
    p = problem_of(device)
    check(p, parameters(p), *inputs(p))


def test_the_rule_fits_shared_memory():
    """For GPUs with 99 and 227 KiB, and rows of an expert from 1 to many."""
    for capability, most in (((8, 9), 99), ((9, 0), 227)):
        spec = moekit.DeviceSpec("cuda", capability, "any")
        for dtype in LIMIT:
            p = problem_of(spec, dtype=dtype, hidden_size=4096, intermediate_size=1408)
            for assignments in (0, 1, 100, 10**6):
                tiles = training.choose_tiles(p, assignments)
                for name, tile in vars(tiles).items():
                    columns = tile.block_n * (2 if name == "up" else 1)
                    size = (tile.block_m + columns) * tile.block_k * dtype.itemsize
                    assert size * tile.num_stages <= most << 10, (name, tile)
                assert tiles.up.block_m == tiles.back.block_m == tiles.pull.block_m
