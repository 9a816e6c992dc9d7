"""Tests of what a dispatcher's `prepare` and `finalize` return and take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from moekit.contract import Dispatched, Routing
from moekit.problem import MoEProblem
from moekit.testing.calls import Watch, check_graph, check_quantized
from moekit.testing.cases import device_of, generator
from moekit.testing.memory import poison
from moekit.testing.ranks import Call, Rank

Delivery = tuple[int, int, int, float]  # source rank, token, physical expert, router weight


def deliveries(r: Rank, wanted: Call) -> tuple[list[Delivery], list[Delivery]]:
    """Return the assignments that this rank sent, and those that reached it.

    Marks in the tokens identify them. Asserts that `Dispatched` fits its docstring.
    """
    p, dispatcher = r.problem, r.kernel.dispatcher
    case, _ = r.case(wanted)
    source = r.batch
    T = case.x.shape[0]
    idle = (case.routing.topk_ids < 0).all(dim=1)
    x = torch.ones(T, p.hidden_size, dtype=p.dtype, device=device_of(p))
    x[:, 0] = source + 1
    x[:, 1] = torch.arange(T, device=x.device) + 1
    x[idle] = float("nan")
    routing = r.as_taken(case.routing)
    watch = Watch(x=x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    tokens = dispatcher.prepare(x, routing, None).result()
    limit = dispatcher.max_rows(max(wanted.counts))
    arrived = list(_arrived(tokens, p, limit))

    # `many_assignments` compares the values that come back.
    dispatcher.finalize(_scaled(tokens, p), tokens, torch.empty_like(x)).result()
    watch.check("prepare or finalize")
    sent = [
        (source, t, int(routing.topk_ids[t, k]), round(float(routing.topk_weights[t, k]), 6))
        for t, k in (routing.topk_ids >= 0).nonzero().tolist()
    ]
    return sent, arrived


def _arrived(tokens: Dispatched, p: MoEProblem, limit: int) -> Iterable[Delivery]:
    first, L = p.local_experts.start, p.num_local_experts
    x = tokens.x
    assert x.dtype == p.dtype and tokens.x_scale is None, "quantized without being asked to"
    _check_contiguous(x)
    others = tokens.topk_ids, tokens.topk_weights, tokens.expert_num_tokens, tokens.num_rows
    places = [t.device for t in others if t is not None]
    assert set(places) == {x.device}, f"x is on {x.device}, ids, weights or counts on {places}"

    def delivery(row: Tensor, expert: int, weight: float) -> Delivery:
        assert bool(torch.isfinite(row).all()), "NaN in a row that an expert must compute"
        assert bool((row[2:] == 1).all()), "the transfer changed a row"
        return int(row[0]) - 1, int(row[1]) - 1, first + expert, round(weight, 6)

    if tokens.expert_num_tokens is not None:
        counts = tokens.expert_num_tokens
        assert tokens.topk_ids is None and tokens.topk_weights is None and tokens.num_rows is None
        assert x.dim() == 3 and x.shape[0] == L and x.shape[2] == p.hidden_size
        assert tuple(counts.shape) == (L,) and counts.dtype == torch.int32
        assert x.shape[1] <= limit, f"C={x.shape[1]}, but max_rows() says {limit}"
        assert bool(((counts >= 0) & (counts <= x.shape[1])).all()), f"counts {counts}"
        for expert, count in enumerate(counts.tolist()):
            yield from (delivery(row, expert, float("nan")) for row in x[expert, :count])
        return
    ids, weights = tokens.topk_ids, tokens.topk_weights
    assert ids is not None and weights is not None
    assert x.dim() == 2 and x.shape[1] == p.hidden_size
    assert x.shape[0] <= limit, f"R={x.shape[0]}, but max_rows() says {limit}"
    assert ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.shape == weights.shape
    assert ids.shape[1] <= p.top_k, (
        f"ids have {ids.shape[1]} columns, expected at most top_k={p.top_k}, for which experts "
        "state their workspace"
    )
    assert ids.dtype in (torch.int32, torch.int64) and weights.dtype == torch.float32
    assert bool(((ids >= -1) & (ids < L)).all()), f"ids must be local or -1: {ids.tolist()}"
    if (end := tokens.num_rows) is not None:
        assert tuple(end.shape) == (1,) and end.dtype == torch.int32
        behind = (ids[int(end) :] >= 0).any(dim=1).nonzero().flatten() + int(end)
        assert not len(behind), f"num_rows={int(end)}, but rows {behind.tolist()} have experts"
    for row, k in (ids >= 0).nonzero().tolist():
        yield delivery(x[row], int(ids[row, k]), float(weights[row, k]))


def _check_contiguous(x: Tensor) -> None:
    assert x.is_contiguous(), f"x has strides {x.stride()}, expected a contiguous tensor"


def _identity_result(x: Tensor, routing: Routing, r: Rank) -> Tensor:
    """Return what a rank gets back if every expert returns its input: (T, H) fp32."""
    p = r.problem
    mine = p.local_experts if r.alone else range(p.num_physical_experts)
    used = (routing.topk_ids >= mine.start) & (routing.topk_ids < mine.stop)
    total = torch.where(used, routing.topk_weights, 0.0).sum(dim=1, keepdim=True)
    return torch.where(total > 0, x.float() * total, 0.0)


def many_assignments(r: Rank, wanted: Call) -> None:
    """Dispatch and combine many experts, assignments, and values of any size.

    Each expert multiplies a token by its own number. Tokens reach a hundred, and outside fp16 a
    million. Router weights are negative, zero, above 2 and (outside fp16) as small as 1e-8, and one
    element of one token is NaN.
    """
    p, dispatcher, device = r.problem, r.kernel.dispatcher, device_of(r.problem)
    T, P, K = r.tokens(wanted), p.num_physical_experts, p.top_k
    draw = generator("many assignments", r.batch)
    # Sums over K take the rest of fp16.
    least, largest = (-2.5, 1.5) if p.dtype is torch.float16 else (-5.5, 5.5)
    scale = 10 ** (least + (largest - least) * torch.rand(T, 1, generator=draw))
    x = (torch.randn(T, p.hidden_size, generator=draw) * scale).to(p.dtype)
    weights = 8 * torch.rand(T, K, generator=draw) - 3
    weights[torch.rand(T, K, generator=draw) < 0.1] = 0.0
    if p.dtype is not torch.float16:
        weights[::2] *= 10 ** (-8 * torch.rand(len(weights[::2]), 1, generator=draw))
    odd = slice(T // 2, T // 2 + 1)  # one token, or none
    x[odd, 3], weights[odd] = float("nan"), 1.5
    patterns = torch.rand(64, P, generator=draw).topk(K, dim=1).indices
    ids = patterns[torch.arange(T) % 64] + torch.randint(P, (T, 1), generator=draw)
    ids %= P
    x, weights, ids = x.to(device), weights.to(device), ids.to(device)

    tokens = dispatcher.prepare(x, r.as_taken(Routing(weights, ids)), None).result()
    first, L = p.local_experts.start, p.num_local_experts
    numbers = 0.5 + torch.arange(P, device=device) % 61 / 61  # experts 2 ** n apart differ
    out = poison(torch.empty_like(x))
    y = _scaled(tokens, p, numbers[first : first + L])
    dispatcher.finalize(y, tokens, out).result()

    terms = weights * numbers[ids]
    mine = (ids >= first) & (ids < first + L) if r.alone else ids >= 0
    terms = torch.where(mine, terms, 0.0)
    ref = x.float() * terms.sum(dim=1, keepdim=True)
    bound = x.float().abs() * terms.abs().sum(dim=1, keepdim=True) * 4 * torch.finfo(p.dtype).eps
    wrong = (out.float() - ref).abs() > bound
    wrong |= out.isnan() != (x.isnan() & mine.any(dim=1, keepdim=True))
    bad = wrong.any(dim=1).nonzero().flatten().tolist()
    if bad:
        t = bad[0]
        h = int(wrong[t].nonzero()[0])
        r.expect(
            False,
            f"rank {r.rank}: {len(bad)} of {T} tokens are wrong, the first of them {bad[:8]}: "
            f"[{t}, {h}] is {float(out[t, h]):.6g}, want {float(ref[t, h]):.6g}; x "
            f"{float(x[t, h]):.6g}, ids {ids[t].tolist()}, weights {weights[t].tolist()} ({p!r})",
        )


def _scaled(tokens: Dispatched, p: MoEProblem, numbers_L: Tensor | None = None) -> Tensor:
    """Return the output of experts that multiply tokens by their number, 1; padding is NaN."""
    x = tokens.x  # products with float32 are float32
    if numbers_L is None:
        numbers_L = torch.ones(p.num_local_experts, device=x.device)
    if tokens.expert_num_tokens is not None:
        y = (x * numbers_L[:, None, None]).masked_fill_(~_real(tokens)[..., None], float("nan"))
        return y.to(x.dtype)
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    here = tokens.topk_ids >= 0
    factors = torch.where(here, tokens.topk_weights, 0.0) * numbers_L[tokens.topk_ids.clamp(min=0)]
    factors = torch.where(here, factors, 0.0).sum(dim=1, keepdim=True)
    return (x * factors).masked_fill_(~_real(tokens)[:, None], 0.0).to(x.dtype)


def graph(r: Rank, num_tokens: int) -> None:
    """Capture the calls of a fused kernel in a CUDA graph, or `prepare` and `finalize`.

    Experts between the two return their input.
    """
    r.checked = False
    kernel, made = r.kernel, []

    def run(x: Tensor, routing: Routing, out: Tensor) -> None:
        if r.spec.fused:
            kernel(x, r.packed, routing, out=out)
        else:
            tokens = kernel.dispatcher.prepare(x, routing, None).result()
            kernel.dispatcher.finalize(_scaled(tokens, r.problem), tokens, out).result()

    for kind in ("random", "masked", "rows", "hot"):
        case, right = r.case(Call((num_tokens,), kind), kind)
        if r.spec.fused:
            made.append((case, right.reference()))
        else:
            routing = r.as_taken(case.routing)
            made.append((replace(case, routing=routing), _identity_result(case.x, routing, r)))
    check_graph(run, made)


def wire(r: Rank, wanted: Call) -> tuple[set[bytes], set[bytes]]:
    """Assert that tokens travel quantized. Return the rows sent, and the rows arrived.

    A row is its values and its scales. None is sent by a dispatcher that quantizes by itself.
    """
    case, _ = r.case(wanted)
    sent: set[bytes] = set()

    def quantize(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        made = r.kernel.experts.quantize(x, r.packed, valid)
        sent.update(_bytes(*made))
        return made

    tokens = r.kernel.dispatcher.prepare(case.x, r.as_taken(case.routing), quantize).result()
    check_quantized(tokens.x, tokens.x_scale, r.problem)
    _check_contiguous(tokens.x)
    assert tokens.x_scale is not None
    real = _real(tokens)
    arrived = _bytes(tokens.x[real], tokens.x_scale.expand(*tokens.x.shape[:-1], -1)[real])
    y = torch.zeros((*tokens.x.shape[:-1], case.x.shape[1]), dtype=case.x.dtype).to(case.x.device)
    out = poison(torch.empty_like(case.x))
    r.kernel.dispatcher.finalize(y, tokens, out).result()
    assert not bool(out.any()), "finalize of zeros is not zero"
    return sent, arrived


def _bytes(x_RH: Tensor, scale_RG: Tensor) -> set[bytes]:
    """Return the bytes of each row, and of its scales."""
    parts = x_RH, scale_RG.expand(len(x_RH), -1)
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
    return {row.numpy().tobytes() for row in rows.cpu()}


def _real(tokens: Dispatched) -> Tensor:
    """Return which rows experts must compute: (R,) or (L, C)."""
    if tokens.topk_ids is not None:
        return (tokens.topk_ids >= 0).any(dim=1)
    assert tokens.expert_num_tokens is not None
    C = tokens.x.shape[1]
    return torch.arange(C, device=tokens.x.device) < tokens.expert_num_tokens[:, None]
