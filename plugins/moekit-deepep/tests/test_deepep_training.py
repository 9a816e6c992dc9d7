"""The backward by the handle of the forward, over the stand-in. The kit's part is elsewhere."""

from __future__ import annotations

import pytest
import torch
from rank_pools import rank_pool

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

# First, because it puts the stand-in in the library's place.
from test_deepep_adapter import E, H, K, check, problem_of, tokens_of  # noqa: I001
from test_deepep_adapter import experts_that_return_their_input
import deepep_standin

import moekit
from moekit.plugin import Routing

pool = rank_pool(2, timeout=120)

# (dispatcher, max_num_tokens of two layers that share a buffer). Without it, the host waits for the
# number of rows.
LAYERS = [
    ("deepep_ht_standin", (16, None)),
    ("deepep_ht_standin", (None, 16)),
    ("deepep_elastic_standin", (16, 16)),
]
COUNTS = ((0, 5), (6, 3), (4, 0))  # of each call and rank; the last call is the first layer's


def dispatcher_of(name, rank, most):
    spec, problem = deepep_standin.registry().dispatcher(name), problem_of(rank)
    problem = problem.replace(max_num_tokens=most, training=True)
    assert not spec.unsupported(problem), spec.unsupported(problem)
    spec = spec.for_training()
    return spec.load()(spec, problem, None)


def masked_tokens(count, seed):
    """Return tokens with some ids of -1, and the gradient of their output. Token 0 has no expert,
    so its gradient may be anything."""
    x, routing = tokens_of(count, seed)
    draw = torch.Generator().manual_seed(seed)
    routing.topk_ids[torch.rand(routing.topk_ids.shape, generator=draw) < 0.3] = -1
    grad = torch.randn(x.shape, generator=draw).bfloat16()
    routing.topk_ids[:1], grad[:1] = -1, float("nan")
    return x, routing, grad


def transposed(grad_RH, tokens):
    """The gradients of rows and router weights of experts that return their input, strided."""
    used = tokens.topk_ids >= 0
    weight = torch.where(used, tokens.topk_weights, 0.0).sum(1, keepdim=True)
    dot = (grad_RH.float() * tokens.x.float()).sum(1, keepdim=True)
    of_x = torch.where(used.any(1, keepdim=True), grad_RH.float() * weight, 0.0)
    return tuple(t.T.contiguous().T for t in (of_x.bfloat16(), torch.where(used, dot, 0.0)))


def backward(dispatcher, tokens, grad, x=True, topk_weights=True):
    grad_RH = dispatcher.prepare_backward(grad, tokens).result()
    of_x, of_weights = transposed(grad_RH, tokens)
    return dispatcher.finalize_backward(
        of_x if x else None, of_weights if topk_weights else None, tokens
    ).result()


def check_gradients(found, x, ids, weights, grad):
    used = ids >= 0
    weight = torch.where(used, weights, 0.0).sum(1, keepdim=True)
    want = torch.where(used.any(1, keepdim=True), grad.float() * weight, 0.0)
    torch.testing.assert_close(found[0].float(), want, atol=0.05, rtol=0.03)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    dot = (grad.float() * x.float()).sum(1, keepdim=True)
    torch.testing.assert_close(found[1], torch.where(used, dot, 0.0), atol=1e-4, rtol=1e-5)


def two_layers(rank, ranks, name, mosts, order):
    layers = [dispatcher_of(name, rank, most) for most in mosts]
    assert layers[0].lease.value is layers[1].lease.value
    made = []
    for layer, counts in zip((*layers, layers[0]), COUNTS, strict=True):
        x, routing, grad = masked_tokens(counts[rank], 10 * rank + counts[rank])
        tokens = layer.prepare(x, routing, None).result()
        done = layer.finalize(experts_that_return_their_input(tokens), tokens, x.clone()).result()
        check(done, x, routing)
        made.append((layer, tokens, (x, routing.topk_ids.clone(), routing.topk_weights, grad)))
        routing.topk_ids.fill_(0)  # the caller may change it
    for n in (*order, *order):
        layer, tokens, given = made[n]
        check_gradients(backward(layer, tokens, given[-1]), *given)
    for layer in layers:
        layer.destroy()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(("name", "mosts"), LAYERS)
def test_handles_of_two_layers(pool, name, mosts, order):
    """The backwards of three calls run in both orders, each twice; ranks have no tokens in some."""
    pool.run(two_layers, name, mosts, order)


def parts(rank, ranks, name):
    layer = dispatcher_of(name, rank, 16)
    x, routing, grad = masked_tokens(4 + rank, rank)
    tokens = layer.prepare(x, routing, None).result()
    both = backward(layer, tokens, grad)
    check_gradients(both, x, routing.topk_ids, routing.topk_weights, grad)
    of_x, nothing = backward(layer, tokens, grad, topk_weights=False)
    assert nothing is None and torch.equal(of_x, both[0])
    nothing, of_weights = backward(layer, tokens, grad, x=False)
    assert nothing is None and torch.equal(of_weights, both[1])
    assert backward(layer, tokens, grad, False, False) == (None, None)
    layer.finalize_backward(*transposed(tokens.x, tokens), tokens)  # nobody takes the result
    layer.destroy()


@pytest.mark.parametrize("name", ["deepep_ht_standin", "deepep_elastic_standin"])
def test_either_gradient_travels_alone(pool, name):
    pool.run(parts, name)


def frozen_experts(rank, ranks, name):
    """Return the bits of the gradients with weights that train, and with frozen ones."""
    kernel = moekit.compose(
        problem_of(rank).replace(training=True), name, "torch", backends=deepep_standin.registry()
    )
    draw = torch.Generator().manual_seed(0)
    w13, w2 = (
        torch.randn(E // ranks, rows, columns, generator=draw).bfloat16() / 8
        for rows, columns in ((64, H), (H, 32))
    )
    found = []
    for trains in (True, False):
        weights = [t.clone().requires_grad_(trains) for t in (w13, w2)]
        x, routing, grad = masked_tokens(7 * rank, rank)
        x.requires_grad_()
        topk_weights = routing.topk_weights.requires_grad_()
        kernel(x, moekit.ExpertWeights(*weights), Routing(topk_weights, routing.topk_ids)).backward(
            grad
        )
        assert all((t.grad is not None) is trains for t in weights)
        assert x.grad.shape == (7 * rank, H) and topk_weights.grad.shape == (7 * rank, K)
        found.append((x.grad, topk_weights.grad))
    kernel.destroy()
    return [torch.equal(a, b) and bool(rank) is bool(a.any()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("name", ["deepep_ht_standin", "deepep_elastic_standin"])
def test_frozen_experts_pass_the_same_gradients(pool, name):
    assert pool.run(frozen_experts, name) == [[True, True]] * 2
