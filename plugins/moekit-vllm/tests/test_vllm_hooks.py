"""moekit takes some of vLLM's layers, leaves others, and says why. vLLM is a stand-in."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import checkpoint_files as files
import moekit_vllm
import pytest
import torch
import vllm_standin as standin
from engine_layers import INNER, E, H, K, calls, drawn, error, want
from moekit_vllm import describe, hooks, versions
from moekit_vllm.settings import VLLM
from tuned_tables import make_table, write_table
from vllm_layers import applied, made, share
from vllm_layers import vllm as vllm  # a fixture

import moekit
from moekit.engines import kernels
from moekit.engines.kernels import too_slow
from moekit.errors import MoekitError


@pytest.fixture(autouse=True)
def only_the_plugins_records():
    """Other tests of a process may have made moekit's own logger talk."""
    logger = logging.getLogger("moekit")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


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


def test_modes(monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_VLLM", "off")
    moekit_vllm.register()
    assert type(made(weights=drawn())) is standin.RoutedExperts
    monkeypatch.setenv("MOEKIT_VLLM", "yes")
    with pytest.raises(MoekitError, match="one of off, on, require .got 'yes'"):
        moekit_vllm.register()


def test_a_variable_of_nearly_the_right_name(monkeypatch, caplog) -> None:
    monkeypatch.setenv("MOEKIT_VLMM", "off")
    monkeypatch.setenv("MOEKIT_VLLM_PATH", "/")  # another variable
    moekit_vllm.register()
    (record,) = caplog.records
    assert record.getMessage() == "moekit: MOEKIT_VLMM is ignored: MOEKIT_VLLM may be meant"


def test_engines_of_a_process_have_their_own_ranks(monkeypatch) -> None:
    """A kernel that moves tokens holds its group, which the next engine replaces."""
    composed = []

    def compose(problem, group, **more):
        composed.append(group)
        return SimpleNamespace(explanation=moekit.explain(problem.replace(parallel=alone)))

    alone, two = moekit.ParallelConfig(), moekit.ParallelConfig(ep_size=2, dp_size=2)
    monkeypatch.setattr(moekit, "compose", compose)
    asked = moekit.MoEProblem(num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER,
                              device="cpu", parallel=two, max_num_tokens=8)  # fmt: skip
    for group in ("first", "first", "second"):
        kernels.kernel_for(asked, VLLM, lambda group=group: group, False)
    assert composed == ["first", "second"]
    for _ in range(2):
        kernels.kernel_for(asked.replace(parallel=alone), VLLM, lambda: "none", False)
    assert composed == ["first", "second", None]


def _other_plugin(monkeypatch):
    class Theirs(standin.RoutedExperts):
        pass

    standin.RoutedExperts.register_oot(Theirs)


def raising(error):
    def fail(*_):
        raise error

    return fail


def _import_that_raises(monkeypatch, error):
    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == versions._EXPERTS:
                raise error

    monkeypatch.delitem(sys.modules, versions._EXPERTS)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def _hook_that_raises(monkeypatch):
    """The first class is replaced by then."""
    fail = raising(AssertionError("registered twice"))
    monkeypatch.setattr(standin.ModelRoutedExperts, "register_oot", fail)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: _import_that_raises(m, RuntimeError("no device")), "RuntimeError: no device"),
        (lambda m: _import_that_raises(m, SystemExit("bad flags")), "SystemExit: bad flags"),
        (_hook_that_raises, "AssertionError: registered twice"),
        (lambda m: m.setattr(versions, "installed", lambda: "0.40.1"), "this is vLLM 0.40.1"),
        (lambda m: m.setattr(versions, "installed", lambda: None), "vLLM is not installed"),
        (lambda m: m.delattr(standin.RoutedExperts, "register_oot"), "has no register_oot"),
        (lambda m: m.delitem(sys.modules, versions._CONFIG), "other modules than expected"),
        (_other_plugin, "another plugin has replaced that class by .*Theirs"),
    ],
)  # fmt: skip
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
    "LoRA of ranks": (dict(is_lora_enabled=True, dp_size=2), {}, "do not exchange"),
    "LoRA of gpt-oss": (
        dict(is_lora_enabled=True, activation="swigluoai"),
        {},
        "alternating rows of gate and up",
    ),
    "dispatcher": (
        dict(dp_size=2, use_ep=True, all2all_backend="deepep_low_latency"),
        {},
        "all2all_backend='deepep_low_latency'",
    ),
    "elastic": (dict(ep_size=2, use_ep=True), {}, "elastic expert parallelism"),
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
    if why == "elastic":
        monkeypatch.setattr(standin, "ranks", SimpleNamespace(tcp_store_group="vLLM's"))
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


