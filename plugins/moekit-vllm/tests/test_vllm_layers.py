"""moekit computes layers of vLLM and takes updates of their weights. vLLM is a stand-in."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import moekit_vllm
import pytest
import torch
import vllm_standin as standin
from engine_layers import INNER, E, H, K, calls, drawn, error, want
from moekit_vllm import experts, problem, versions
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm_layers import applied, made, share
from vllm_layers import vllm as vllm  # a fixture

import moekit
from moekit.errors import MoekitError, WeightsError


def _failing_pack(monkeypatch, layer=None):
    def broken(self, weights):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(moekit.ModularKernel, "pack", broken)


def _other_form(monkeypatch, layer):
    for name, value in drawn(inner=2 * INNER).items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_failing_pack, "no memory"),
        (_other_form, "another problem .6 experts, top 2, hidden 64, intermediate 64"),
    ],
)
def test_an_update_that_fails_is_an_error(monkeypatch, change, said) -> None:
    """CUDA graphs hold moekit's kernel and memory, so vLLM's kernel cannot take the layer over."""
    moekit_vllm.register()
    layer = made(weights=drawn())
    with monkeypatch.context() as patch:
        change(patch, layer)
        with pytest.raises(MoekitError, match=rf"layers\.0.*not with its new weights: .*{said}"):
            layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "prepared_by_vllm")
    assert error(applied(layer, *calls()), want(drawn(), *calls())) < 1e-5


def test_vllm_keeps_a_layer_through_updates(monkeypatch) -> None:
    """CUDA graphs hold vLLM's kernel, so moekit does not take the layer over."""
    moekit_vllm.register()
    with monkeypatch.context() as patch:
        _failing_pack(patch)
        layer = made(weights=drawn())
    layer.quant_method.process_weights_after_loading(layer)
    assert applied(layer, *calls()) == "vLLM's own"


def test_repack_writes_new_experts_into_the_layers_that_moekit_computes() -> None:
    moekit_vllm.register()
    layers = [made(weights=drawn(), layer_name=f"layers.{n}.experts") for n in range(2)]
    where = [p.data_ptr() for layer in layers for p in layer.parameters()]
    new = {f"layers.{n}.experts": moekit.ExpertWeights(*drawn(n + 1).values()) for n in range(2)}
    model = torch.nn.ModuleList([*layers, torch.nn.Linear(2, 2)])
    moekit_vllm.repack_(model, new, {name: each.checksum() for name, each in new.items()})
    for seed, layer in enumerate(layers, 1):
        assert error(applied(layer, *calls()), want(drawn(seed), *calls())) < 1e-5
    assert where == [p.data_ptr() for layer in layers for p in layer.parameters()]
    with pytest.raises(WeightsError, match=r"moekit does not compute \['layers\.7"):
        moekit_vllm.repack_(model, {"layers.7.experts": new["layers.0.experts"]})
    with pytest.raises(WeightsError, match=r"^layers\.1\.experts: .*have checksum"):
        moekit_vllm.repack_(model, new, dict.fromkeys(new, new["layers.0.experts"].checksum()))
    one, both = dict(list(new.items())[:1]), {name: each.checksum() for name, each in new.items()}
    with pytest.raises(WeightsError, match=r"\['layers\.1\.experts'\] have one of them"):
        moekit_vllm.repack_(model, one, both)


