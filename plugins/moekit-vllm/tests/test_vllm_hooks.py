"""What moekit takes of vLLM's layers, what it leaves, and what it says. vLLM is a stand-in."""

from __future__ import annotations

import json
import logging
import re
import sys
from types import SimpleNamespace

import moekit_vllm
import pytest
import torch
import vllm_standin as standin
from moekit_vllm import describe, experts, hooks, problem, settings, versions
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from tuned_tables import make_table, write_table

import moekit
from moekit.errors import MoekitError
from moekit.problem.activation import apply_activation

E, K, H, INNER = 6, 2, 64, 32


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Put the stand-in where vLLM would be, in a process that has said nothing yet."""
    for name, module in standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    monkeypatch.setattr(versions, "failed_ranks", lambda failed: [0] * failed)
    monkeypatch.setattr(settings, "_said", set())
    monkeypatch.setattr(experts, "_kernels", {})
    monkeypatch.setattr(standin, "prepared", False)
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    standin.op_registry_oot.clear()
    yield
    standin.op_registry_oot.clear()


def drawn(seed=0, local=E, halves=2, inner=INNER, **more):
    draw = torch.Generator().manual_seed(seed)
    return {
        "w13_weight": torch.randn(local, halves * inner, H, generator=draw) / H**0.5,
        "w2_weight": torch.randn(local, H, inner, generator=draw) / inner**0.5,
        **more,
    }


def calls(tokens=9, seed=5):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=draw)
    ids = torch.rand(tokens, E, generator=draw).topk(K, dim=1).indices.int()
    return x, torch.rand(tokens, K, generator=draw) + 0.5, ids


def want(weights, x, topk_weights, ids, activation=None, interleaved=False):
    """Return the sum over experts, written out in fp32."""
    out, activation = torch.zeros_like(x), activation or moekit.Activation("silu")
    w13, w2 = weights["w13_weight"], weights["w2_weight"]
    for token in range(len(x)):
        for weight, expert in zip(topk_weights[token], ids[token].tolist(), strict=True):
            if expert < 0:
                continue
            h = x[token] @ w13[expert].T
            h += weights["w13_bias"][expert] if "w13_bias" in weights else 0
            if interleaved:
                h = torch.cat([h[0::2], h[1::2]])
            y = apply_activation(h, activation) @ w2[expert].T
            y += weights["w2_bias"][expert] if "w2_bias" in weights else 0
            out[token] += weight * y
    return out


def error(got, expected):
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def made(config=None, weights=None, cls=standin.RoutedExperts, **more):
    """Return a loaded layer of vLLM, as its model runner calls it."""
    layer = cls(config or standin.config(E, K, H, INNER), weights, **more)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def applied(layer, x, topk_weights, ids):
    return layer.quant_method.apply(
        layer=layer, x=x, topk_weights=topk_weights, topk_ids=ids, shared_experts=None,
        shared_experts_input=None,
    )  # fmt: skip


def test_moekit_computes_a_layer_in_place(caplog) -> None:
    caplog.set_level(logging.INFO, "vllm.moekit")
    moekit_vllm.register()
    moekit_vllm.register()  # vLLM may call it again
    weights = drawn()
    layers = [made(weights=weights, layer_name=f"layers.{n}") for n in range(2)]
    for layer in layers:
        assert error(applied(layer, *calls()), want(weights, *calls())) < 1e-5
        assert layer.w13_weight.data_ptr() == weights["w13_weight"].data_ptr()
        assert sorted(dict(layer.named_parameters())) == ["w13_weight", "w2_weight"]
        assert isinstance(layer.quant_method, standin.UnquantizedFusedMoEMethod)
        assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        assert layer.quant_method.moe_quant_config is versions.no_quant_config()
        assert layer.quant_method.maybe_make_prepare_finalize() is None
        assert not layer.quant_method.is_monolithic
    assert len(caplog.records) == 1  # a line for layers of one shape
    assert "6 experts, top 2, hidden 64, intermediate 32" in caplog.text
    assert "local + torch" in caplog.text


def test_classes_of_models_are_replaced_too() -> None:
    moekit_vllm.register()
    layer = made(weights=drawn(), cls=standin.ModelRoutedExperts)
    assert isinstance(layer, standin.ModelRoutedExperts)
    assert type(layer).__name__ == "ModelRoutedExperts"
    assert error(applied(layer, *calls()), want(drawn(), *calls())) < 1e-5


def test_off(monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", "off")
    moekit_vllm.register()
    assert type(made(weights=drawn())) is standin.RoutedExperts


def test_unknown_mode(monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", "yes")
    with pytest.raises(MoekitError, match="one of off, on, require .got 'yes'"):
        moekit_vllm.register()


def _other_plugin(monkeypatch):
    class Theirs(standin.RoutedExperts):
        pass

    standin.RoutedExperts.register_oot(Theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.setattr(versions, "installed", lambda: "0.40.1"), "this is vLLM 0.40.1"),
        (lambda m: m.setattr(versions, "installed", lambda: "1.33.0"), "this is vLLM 1.33.0"),
        (lambda m: m.setattr(versions, "installed", lambda: None), "vLLM is not installed"),
        (lambda m: m.delattr(standin.RoutedExperts, "register_oot"), "has no register_oot"),
        (lambda m: m.delitem(sys.modules, versions._CONFIG), "other modules than expected"),
        (_other_plugin, "another plugin has replaced that class by .*Theirs"),
    ],
)
@pytest.mark.parametrize("mode", ["on", "require"])
def test_vllm_keeps_all_layers(monkeypatch, caplog, change, said, mode) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", mode)
    change(monkeypatch)
    if mode == "require":
        with pytest.raises(MoekitError, match=f"every .*layer.* stays with vLLM: .*{said}"):
            moekit_vllm.register()
        return
    moekit_vllm.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(f"every .*layer.* stays with vLLM: .*{said}", record.getMessage())
    assert not hasattr(made(weights=drawn()), "made_by_moekit")


LEFT = {
    "LoRA": (dict(is_lora_enabled=True), {}, "moekit has no LoRA"),
    "dispatcher": (
        dict(dp_size=2, use_ep=True, all2all_backend="deepep_low_latency"),
        {},
        "all2all_backend='deepep_low_latency'",
    ),
    "prompts": (dict(pcp_size=2, ep_size=2, use_ep=True), {}, "prefill context parallelism"),
    "hash": (dict(dp_size=2), {"hash_indices_table": 1}, "routes by token ids"),
    "activation": (dict(activation="swiglu_of_tomorrow"), {}, "'swiglu_of_tomorrow'"),
    "beta": (
        dict(activation="swigluoai_uninterleave"),
        {"swiglu_limit": 7.0, "swiglu_alpha": 1.7, "swiglu_beta": 0.5},
        "beta=0.5",
    ),
    "limit": (dict(activation="swigluoai"), {"swiglu_limit": 5.0}, "limit=5.0"),
    "method": ({}, {"method": standin.OtherMethod}, "weights of OtherMethod"),
}


@pytest.mark.parametrize("why", LEFT)
@pytest.mark.parametrize("mode", ["on", "require"])
def test_vllm_keeps_a_layer(monkeypatch, caplog, why, mode) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", mode)
    moekit_vllm.register()
    changes, more, said = LEFT[why]
    changes = dict(changes)
    activation = changes.pop("activation", "silu")
    config = standin.config(E, K, H, INNER, activation, **changes)
    if mode == "require":
        with pytest.raises(MoekitError, match="MOEKIT_VLLM=require, but MoE layer .6 experts") as e:
            made(config, drawn(), **more)
        assert said in str(e.value)
        return
    layers = [made(config, drawn(), **more) for _ in range(2)]
    (record,) = caplog.records  # once, not for each layer
    assert said in record.getMessage() and "stays with vLLM" in record.getMessage()
    for layer in layers:
        assert layer.prepared_by_vllm and applied(layer, *calls()) == "vLLM's own"
        assert layer.quant_method.maybe_make_prepare_finalize() == "vLLM's dispatcher"
        assert layer.quant_method.get_fused_moe_quant_config(layer) == "vLLM's scales"
        assert layer.quant_method.is_monolithic == (why == "method")


def test_weights_of_another_process_stay_with_vllm(monkeypatch, caplog) -> None:
    moekit_vllm.register()
    monkeypatch.setattr(standin, "prepared", True)
    assert made(weights=drawn()).prepared_by_vllm
    assert "another process has prepared its weights" in caplog.text


def test_kernels_that_cuda_graphs_cannot_hold(monkeypatch, caplog) -> None:
    moekit_vllm.register()
    compiled = standin.engine.compilation_config
    monkeypatch.setattr(compiled, "cudagraph_mode", standin.graphs.PIECEWISE)
    assert made(weights=drawn()).prepared_by_vllm
    assert "'torch' cannot be in the CUDA graphs that vLLM captures" in caplog.text
    monkeypatch.setattr(standin, "engine", None)  # as in a call of `reload_weights`
    assert not hasattr(made(weights=drawn()), "prepared_by_vllm")


def test_an_update_to_another_form_is_an_error() -> None:
    """CUDA graphs would read the former memory."""
    moekit_vllm.register()
    layer = made(weights=drawn())
    for name, value in drawn(inner=2 * INNER).items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    with pytest.raises(MoekitError, match=r"not with its new weights: .*other shapes"):
        layer.quant_method.process_weights_after_loading(layer)


def test_weights_on_the_host_stay_with_vllm(monkeypatch, caplog) -> None:
    moekit_vllm.register()
    monkeypatch.setattr(standin, "offloader", object())
    assert made(weights=drawn()).prepared_by_vllm
    assert "vLLM offloads weights to the host" in caplog.text


def test_a_version_without_a_router_for_cpus_keeps_their_layers(monkeypatch, caplog) -> None:
    monkeypatch.delitem(sys.modules, versions._CPU_ROUTER)
    moekit_vllm.register()
    assert made(weights=drawn()).prepared_by_vllm
    assert "stays with vLLM" in caplog.text and "inside its CPU kernels" in caplog.text


def test_a_backend_that_raises_leaves_the_layer_to_vllm(monkeypatch, caplog) -> None:
    moekit_vllm.register()

    def broken(self, weights):
        raise ZeroDivisionError("in the backend")

    monkeypatch.setattr(moekit.ModularKernel, "pack", broken)
    weights = drawn()
    layer = made(weights=weights)
    assert applied(layer, *calls()) == "vLLM's own"
    assert layer.w13_weight.data_ptr() == weights["w13_weight"].data_ptr()
    assert "in the backend" in caplog.text


def _failing_pack(monkeypatch):
    def broken(self, weights):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(moekit.ModularKernel, "pack", broken)


def test_an_update_that_fails_is_an_error(monkeypatch) -> None:
    """CUDA graphs hold moekit's kernel, so vLLM's cannot take the layer over."""
    moekit_vllm.register()
    layer = made(weights=drawn())
    with monkeypatch.context() as patch:
        _failing_pack(patch)
        with pytest.raises(MoekitError, match=r"layers\.0.*not with its new weights: .*no memory"):
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


def test_a_new_expert_map_is_followed() -> None:
    """The rank's three experts are 0, 1, 2, then 1, 3, 5, and with a third rank 6, 7, 8."""
    moekit_vllm.register()
    where = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32)
    config = standin.config(E, K, H, INNER, ep_size=2, ep_rank=0, use_ep=True)
    held = {n: w[:3].clone() for n, w in drawn().items()}
    layer = made(config, dict(held), expert_map=where)
    x, topk_weights, ids = calls()
    split = config.moe_parallel_config
    for ep_size, rank, mine in ((2, 0, [0, 1, 2]), (2, 1, [1, 3, 5]), (3, 2, [6, 7, 8])):
        split.ep_size, split.ep_rank, layer.global_num_experts = ep_size, rank, 3 * ep_size
        ids = torch.rand(len(x), 3 * ep_size).topk(K).indices.int()
        layer.next_expert_map = torch.full((3 * ep_size,), -1, dtype=torch.int32)
        layer.next_expert_map[mine] = torch.arange(3, dtype=torch.int32)
        layer.update_expert_map_info()
        own = layer.next_expert_map[ids.long()]
        assert error(applied(layer, x, topk_weights, ids), want(held, x, topk_weights, own)) < 1e-5


