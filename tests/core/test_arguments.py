"""Arguments of another type or out of range: each is refused by a MoekitError that names it.

A row is a call and the words of its error. fuzz_surface.py draws such calls at random.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import moekit
import moekit.integrations.transformers as integration
from moekit import (
    Activation,
    DeviceSpec,
    ExpertWeights,
    FusedMoE,
    MoEProblem,
    OperandQuant,
    ParallelConfig,
    QuantScheme,
    Routing,
    parallel_config,
    route,
    to_physical,
)
from moekit.cli.main import main
from moekit.eplb import Balanced, LoadWindow, Placement, Rebalancer, improve, migrate
from moekit.errors import InvalidInput, InvalidProblem, MoekitError, WeightsError

E, K, H, I, T = 6, 2, 16, 8, 3
SIZES = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I)
PROBLEM = MoEProblem(**SIZES, dtype=torch.float32, device="cpu")
X, LOGITS = torch.ones(T, H), torch.arange(T * E).view(T, E).float()
ROUTING = Routing(torch.ones(T, K), torch.tensor([[0, 1], [2, 3], [4, -1]]))
PLACEMENT = Placement(tuple(range(E)), E, 2)
NESTED = torch.nested.nested_tensor([torch.ones(2, H), torch.ones(1, H)])


def weights(**changes: Any) -> ExpertWeights:
    made = dict(w13=torch.ones(E, 2 * I, H), w2=torch.ones(E, H, I))
    return ExpertWeights(**{**made, **changes})


def problem(**changes: Any) -> MoEProblem:
    return MoEProblem(**{**SIZES, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def kernel() -> moekit.ModularKernel:
    return moekit.compose(PROBLEM, experts="torch", checked=True)


@pytest.fixture(scope="module")
def packed(kernel: moekit.ModularKernel) -> moekit.PackedWeights:
    return kernel.pack(weights())


def layer(**knobs: Any) -> FusedMoE:
    return FusedMoE(**{**SIZES, "params_dtype": torch.float32, "device": "cpu", **knobs})


def loaded() -> FusedMoE:
    made = layer()
    made.load_weights(weights())
    return made


PARTS = [
    (lambda: ParallelConfig(dp_size=None, nodes=1), "dp_size=None: it must be an integer"),
    (lambda: ParallelConfig(dp_size="2", nodes=1), "dp_size='2'"),
    (lambda: ParallelConfig(dp_size=[], nodes=1), r"dp_size=\[\]"),
    (lambda: ParallelConfig(dp_size=float("inf")), "dp_size=inf"),
    (lambda: ParallelConfig(ep_rank=1.0, ep_size=2), "ep_rank=1.0"),
    (lambda: ParallelConfig(ep_rank=np.float64(1), ep_size=2), "ep_rank=.*1.0"),
    (lambda: ParallelConfig(ep_size=2**40), "ep_size=1099511627776: .* at most 65536"),
    (lambda: ParallelConfig(ep_size=2**40, ep_rank=0.5), "ep_size=1099511627776"),
    (lambda: ParallelConfig(ep_size=True), "ep_size=True"),
    (lambda: ParallelConfig(tp_size=0), "tp_size=0"),
    (lambda: ParallelConfig(nodes="1"), "nodes='1'"),
    (lambda: ParallelConfig(nodes=10**5000), "nodes=<int"),
    (lambda: parallel_config(dp_size="2"), "dp_size='2'"),
    (lambda: parallel_config(tp_size=True), "tp_size=True"),
    (lambda: parallel_config(2, 2, 1.0), "rank=1.0"),
    (
        lambda: parallel_config(enable_expert_parallel=1),
        "enable_expert_parallel=1: .*True",
    ),
    (lambda: problem(num_experts=True), "num_experts=True"),
    (lambda: problem(top_k=True), "top_k=True"),
    (lambda: problem(num_experts=10**9), "num_experts=1000000000: .* at most 1048576"),
    (lambda: problem(parallel=0), "parallel=0: it must be a ParallelConfig"),
    (lambda: problem(activation=[]), r"activation=\[\]: .*the name of one"),
    (lambda: problem(quant=[]), r"quant=\[\]: .*moekit.SCHEMES"),
    (lambda: problem(quant=QuantScheme(name="fp8_block")), "quant=.*moekit.SCHEMES"),
    (lambda: problem(dtype=[]), r"dtype=\[\]: it must be one of torch.bfloat16"),
    (lambda: problem(device=torch.device("meta")), "'meta' was asked for, .*name a device"),
    (lambda: problem(device=torch.device("hpu")), "'hpu' was asked for, but torch sees none"),
    (lambda: problem(device="foo"), "device 'foo' is not understood"),
    (lambda: Activation(alpha="x", name="swigluoai"), "alpha='x': it must be a finite number"),
    (lambda: Activation("silu", limit=float("nan")), "limit=nan: .*above 0"),
    (lambda: Activation([]), r"activation \[\] is unknown"),
    (lambda: DeviceSpec("cuda", (9,)), r"capability=\(9,\): it must be a tuple of two integers"),
    (lambda: DeviceSpec("cuda", 9.0), "capability=9.0"),
    (lambda: DeviceSpec("cuda", [9, 0]), r"capability=\[9, 0\]"),
    (lambda: DeviceSpec(5), "type=5"),
    (lambda: DeviceSpec.parse(5), "device=5: it must be a str"),
    (lambda: DeviceSpec.of("cpu"), "device='cpu': it must be a torch.device"),
    (lambda: DeviceSpec("cpu").meets("9"), "wanted='9'"),
    (lambda: OperandQuant(dtype="int8", group=(1,)), r"group=\(1,\)"),
    (lambda: OperandQuant(dtype="int8", group=(0, 1)), r"group=\(0, 1\)"),
    (lambda: QuantScheme(name="x", weight="int8"), "weight='int8'"),
    (lambda: moekit.explain(PROBLEM, experts=5), "experts=5: it must be a name"),
    (lambda: moekit.explain(None), "problem=None: it must be a MoEProblem"),
    (lambda: moekit.compose(None), "problem=None"),
    (lambda: moekit.compose(PROBLEM, group=3), "group=3: .*process group"),
    (lambda: moekit.compose(PROBLEM, checked="yes"), "checked='yes': it must be True or False"),
    (lambda: moekit.compose(PROBLEM, peer_timeout="x"), "peer_timeout='x'"),
    (lambda: moekit.compose(PROBLEM, peer_timeout=float("nan")), "peer_timeout=nan"),
    (lambda: moekit.compose(PROBLEM, workspace=3), "workspace=3"),
    (lambda: moekit.compose(PROBLEM, backends={}), r"backends=\{\}"),
    (lambda: moekit.ModularKernel(None, None), "dispatcher=None: it must be a PrepareAndFinal"),
    (lambda: layer(zero_expert_num="1"), "zero_expert_num='1'"),
    (lambda: layer(custom_routing_function=3), "custom_routing_function=3: .*a function"),
    (lambda: layer(shared_experts=3), "shared_experts=3: it must be a function"),
    (lambda: layer(peer_timeout="x"), "peer_timeout='x'"),
    (lambda: layer(checked="yes"), "checked='yes'"),
    (lambda: layer(tp_size=0), "tp_size=0"),
    (lambda: layer(renormalize="no"), "renormalize='no'"),
    (lambda: layer(routed_scaling_factor=float("nan")), "routed_scaling_factor=nan: .*finite"),
    (lambda: layer(device=5), "device=5: this is neither a name nor"),
    (lambda: layer(device="gpu"), "device=.gpu.: torch knows no such device; .* leave device out"),
    (lambda: layer(prefix=[]), r"prefix=\[\]"),
    (lambda: layer(expert_placement_strategy=[]), r"expert_placement_strategy=\[\]"),
    (lambda: layer(parallel="x"), "parallel='x'"),
    (lambda: route(LOGITS, "8"), "top_k='8': it must be an integer"),
    (lambda: route(LOGITS, 1.5), "top_k=1.5"),
    (lambda: route(LOGITS, True), "top_k=True"),
    (lambda: route(LOGITS, []), r"top_k=\[\]"),
    (lambda: route(LOGITS, 2, routed_scaling_factor=float("nan")), "routed_scaling_factor=nan"),
    (lambda: route(LOGITS, 2, scoring=[]), r"scoring=\[\]: it must be one of sigmoid, softmax"),
    (lambda: route(LOGITS, 2, renormalize=1), "renormalize=1"),
    (lambda: route(LOGITS, 2, custom=3), "custom=3: it must be a function"),
    (lambda: integration.install(quant=None), "quant scheme None is unknown"),
    (lambda: Balanced(2.0), "num_groups=2.0"),
]

INPUTS = [
    (lambda: route(LOGITS.tolist(), 2), "logits is .*, expected a dense torch.Tensor"),
    (lambda: route(LOGITS.to_sparse(), 2), "logits is .*sparse_coo"),
    (lambda: route(LOGITS, 2, correction_bias=[0.0] * E), "correction_bias is .*expected a dense"),
    (lambda: route(LOGITS, 2, is_padding=[False] * T), "is_padding is .*dense torch.Tensor"),
    (lambda: to_physical(ROUTING, [[0]]), "replicas is .*dense torch.Tensor"),
    (lambda: to_physical(ROUTING, torch.arange(E)[:, None] * 1.0), "replicas must .*int32 or"),
    (lambda: to_physical(ROUTING, torch.arange(4)[:, None]), r"topk_ids span \[-1, 4\].*0..3"),
    (lambda: to_physical(ROUTING, torch.arange(E)[:, None], "1"), "offset='1'"),
    (lambda: to_physical(None, torch.arange(E)[:, None]), "routing must be .*None"),
    (lambda: loaded().set_replicas([[0]]), "replicas is .*dense torch.Tensor"),
    (lambda: loaded().set_replicas(torch.full((E, 1), E)), "replicas must hold physical ids 0..5"),
    (lambda: loaded().set_replicas(torch.zeros(E, 1)), "of int32 or int64"),
    (lambda: loaded().set_replicas(torch.arange(E)[:, None], record=3), "record is 3, expected"),
    (lambda: loaded()(None, LOGITS), "x is None, expected a dense torch.Tensor"),
    (lambda: loaded()(X, LOGITS.tolist()), "router_logits is .*dense torch.Tensor"),
    (lambda: loaded()(X, LOGITS.requires_grad_(False).to_sparse()), "router_logits is .*sparse"),
    (lambda: loaded()(X, LOGITS, is_padding=[True]), r"is_padding is \[True\]"),
    (lambda: loaded()(X, LOGITS, max_tokens="x"), "max_tokens='x'"),
    (lambda: loaded().warmup("4"), "num_tokens='4'"),
    (lambda: Placement([0, 1], 2, 1), "physical_to_logical=.*a tuple of expert ids"),
    (lambda: Placement((0, "1"), 2, 1), "physical_to_logical="),
    (lambda: Placement((0, 1), 2, 0), "ep_size=0"),
    (lambda: PLACEMENT.rank_loads([1.0] * E), "load_E is"),
    (lambda: PLACEMENT.imbalance(torch.ones(2)), r"load_E is .*expected a tensor \(6,\)"),
    (lambda: improve("global", torch.ones(E), PLACEMENT), "policy='global': .*a function"),
    (lambda: improve(Balanced(), torch.ones(E), None), "now=None"),
    (lambda: LoadWindow(1, E, "3"), "steps='3'"),
    (lambda: LoadWindow(2**20, E, 2**20), "use fewer steps"),
    (lambda: LoadWindow(1, E, 1).record([[0]]), r"topk_ids is \[\[0\]\]"),
    (lambda: LoadWindow(1, E, 1).record(torch.tensor([[E]])), r"topk_ids span \[6, 6\]"),
    (lambda: LoadWindow(1, E, 1).record(torch.tensor([[0]]), 1), "layer must be in 0..0"),
    (lambda: Rebalancer(None, []), "kernel=None: it must be a ModularKernel"),
    (lambda: Rebalancer.of(3), "layers=3: it must be a list or tuple of FusedMoE"),
    (lambda: migrate(None, PLACEMENT, PLACEMENT), "packed=None"),
]  # fmt: skip

WEIGHTS = [
    (lambda: loaded().load_weights(None), r"pack\(\) needs moekit.ExpertWeights, but got NoneType"),
    (lambda: weights(w13=torch.ones(4, 4).to_sparse()), "w13 is .*sparse.*expected a dense tensor"),
    (lambda: weights(interleaved="no"), "interleaved='no'"),
    (lambda: weights().select("ab"), "experts='ab': expected integers in 0..5"),
    (lambda: weights().select([E]), r"experts=\[6\]"),
    (lambda: weights().select([0.5]), r"experts=\[0.5\]"),
    (lambda: weights(w13=torch.ones(3)).quantize(moekit.SCHEMES["int8_w8a16"]), "w13 is"),
    (
        lambda: moekit.compose(PROBLEM).pack(ExpertWeights(*(t.to("meta") for t in (X, X)))),
        "meta tensors",
    ),
]


def ids_of(table: list[list[int]]) -> Routing:
    return replace(ROUTING, topk_ids=torch.tensor(table))


CALLS = [
    (dict(x=None), InvalidInput, "x is None, expected a dense torch.Tensor"),
    (dict(x=X.tolist()), InvalidInput, "x is .*, expected a dense torch.Tensor"),
    (dict(x=X.to_sparse()), InvalidInput, "x is .*sparse_coo"),
    (dict(x=X.to_sparse_csr()), InvalidInput, "x is .*sparse_csr"),
    (dict(x=NESTED), InvalidInput, "x is <nested"),
    (dict(x=X.to("meta")), InvalidInput, "on cpu, x on meta"),
    (dict(routing=None), InvalidInput, "routing is NoneType"),
    (dict(routing=Routing([[1.0] * K] * T, ROUTING.topk_ids)), InvalidInput, "topk_weights is"),
    (dict(routing=Routing(torch.ones(T, K), None)), InvalidInput, "topk_ids is None"),
    (dict(routing=replace(ROUTING, topk_weights=torch.ones(T, K).to_sparse())), InvalidInput,
     "topk_weights is .*sparse"),
    (dict(routing=ids_of([[0, 1], [3, 3], [4, -1]])), InvalidInput, r"token 1 are \[3, 3\]"),
    (dict(out=3), InvalidInput, "out is 3, expected a dense torch.Tensor"),
    (dict(out=[1]), InvalidInput, r"out is \[1\]"),
    (dict(out=X.to_sparse()), InvalidInput, "out is .*sparse"),
    (dict(out=torch.ones(1, H).expand(T, H)), InvalidInput, r"strides \(0, 1\), so several"),
    (dict(out=torch.ones(99).as_strided((T, H), (1, 1))), InvalidInput, "share memory"),
    (dict(out=torch.ones(T, H, requires_grad=True)), InvalidInput, "out requires a gradient"),
    (dict(shared=3), InvalidInput, "shared is 3, expected a function"),
    (dict(weights=None), WeightsError, "the weights are NoneType"),
    (dict(weights=moekit.PackedWeights("torch", {})), WeightsError, r"torch. hold \[\]"),
    (dict(weights=moekit.PackedWeights("torch", {"w13": 3})), WeightsError, r"torch. hold \[3\]"),
]  # fmt: skip


def name_of(row: Any) -> str | None:
    return row if isinstance(row, str) else None


@pytest.mark.parametrize(("make", "said"), PARTS, ids=name_of)
def test_a_part_of_another_type_is_an_invalid_problem(make, said) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidProblem, match=said):
        make()
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(("make", "said"), INPUTS, ids=name_of)
def test_a_value_of_another_type_is_an_invalid_input(make, said) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


@pytest.mark.parametrize(("make", "said"), WEIGHTS, ids=name_of)
def test_weights_of_another_type_are_a_weights_error(make, said) -> None:
    with pytest.raises(WeightsError, match=said):
        make()


@pytest.mark.parametrize(("change", "error", "said"), CALLS, ids=name_of)
def test_a_call_with_another_type_names_the_argument(kernel, packed, change, error, said) -> None:
    call = {"x": X, "weights": packed, "routing": ROUTING, **change}
    with pytest.raises(error, match=said):
        kernel(**call)
    if "shared" not in change:
        with pytest.raises(error, match=said):
            kernel.start(**call)
    assert kernel(X, packed, ROUTING).isfinite().all()


def test_an_output_made_in_inference_mode_is_written_only_there(kernel, packed) -> None:
    with torch.inference_mode():
        out = torch.empty(T, H)
        kernel(X, packed, ROUTING, out=out)
    with pytest.raises(InvalidInput, match="inference mode"):
        kernel(X, packed, ROUTING, out=out)


def test_a_strided_output_without_overlap_is_written(kernel, packed) -> None:
    want = kernel(X, packed, ROUTING)
    for out in (torch.zeros(T, 2 * H)[:, ::2], torch.zeros(H, T).t(), torch.zeros(2 * T, H)[::2]):
        assert torch.equal(kernel(X, packed, ROUTING, out=out), want)


def test_meanwhile_must_be_a_function(kernel, packed) -> None:
    with pytest.raises(InvalidInput, match="meanwhile is 3, expected a function"):
        kernel.start(X, packed, ROUTING, meanwhile=3).result()


def test_numpy_integers_are_sizes() -> None:
    made = MoEProblem(**{name: np.int64(size) for name, size in SIZES.items()}, device="cpu")
    assert made == problem() and all(type(getattr(made, name)) is int for name in SIZES)
    assert route(LOGITS, np.int32(2)).topk_ids.shape == (T, 2)
    assert ParallelConfig(ep_size=np.int64(2), ep_rank=np.uint8(1)).ep_rank == 1


# -- custom routing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda w, ids: (w, ids.float()), "integer dtype .*ids torch.float32"),
        (lambda w, ids: (w, ids + 0.75), "ids torch.float32"),
        (lambda w, ids: (w, ids > 0), "ids torch.bool"),
        (lambda w, ids: (ids, w), "weights torch.int64 and ids torch.float32"),
        (lambda w, ids: w, "must return a tuple"),
        (lambda w, ids: (w, ids.tolist()), "result of custom routing is .*dense torch.Tensor"),
        (lambda w, ids: (w, ids.to("meta")), "ids on meta"),
        (lambda w, ids: (w, ids + E), "topk_ids span"),
        (lambda w, ids: (w, ids[:, :1].expand_as(ids)), r"token 0 are .*only once"),
    ],
)
@pytest.mark.parametrize("through", ["route", "layer"])
def test_the_answer_of_a_custom_routing_function_is_checked(answer, said, through) -> None:
    def custom(logits: torch.Tensor, k: int):
        return answer(torch.ones(len(logits), k), logits.topk(k).indices)

    with pytest.raises(InvalidInput, match=said):
        if through == "route":
            route(LOGITS, K, custom=custom)
        else:
            made = layer(custom_routing_function=lambda x, logits, k, _: custom(logits, k))
            made.load_weights(weights())
            made(X, LOGITS)


def test_a_custom_routing_function_may_pad() -> None:
    got = route(LOGITS, K, custom=lambda logits, k: (torch.ones(T, k), torch.full((T, k), -1)))
    assert (got.topk_ids == -1).all()


# -- one token, one expert, once --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("backends", [("local", "torch"), ("local", "reference")], ids=str)
def test_a_token_cannot_name_an_expert_twice(tokens, backends) -> None:
    kernel = moekit.compose(PROBLEM, *backends)
    packed, x = kernel.pack(weights()), torch.ones(tokens, H)
    ids = torch.arange(K).repeat(tokens, 1)
    ids[tokens - 1] = 4
    with pytest.raises(InvalidInput, match=rf"token {tokens - 1} are \[4, 4\]: .* only once"):
        kernel(x, packed, Routing(torch.ones(tokens, K), ids))
    ids[tokens - 1] = -1  # padding may repeat
    assert (kernel(x, packed, Routing(torch.ones(tokens, K), ids))[-1] == 0).all()


# -- the command line, and another default device ---------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--device gpu", "device 'gpu' is not understood; expected a torch device ('cpu', 'cuda')"),
        ("--ep 1099511627776", "--ep 1099511627776: it must be an integer"),
        ("--num-experts 1000000000", "--num-experts 1000000000: it must be"),
        ("--activation-limit nan", "limit=nan"),
        ("--max-num-tokens 0", "--max-num-tokens 0: it must be"),
    ],
)
def test_the_command_line_refuses(capsys, more, said) -> None:
    sizes = "--num-experts 8 --top-k 2 --hidden-size 64 --intermediate-size 64 --device cpu"
    assert main(["explain", *sizes.split(), *more.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err


@pytest.mark.parametrize("scheme", sorted(moekit.SCHEMES))
def test_everything_allocated_names_its_device(scheme) -> None:
    """A default device of another type changes no result of a call on the CPU."""
    torch.manual_seed(1)
    sizes = dict(num_experts=E, top_k=K, hidden_size=128, intermediate_size=128)
    asked = MoEProblem(**sizes, dtype=torch.float32, quant=scheme, device="cpu")
    dense = ExpertWeights(torch.randn(E, 256, 128), torch.randn(E, 128, 128))
    x, logits, one = torch.randn(40, 128), torch.randn(40, E), torch.ones(1)

    def run() -> torch.Tensor:
        quantized = dense.quantize(asked.quant)
        if asked.quant.activation is not None and asked.quant.activation.static:
            scales = dict.fromkeys(("w13_input_scale", "w2_input_scale"), one)
            quantized = replace(quantized, **scales)
        kernel = moekit.compose(asked)
        packed = kernel.pack(quantized)
        kernel.warmup(packed, 3)
        return kernel(x, packed, route(logits, K, renormalize=True), shared=lambda x: x)

    want = run()
    torch.set_default_device("meta")
    try:
        got = run()
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            got = run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert got.dtype == torch.float32
        assert torch.equal(got, want), f"default dtype {default}"


def test_a_layer_and_its_replicas_name_their_device() -> None:
    held, logits = weights(), torch.cat([LOGITS, LOGITS[:, :1]], dim=1)

    def run() -> torch.Tensor:
        made = layer(num_redundant_experts=2, zero_expert_num=1, shared_experts=lambda x: x)
        made.load_weights(held.select(made.local_experts))
        balancer = Rebalancer.of([made], window=2)
        made(X, logits)
        balancer.step()
        balancer.rebalance()
        return made(X, logits)

    want = run()
    torch.set_default_device("meta")
    try:
        got = run()
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)


def test_errors_are_short_and_derive_from_one_class() -> None:
    for huge in ("x" * 10**6, list(range(10**6)), torch.ones(1000, 1000), {1: "y" * 10**6}):
        with pytest.raises(MoekitError) as caught:
            ParallelConfig(ep_size=huge)
        assert len(str(caught.value)) < 300