def test_weights_are_updated_in_place() -> None:
    """vLLM writes new values into the parameters, or gives the layer new ones."""
    moekit_vllm.register()
    layer = made(weights=drawn())
    before = layer.w13_weight.data_ptr()
    for seed in (1, 2):
        for name, value in drawn(seed).items():
            if seed == 1:
                getattr(layer, name).data.copy_(value)
            else:
                setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        layer.quant_method.process_weights_after_loading(layer)
        assert error(applied(layer, *calls()), want(drawn(seed), *calls())) < 1e-5
        assert layer.w13_weight.data_ptr() == before
        assert sorted(dict(layer.named_parameters())) == ["w13_weight", "w2_weight"]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_up(placement, ranks) -> None:
    """Each rank holds 1 to 3 of 6 experts; with 4 ranks fewer than a token's two."""
    moekit_vllm.register()
    weights, total, ids = drawn(), 0, calls()[2]
    ids[0] = -1  # a padding token
    x, topk_weights, _ = calls()
    for rank in range(ranks):
        held = (
            list(range(rank, E, ranks))
            if placement == "round_robin"
            else list(moekit.problem.partition(E, ranks, rank))
        )
        where = torch.full((E,), -1, dtype=torch.int32)
        where[held] = torch.arange(len(held), dtype=torch.int32)
        config = standin.config(E, K, H, INNER, ep_size=ranks, ep_rank=rank, use_ep=True)
        layer = made(config, {n: w[held].clone() for n, w in weights.items()}, expert_map=where)
        total = total + applied(layer, x, topk_weights, ids)
    assert error(total, want(weights, x, topk_weights, ids)) < 1e-5


def test_a_call_reads_no_values(monkeypatch) -> None:
    """Tensors without values suffice, so that the host need not wait for the device."""
    moekit_vllm.register()
    layer, _ = share(drawn(local=3), (1, 3, 5))
    monkeypatch.setattr(moekit.ModularKernel, "__call__", lambda self, x, packed, routing: routing)
    monkeypatch.setattr(experts.Computed, "warm_up", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, topk_weights, ids = (mode.from_tensor(t) for t in calls())
        routing = applied(layer, x, topk_weights.bfloat16(), ids)
    assert routing.topk_ids.shape == ids.shape and routing.topk_weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("capturing", "ranks", "warm"),
    [(False, 1, [9, 12]), (True, 1, []), (False, 2, [20])],
)
def test_kernels_compile_in_vllms_first_call(monkeypatch, caplog, capturing, ranks, warm) -> None:
    """The first call has the most tokens. Nothing compiles while a CUDA graph is captured. Ranks
    that exchange tokens compile for the largest number of any rank. vLLM itself runs the sizes of
    its graphs, and its ids have one dtype."""
    caplog.set_level(logging.INFO, "vllm.moekit")
    moekit_vllm.register()
    layers = [made(weights=drawn(seed)) for seed in range(2)]
    kernel = layers[0].quant_method.moekit_experts.kernel
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(versions, "most_tokens", lambda ranks: 10 * ranks)
    warmed, parallel = [], moekit.ParallelConfig(ep_size=ranks, dp_size=ranks)

    class OnGpu:
        problem = kernel.problem.replace(device="sm90", parallel=parallel)

        def warmup(self, packed, tokens, **options):
            assert options == {"ids_dtype": torch.int32, "above": 8}
            warmed.append(tokens)

        def __call__(self, *args):
            return kernel(*args)

    shared = OnGpu()
    for layer in layers:
        monkeypatch.setattr(layer.quant_method.moekit_experts, "kernel", shared)
        monkeypatch.setattr(layer.quant_method.moekit_experts, "captured", 8)
    for tokens in (9, 4, 9, 12):
        for seed, layer in enumerate(layers):
            got = applied(layer, *calls(tokens))
            assert error(got, want(drawn(seed), *calls(tokens))) < 1e-5
    assert warmed == warm
    lines = [r.message for r in caplog.records if " s to compile or load the kern" in r.message]
    assert [int(line.split()[-2]) for line in lines] == warm


@pytest.mark.parametrize("variable", ["VLLM_BATCH_INVARIANT", "MOEKIT_BATCH_INVARIANT"])
def test_batch_invariant_mode(variable, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "vllm.moekit")
    monkeypatch.setenv(variable, "1")
    moekit_vllm.register()
    layer = made(weights=drawn())
    x, topk_weights, ids = calls()
    every = applied(layer, x, topk_weights, ids)
    assert error(every, want(drawn(), x, topk_weights, ids)) < 1e-5
    assert "batch-invariant on cpu" in caplog.text
    for token in range(len(x)):
        row = slice(token, token + 1)
        assert torch.equal(applied(layer, x[row], topk_weights[row], ids[row]), every[row])
    caplog.clear()
    assert share(drawn(local=3))[0].prepared_by_vllm
    assert "vLLM adds up partial sums of 2 expert-parallel ranks" in caplog.text