def test_a_call_reads_no_values(monkeypatch) -> None:
    """Tensors without values suffice, so that the host need not wait for the device."""
    moekit_vllm.register()
    where = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32)
    config = standin.config(E, K, H, INNER, ep_size=2, ep_rank=0, use_ep=True)
    layer = made(config, {n: w[:3].clone() for n, w in drawn().items()}, expert_map=where)
    computing = layer.quant_method.moekit_experts
    monkeypatch.setattr(computing, "kernel", lambda x, packed, routing: routing)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, topk_weights, ids = (mode.from_tensor(t) for t in calls())
        routing = applied(layer, x, topk_weights.bfloat16(), ids)
    assert routing.topk_ids.shape == ids.shape and routing.topk_weights.dtype == torch.float32


def test_vllms_batch_invariant_mode(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "vllm.moekit")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
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
    config = standin.config(E, K, H, INNER, ep_size=2, ep_rank=0, use_ep=True)
    held = {n: w[: E // 2].clone() for n, w in drawn().items()}
    assert made(config, held, expert_map=torch.tensor([0, 1, 2, -1, -1, -1])).prepared_by_vllm
    assert "vLLM adds up partial sums of 2 expert-parallel ranks" in caplog.text


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_what_vllm_pads_is_zero(activation) -> None:
    """vLLM does not initialize the rows and columns that it adds."""
    moekit_vllm.register()
    gated, interleaved = not activation.endswith("no_mul"), activation == "swigluoai"
    weights = drawn(halves=1 + gated)
    wide, inner = H + 32, INNER + 16
    w13 = torch.full((E, (1 + gated) * inner, wide), float("nan"))
    w2 = torch.full((E, wide, inner), float("nan"))
    halves = [w13] if interleaved or not gated else w13.chunk(2, dim=1)
    for half, part in zip(halves, weights["w13_weight"].chunk(len(halves), dim=1), strict=True):
        half[:, : part.shape[1], :H] = part
    w2[:, :H, :INNER] = weights["w2_weight"]
    config = standin.config(
        E, K, wide, inner, activation, hidden_dim_unpadded=H,
        intermediate_size_per_partition_unpadded=INNER, is_act_and_mul=gated,
    )  # fmt: skip
    layer = made(config, {"w13_weight": w13, "w2_weight": w2})
    x, topk_weights, ids = calls()
    out = applied(layer, torch.nn.functional.pad(x, (0, 32)), topk_weights, ids)
    known = problem.activation_of(layer)
    expected = want(weights, x, topk_weights, ids, known, interleaved)
    assert error(out[:, :H], expected) < 1e-5 and (out[:, H:] == 0).all()


@pytest.mark.parametrize(
    ("name", "fields", "activation"),
    [
        ("gelu_tanh", {}, moekit.Activation("gelu_tanh")),
        ("relu2_no_mul", {}, moekit.Activation("relu2")),
        ("relu2", {}, moekit.Activation("relu2_and_mul")),
        ("swiglustep", {}, moekit.Activation("swiglustep", limit=7.0)),
        ("silu", {"swiglu_limit": 3.0}, moekit.Activation("silu", limit=3.0)),
        ("swigluoai", {"swiglu_limit": 7.0}, moekit.Activation("swigluoai")),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 1.0},
            moekit.Activation("swigluoai", alpha=1.5, limit=5.0),
        ),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 5.0},
            moekit.Activation("silu", limit=5.0),
        ),
    ],
)
def test_activations(name, fields, activation) -> None:
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