def _graphs(monkeypatch):
    compiled = standin.engine.compilation_config
    monkeypatch.setattr(compiled, "cudagraph_mode", standin.graphs.PIECEWISE)


def _broken_backend(monkeypatch):
    monkeypatch.setattr(moekit.ModularKernel, "pack", raising(ZeroDivisionError("in the backend")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.setattr(standin, "prepared", True), "another process has prepared its weig"),
        (lambda m: m.setattr(standin, "offloader", object()), "vLLM offloads weights to the host"),
        (lambda m: m.delitem(sys.modules, versions._CPU_ROUTER), "inside its CPU kernels"),
        (_graphs, "'torch' cannot be in the CUDA graphs that vLLM captures"),
        (_broken_backend, "in the backend"),
    ],
)
def test_vllm_keeps_layers_of_an_engine(monkeypatch, caplog, change, said) -> None:
    change(monkeypatch)
    moekit_vllm.register()
    weights = drawn()
    layer = made(weights=weights)
    assert layer.prepared_by_vllm and applied(layer, *calls()) == "vLLM's own"
    assert layer.w13_weight.data_ptr() == weights["w13_weight"].data_ptr()
    assert "stays with vLLM" in caplog.text and said in caplog.text


def test_reloading_weights_has_no_config_of_an_engine(monkeypatch) -> None:
    _graphs(monkeypatch)
    monkeypatch.setattr(standin, "engine", None)
    moekit_vllm.register()
    assert not hasattr(made(weights=drawn()), "prepared_by_vllm")


def test_slow_backends_are_not_chosen_on_gpus(monkeypatch) -> None:
    asked = moekit.MoEProblem(num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER,
                              device="sm90")  # fmt: skip
    named = moekit.explain(asked, experts="torch")
    assert named.chosen is not None and not too_slow(named, VLLM)
    monkeypatch.setenv("MOEKIT_BLOCK", "triton,cutlass,deepgemm,marlin,flashinfer")
    monkeypatch.setattr(moekit.discovery.registry, "_registry", None)
    (reason,) = too_slow(moekit.explain(asked), VLLM)
    assert "only 'torch' computes it" in reason and "plugins/moekit-triton" in reason
    assert not too_slow(moekit.explain(asked.replace(device="cpu")), VLLM)


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
    layer, where = share(drawn(local=3), method=WithCPUKernel)
    x, topk_weights, ids = calls()
    ours = where[ids.long()]
    wanted = want(drawn(local=3), x, topk_weights, ours)
    assert error(applied(layer, x, topk_weights, ids), wanted) < 1e-5


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
    model = str(files.write(tmp_path, files.bf16, E=E, H=H, I=INNER).path)
    parallel = moekit.ParallelConfig(ep_size=ranks)
    found, (note,) = describe.problems(model, parallel, device="cpu", **fields)
    assert said in note and note.startswith("in vLLM 0.33.0 ")
    assert ("unless" in note) == ("unless" in said)
    assert found.parallel.dp_size == 1 and found.num_local_experts == E // ranks
    monkeypatch.setenv("MOEKIT_DISPATCHER", "naive")
    found, _ = describe.problems(model, parallel, device="cpu", **fields)
    assert found.parallel.dp_size == ranks


def test_the_hooks_can_be_removed() -> None:
    moekit_vllm.register()
    hooks.uninstall()
    hooks.uninstall()
    assert type(made(weights=drawn())) is standin.RoutedExperts