@pytest.mark.parametrize(
    ("name", "fields", "activation"),
    [
        ("gelu_tanh", {}, moekit.Activation("gelu_tanh")),
        ("relu2_no_mul", {}, moekit.Activation("relu2")),
        ("relu2", {}, moekit.Activation("relu2_and_mul")),
        ("swiglustep", {}, moekit.Activation("swiglustep", limit=7.0)),
        ("silu", {"swiglu_limit": 3.0}, moekit.Activation("silu", limit=3.0)),
        ("swigluoai", {"swiglu_limit": 7.0}, moekit.Activation("swigluoai")),
        ("situ", {"activation_situ_beta": 2.0}, moekit.Activation("situ", alpha=2.0)),
    ],
)
def test_activations(name, fields, activation) -> None:
    """The numbers of all activations are tested with the layer that needs no vLLM."""
    config = standin.config(E, K, H, INNER, name)
    layer = standin.RoutedExperts(config, drawn(), **fields)
    assert problem.activation_of(layer) == activation
    for field, value in fields.items():  # vLLM has them in the layer or in its config
        setattr(layer, field, None)
        setattr(config, field, value)
    assert problem.activation_of(layer) == activation


def test_biases_and_interleaved_rows() -> None:
    moekit_vllm.register()
    draw = torch.Generator().manual_seed(3)
    biases = {"w13_bias": torch.randn(E, 2 * INNER, generator=draw)}
    biases["w2_bias"] = torch.randn(E, H, generator=draw)
    weights = drawn(**biases)
    layer = made(standin.config(E, K, H, INNER, "swigluoai", has_bias=True), dict(weights))
    expected = want(weights, *calls(), moekit.Activation("swigluoai"), interleaved=True)
    assert error(applied(layer, *calls()), expected) < 1e-5
    assert error(applied(layer, *calls()), want(drawn(), *calls())) > 0.1


def test_compiled_code_sees_one_operator(monkeypatch) -> None:
    """Its layer is found in the engine that runs: another one may have a layer of that name."""
    moekit_vllm.register()
    layers = [made(weights=drawn(seed)) for seed in range(2)]
    assert layers[0].layer_name == layers[1].layer_name
    for seed, layer in enumerate(layers):

        @torch.compile(backend="eager", fullgraph=True)
        def step(x, topk_weights, ids, layer=layer):
            return 2 * applied(layer, x, topk_weights, ids)

        runner = SimpleNamespace(routed_experts=layer)
        monkeypatch.setattr(standin, "running", {layer.layer_name: runner})
        assert error(step(*calls()), 2 * want(drawn(seed), *calls())) < 1e-5


def test_the_operator_fits_its_fake(monkeypatch) -> None:
    """It has a schema without mutations, and a fake that knows shapes, dtypes and strides."""
    moekit_vllm.register()
    layer = made(weights=drawn())
    monkeypatch.setattr(
        standin, "running", {layer.layer_name: SimpleNamespace(routed_experts=layer)}
    )
    x, topk_weights, ids = calls()
    for tokens in (x, x.repeat(1, 2)[:, ::2], x[:0]):
        given = (tokens, topk_weights[: len(tokens)], ids[: len(tokens)], layer.layer_name)
        torch.library.opcheck(torch.ops.moekit.vllm_experts.default, given)


def test_vllm_may_move_experts() -> None:
    """vLLM's EPLB exchanges rows of the parameters, and passes the new places as ids."""
    moekit_vllm.register()
    weights = drawn()
    layer = made(weights={name: w.clone() for name, w in weights.items()})
    order = torch.tensor([3, 0, 5, 1, 4, 2])  # the expert of each place
    for p in layer.parameters():
        assert p.is_contiguous() and p.shape[0] == E  # as get_expert_weights() of vLLM needs them
        p.data.copy_(p.data[order].clone())
    x, topk_weights, ids = calls()
    places = order.argsort()[ids.long()].int()
    assert (
        error(applied(layer, x, topk_weights, places), want(weights, x, topk_weights, ids)) < 1e-5
    )