def test_slow_backends_are_not_chosen_on_gpus(monkeypatch) -> None:
    asked = moekit.MoEProblem(num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER,
                              device="sm90")  # fmt: skip
    named = moekit.explain(asked, experts="torch")
    assert named.chosen is not None and not problem.too_slow(named)
    monkeypatch.setenv("MOEKIT_BLOCK", "triton,cutlass,deepgemm,marlin,flashinfer")
    monkeypatch.setattr(moekit.discovery.registry, "_registry", None)
    (reason,) = problem.too_slow(moekit.explain(asked))
    assert "only 'torch' computes it" in reason and "pip install moekit-triton" in reason
    assert not problem.too_slow(moekit.explain(asked.replace(device="cpu")))


class KernelForCPUs:
    runs = True

    @classmethod
    def _supports_current_device(cls):
        return cls.runs


class WithCPUKernel(standin.UnquantizedFusedMoEMethod):
    experts_cls = KernelForCPUs


def test_vllms_faster_kernel_stays_on_cpus(monkeypatch, caplog) -> None:
    monkeypatch.setenv("MOEKIT_DISPATCHER", "local")  # this names no experts
    moekit_vllm.register()
    layers = [made(weights=drawn(), method=WithCPUKernel) for _ in range(2)]
    assert all(applied(layer, *calls()) == "vLLM's own" for layer in layers)
    (record,) = caplog.records
    said = "vLLM's own kernel is faster on this CPU than moekit's 'torch'; set MOEKIT_VLLM=require"
    assert said in record.getMessage()


