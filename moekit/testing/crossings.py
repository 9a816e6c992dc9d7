"""The experts kit: cases of a covering array over everything that a call may vary.

Tests that vary one dimension at a time miss faults at crossings, such as a bias that a kernel for
quantized weights drops beyond 64 tokens. Here every possible pair of values occurs in unquantized
weights, every possible pair with a scheme occurs, and so does every scheme with and without bias at
every load.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.contract.specs import ExpertsSpec
from moekit.errors import InvalidProblem
from moekit.problem import DTYPES, DeviceSpec, MoEProblem
from moekit.problem.activation import ALPHAS, CLAMPABLE, Activation
from moekit.problem.quant import SCHEMES, QuantScheme
from moekit.problem.weights import ExpertWeights
from moekit.testing import cases
from moekit.testing.base import over, sizes_of
from moekit.testing.calls import QUANTIZED_WIRE, call, call_into_part
from moekit.testing.cases import SHARES, Case, make_case
from moekit.testing.diagnose import assert_right
from moekit.testing.experts_base import ExpertsBase, grouped

# Of clamps, which most rows exceed; 16 bits do not hold it. Alpha is another one than any default.
LIMIT, ALPHA = 1.3, 1.2

# Experts by top-k. Three of three is every token to every expert.
_EXPERTS = {1: 5, 2: 6, 3: 3, 40: 43}
ON_INPUT = "1, weight on input"

Row = dict[str, Any]
_Possible = Callable[[Row], Row | None]

# Cases that are tried around a pair before it counts as impossible. The first of them are greedy.
_ATTEMPTS, _GREEDY = 16, 6

# Tokens, and their routing. A hot expert has all tokens, or half where replicas take the others.
_LOADS = ((1, "random"), (7, "masked"), (70, "rows"), (131, "hot"), (600, "hot"))
_LOADS_INTERPRETED = ((1, "random"), (5, "masked"), (17, "hot"))
_MANY_TOKENS = 100  # for 40 experts
_MOST_INTERPRETED = 16  # cases

# Candidates for H and for I, the first of which that the backend takes is used. Usual ones depend
# on the scheme.
_TINY, _WIDE = (16, 24, 32), (8256, 8320, 8448, 8704)
_ODD = {"H": (102, 118, 136), "I": (108, 116, 136)}  # two ranks' I is even, as packed codes need
_NARROW = (32, 64, 128, 256, 512)
_SIZES = ("usual", "tiny", "odd", "wide")

_ROUTER_FACTORS = {"large": 2.0**10, "small": 2.0**-26}


def unusual(name: str, spec: ExpertsSpec) -> Activation:
    """Return the activation with a limit and another alpha, if it and the backend have them."""
    clamps = name in CLAMPABLE and (name != "silu" or spec.silu_clamp)
    alpha = ALPHA if name in ALPHAS else None
    return Activation(name, alpha=alpha, limit=LIMIT if clamps else None)


def path_of(scheme: QuantScheme) -> object:
    """Return what a kernel distinguishes in a scheme: equal for schemes on the same path."""
    weight = scheme.weight
    if weight is None:
        return None
    group = tuple(min(extent, 2) for extent in weight.group)  # -1, 1, or more
    return replace(weight, group=(1, 1)), group, scheme.activation


def _paths(spec: ExpertsSpec) -> dict[str, list[str]]:
    """Return declared schemes by the first of them that takes the same path."""
    declared = [name for name in SCHEMES if name in spec.schemes]
    return {names[0]: names for names in grouped(declared, path_of)}


class ExpertsCases(ExpertsBase):
    """Cases of a covering array. See `ExpertsConformance`."""

    def _declares(self, name: str, value: Any) -> bool:
        if name == "path":
            return value in self._spec().schemes and value in _paths(self._spec())
        return super()._declares(name, value)

    @over("path", SCHEMES)
    def test_cases(self, path: str) -> None:
        """Run the cases of a scheme, and of the other schemes whose path through kernels it shares.

        A failure prints its case; the seed and the name of the test repeat it.
        """
        self._problem(quant=path)
        spec = replace(self._spec(), name="any", target="any:any")
        rows = _array(spec, self._device(), self._interpreted, cases.seed())[path]
        for number, row in enumerate(rows):
            try:
                self._run(row, number)
            except Exception:
                print("case " + ", ".join(f"{name}={value}" for name, value in row.items()))
                raise
        if not rows:
            self._skip("the backend refuses every case of it")

    def _run(self, row: Row, key: object) -> None:
        problem = _problem(self._spec(), self._device(), tuple(row.items()))
        assert problem is not None
        dispatcher = {"native": self._native, "bridged": self._bridged}.get(row["via"], row["via"])
        case = _case(problem, row, key)
        kernel, packed = self._packed(problem, dispatcher, case.weights)
        run = call if row["out"] == "contiguous" else call_into_part
        assert_right(run(kernel, packed, case), case)


def _case(problem: MoEProblem, row: Row, key: object) -> Case:
    """Return the call that a row of the array describes."""
    (num_tokens, kind), E = row["load"], problem.num_experts
    case = make_case(problem, num_tokens, kind, key)
    ids, weights = case.routing.topk_ids.clone(), case.routing.topk_weights
    if row["router"] in _ROUTER_FACTORS:
        factor = _ROUTER_FACTORS[row["router"]]
        if problem.dtype == torch.float16:  # in which the output is
            factor = min(max(factor, 2.0**-6), 2.0)
        weights = weights * factor
    # The hot expert, or the only token's, is one of this rank's.
    mine = problem.local_experts
    target = mine[min(2, len(mine) - 1)]
    shift = target - (int(ids[0, 0]) if num_tokens == 1 else E // 2)
    ids = torch.where(ids < 0, -1, (ids + shift) % E)
    for replica in range(problem.num_redundant_experts):  # which a quarter of the tokens have
        some = ids[2 * replica :: 4]
        some[:, 0] = torch.where(
            (some == replica).any(dim=1) | (some[:, 0] < 0), some[:, 0], replica
        )
        some[some == replica] = E + replica
    if row["order"] == "ascending":
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
    if row["router"] == "signed":
        steps = torch.arange(num_tokens)[:, None] + torch.arange(ids.shape[1])
        weights = weights * (steps % 3 - 1).to(weights)
    ids = ids.int() if row["ids"] == "int32" else ids
    case = replace(case, routing=Routing(weights.contiguous(), ids.contiguous()))
    made = case.weights
    if row["replicas"]:  # the scales of odd logical experts are doubled
        logical = torch.tensor([problem.logical_expert(p) for p in problem.local_experts])
        made = _rescaled(made, lambda t: (1 + logical % 2).to(t).view(-1, *[1] * (t.dim() - 1)))
    if row["scales"] == "signed":  # every second scale
        made = _rescaled(made, lambda t: 1 - 2 * (torch.arange(t.numel()).view_as(t) % 2).to(t))
    case = replace(case, weights=made)
    if row["strides"] == "moved":
        return cases.moved(case)
    if row["strides"] == "strided":
        case = replace(case, weights=cases.strided_weights(case.weights))
        return cases.strided_inputs(case)
    return case


def _rescaled(weights: ExpertWeights, factors: Callable[[Tensor], Tensor]) -> ExpertWeights:
    """Return the weights with each scale times its ``factors``."""
    scales = weights.w13_scale, weights.w2_scale
    w13_scale, w2_scale = (t if t is None else t * factors(t) for t in scales)
    return replace(weights, w13_scale=w13_scale, w2_scale=w2_scale)


@cache
def _array(
    spec: ExpertsSpec, device: DeviceSpec, interpreted: bool, seed: int
) -> dict[str, list[Row]]:
    """Return the rows of each path: all pairs of the first one, and pairs with the others.

    In Triton's interpreter those rows that cover most pairs.
    """
    draw, paths = random.Random(seed), _paths(spec)
    plain = [Activation(name) for name in sorted(spec.activations)]
    activations = dict.fromkeys((*plain, *(unusual(each.name, spec) for each in plain)))
    loads = _LOADS_INTERPRETED if interpreted else _LOADS
    biases = (False, True) if spec.bias else (False,)
    dimensions: dict[str, Sequence[Any]] = {
        "dtype": [name for name in DTYPES if name in spec.dtypes],
        "activation": tuple(activations),
        "replicas": (0, 2),
        "share": tuple(SHARES),
        "router": ("plain", "signed", *_ROUTER_FACTORS),
        "top_k": (*_EXPERTS, ON_INPUT),
        "H": _SIZES,
        "I": _SIZES,
        "out": ("contiguous", "strided"),
        "strides": ("contiguous", "strided", "moved"),
        "ids": ("int64", "int32"),
        "order": ("random", "ascending"),
        "scales": ("positive", "signed"),
        "via": ("native", "bridged", QUANTIZED_WIRE),
        "batch_invariant": (False, True) if spec.batch_invariant else (False,),
    }
    possible = partial(_possible, spec, device, interpreted)
    first, *others = paths
    exact = {"scheme": (first,), "load": loads, "bias": biases, **dimensions}
    made = {
        first: covering_array(exact, possible, draw, _MOST_INTERPRETED if interpreted else None)
    }
    # Bias and load are one dimension, so that both together meet each scheme.
    both = {"both": tuple(product(loads, biases)), **dimensions}
    if interpreted:
        rest = [
            row
            for path in others
            for row in covering_array({"scheme": (path,), **both}, possible, draw, 1)
        ]
    else:
        rest = covering_array({"scheme": others, **both}, possible, draw) if others else []
    for path in others:
        rows = [_apart(row) for row in rest if row["scheme"] == path]
        made[path] = [_on_path(row, paths[path], i, possible) for i, row in enumerate(rows)]
    return made


def covering_array(
    dimensions: Mapping[str, Sequence[Any]],
    possible: _Possible,
    draw: random.Random,
    most: int | None = None,
) -> list[Row]:
    """Return cases that have all possible pairs of values of two dimensions.

    They are chosen greedily (the method of AETG): each is built around a pair that no case has yet,
    and has the values that cover most of the other pairs.

    Args:
        dimensions: the name of each dimension -> its values, which are hashable.
        possible: returns a case itself, or with other values where its own contradict each other,
            or None. A pair counts as impossible if no case around it comes back with the pair.
        draw: breaks ties.
        most: return at most this many cases, those that cover most pairs.
    """
    values = [(name, value) for name, each in dimensions.items() for value in each]
    # A value is a bit. A mask of each value holds the others that it has not met.
    bit = {value: i for i, value in enumerate(values)}
    unmet = [
        sum(1 << j for j, (other, _) in enumerate(values) if other != name) for name, _ in values
    ]
    rows: list[Row] = []
    while any(unmet) and (most is None or len(rows) < most):
        first = max(range(len(values)), key=lambda i: unmet[i].bit_count())
        second = unmet[first].bit_length() - 1
        start = dict((values[first], values[second]))
        for attempt in range(_ATTEMPTS):
            row = dict(start)
            for name in draw.sample(list(dimensions), len(dimensions)):
                options = draw.sample(list(dimensions[name]), len(dimensions[name]))
                mask = sum(1 << bit[each] for each in row.items()) if attempt < _GREEDY else 0
                gains = [(unmet[bit[name, value]] & mask).bit_count() for value in options]
                row.setdefault(name, options[gains.index(max(gains))])
            found = possible({name: row[name] for name in dimensions})
            if found is not None and start.items() <= found.items():
                rows.append(found)
                met = sum(1 << bit[each] for each in found.items())
                for each in found.items():
                    unmet[bit[each]] &= ~met
                break
        else:
            unmet[first] &= ~(1 << second)
            unmet[second] &= ~(1 << first)
    return rows


def _on_path(row: Row, schemes: Sequence[str], index: int, possible: _Possible) -> Row:
    """Return the row with one of the schemes of its path; wide rows keep the first scheme."""
    other = {**row, "scheme": schemes[index % len(schemes)]}
    return row if "wide" in (row["H"], row["I"]) or possible(other) != other else other


def _possible(spec: ExpertsSpec, device: DeviceSpec, interpreted: bool, row: Row) -> Row | None:
    """Return the row without what contradicts itself or takes long, or None if it is refused.

    Wide rows have few tokens and experts. Bias and load may be one value, `both`.
    """
    given, row = row, dict(_apart(row))
    if row["H"] == row["I"] == "wide":
        row["I"] = "usual"
    wide = "wide" in (row["H"], row["I"])
    if wide or (row["top_k"] == 40 and row["load"][0] > _MANY_TOKENS):
        few = (_LOADS_INTERPRETED if interpreted else _LOADS)[1]
        row["load"] = min(row["load"], few)
    if wide:
        row["top_k"] = row["top_k"] if row["top_k"] in (1, 2) else 2
        row |= {"activation": _main_activation(spec), "replicas": 0, "share": "all"}
    if row["load"][1] == "hot" and row["replicas"]:
        row["share"] = "all"  # another rank may hold no expert that has most rows
    if row["top_k"] == ON_INPUT:  # it enlarges tokens, for which clamps and squares are sensitive
        row |= {"router": "plain", "activation": _main_activation(spec), "share": "all"}
        row["I"] = "usual" if row["I"] == "tiny" else row["I"]
    if row["dtype"] == "float16" and "relu2" in row["activation"].name:
        row["activation"] = _main_activation(spec)  # squares may exceed 65504
    if row["router"] == "signed" and row["via"] == "bridged":
        row["via"] = "native"  # bridged experts get no router weights
    weight = SCHEMES[row["scheme"]].weight
    if weight is None or weight.scale_dtype != "float32":
        row["scales"] = "positive"  # the formats of other scales hold powers of two or magnitudes
    if row["batch_invariant"]:
        row["share"] = "all"  # ranks add up partial sums otherwise
    if interpreted and (wide or row["top_k"] == 40):
        return None  # takes up to seven seconds
    if _problem(spec, device, tuple(row.items())) is None:
        return None
    if "both" in given:
        row["both"] = row.pop("load"), row.pop("bias")
    return row


def _apart(row: Row) -> Row:
    """Return the row with bias and load as dimensions of their own."""
    if "both" not in row:
        return row
    load, bias = row["both"]
    return {"load": load, "bias": bias, **{k: v for k, v in row.items() if k != "both"}}


def _main_activation(spec: ExpertsSpec) -> Activation:
    return Activation("silu" if "silu" in spec.activations else min(spec.activations))


@cache
def _problem(
    spec: ExpertsSpec, device: DeviceSpec, items: tuple[tuple[str, Any], ...]
) -> MoEProblem | None:
    """Return the first of a row's problems that the backend takes, or None."""
    row: Row = dict(items)
    top_k = 1 if row["top_k"] == ON_INPUT else row["top_k"]
    wanted: dict[str, Any] = {
        "dtype": DTYPES[row["dtype"]],
        "quant": row["scheme"],
        "activation": row["activation"],
        "has_bias": row["bias"],
        "apply_router_weight_on_input": row["top_k"] == ON_INPUT,
        "num_redundant_experts": row["replicas"],
        "parallel": SHARES[row["share"]],
        "max_num_tokens": row["load"][0],
        "batch_invariant": row["batch_invariant"],
        "device": device,
    }
    weight = SCHEMES[row["scheme"]].weight
    grouped = weight is not None and max(weight.group) > 32
    narrow = "wide" in (row["H"], row["I"]) or top_k == 40
    usual = (160, 256, 512, 1024, 2048) if grouped else (96, 128, 256, 512, 1024, 2048)
    usual = _NARROW if narrow else usual
    sizes = {"usual": usual, "tiny": _TINY, "wide": _WIDE}
    experts = 2 if "wide" in (row["H"], row["I"]) else _EXPERTS[top_k]
    padded = {row["H"], row["I"]} & {"tiny", "odd"}
    pairs = [sizes.get(row[name], _ODD[name]) for name in ("H", "I")]
    for at in range(max(map(len, pairs))):
        hidden, inner = (each[min(at, len(each) - 1)] for each in pairs)
        try:
            problem = MoEProblem(**{**sizes_of(experts, top_k, hidden, inner), **wanted})
        except InvalidProblem:
            continue
        if not spec.unsupported(problem) and (padded or not spec.padding(problem)):
            return problem
    return None