def _without_kernel(monkeypatch):
    monkeypatch.setattr(KernelForCPUs, "runs", False)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setenv("MOEKIT_VLLM", "require"),
        lambda m: m.setenv("MOEKIT_EXPERTS", "torch"),
        lambda m: m.setenv("VLLM_BATCH_INVARIANT", "1"),
        _without_kernel,
    ],
)
def test_moekit_computes_on_cpus_where_it_must(monkeypatch, change) -> None:
    change(monkeypatch)
    moekit_vllm.register()
    layer = made(weights=drawn(), method=WithCPUKernel)
    assert error(applied(layer, *calls()), want(drawn(), *calls())) < 1e-5


def test_moekit_computes_shares_of_the_experts_on_cpus() -> None:
    """vLLM's CPU kernels know no expert map."""
    moekit_vllm.register()
    where = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32)
    config = standin.config(E, K, H, INNER, ep_size=2, ep_rank=0, use_ep=True)
    held = {n: w[:3].clone() for n, w in drawn().items()}
    layer = made(config, held, expert_map=where, method=WithCPUKernel)
    x, topk_weights, ids = calls()
    ours = torch.where(ids < 3, ids, -1)
    assert error(applied(layer, x, topk_weights, ids), want(held, x, topk_weights, ours)) < 1e-5


def test_the_line_states_expected_times(monkeypatch, caplog, tmp_path) -> None:
    asked = moekit.MoEProblem(num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER,
                              dtype=torch.float32, device="cpu")  # fmt: skip
    write_table(tmp_path / "x.json", make_table({"torch": (20, 0.5)}, asked))
    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path))
    caplog.set_level(logging.INFO, "vllm.moekit")
    moekit_vllm.register()
    made(weights=drawn())
    times = "20.0 µs at T=1, 80.0 µs at T=16 and 320 µs at T=256 for a call"
    assert caplog.records[0].getMessage().endswith(f"(by priority); tuned table: {times}")


def _model(folder, **quantization):
    stem = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    shapes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    tensors = {
        stem.format(n, part): torch.ones(shape, dtype=torch.bfloat16)
        for n in range(E)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = dict(model_type="qwen3_moe", hidden_size=H, moe_intermediate_size=INNER,
                  num_experts=E, num_experts_per_tok=K, torch_dtype="bfloat16")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | quantization))
    return str(folder)


@pytest.mark.parametrize(
    ("mode", "ranks", "fields", "said"),
    [
        ("on", 1, {}, "stay with vLLM: vLLM's own kernel is faster on this CPU"),
        ("on", 2, {}, "moekit computes these layers"),
        ("require", 1, {}, "moekit computes these layers"),
        ("on", 1, {"quant": "fp8_block"}, "computes these layers, unless vLLM has a kernel for"),
        ("off", 1, {}, "stay with vLLM: MOEKIT_VLLM=off"),
    ],
)
def test_explain(monkeypatch, tmp_path, mode, ranks, fields, said) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", mode)
    parallel = moekit.ParallelConfig(ep_size=ranks)
    found, (note,) = describe.problems(_model(tmp_path), parallel, device="cpu", **fields)
    assert said in note and note.startswith("in vLLM 0.33.0 ")
    assert ("unless" in note) == ("unless" in said)
    assert found.parallel.dp_size == 1 and found.num_local_experts == E // ranks
    monkeypatch.setenv("MOEKIT_DISPATCHER", "naive")
    found, _ = describe.problems(_model(tmp_path), parallel, device="cpu", **fields)
    assert found.parallel.dp_size == ranks


def test_the_hooks_can_be_removed() -> None:
    moekit_vllm.register()
    hooks.uninstall()
    hooks.uninstall()
    assert type(made(weights=drawn())) is standin.RoutedExperts


def test_situ() -> None:
    """Its numbers are in vLLM's config alone; a linear beta of zero or less means none."""
    for linear, limit in ((None, None), (-1.0, None), (3.0, 3.0)):
        more = dict(activation_situ_beta=2.0, activation_situ_linear_beta=linear)
        layer = standin.RoutedExperts(standin.config(E, K, H, INNER, "situ", **more), drawn())
        expected = moekit.Activation("situ", alpha=2.0, limit=limit)
        assert problem.activation_of(layer) == expected


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
