"""PEFT's adapters on the experts of transformers: an operand, and no product of all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
from test_transformers_gradients import error
from test_transformers_layer import installed, make  # noqa: F401 (a fixture)
from test_transformers_models import MODELS, logits
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moekit.errors import MoekitError, Unsupported, WeightsError
from moekit.problem.quant import scheme
from moekit.problem.weights import ExpertWeights

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

import moekit.integrations.transformers as integration  # noqa: E402
from moekit.integrations import peft as operands  # noqa: E402
from moekit.lora import read  # noqa: E402

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(name: str, *ranks: int, targets: list[str] = TARGETS, **more: Any) -> Any:
    """Return a model with an adapter of each rank, "x" and "y", of which the first is active."""
    model = make(MODELS[name], how="eager").train()
    for called, rank in zip("xy", ranks, strict=False):
        config = peft.LoraConfig(r=rank, target_modules=[], target_parameters=targets, **more)
        if called == "x":
            model = peft.get_peft_model(model, config, adapter_name="x")
        else:
            model.add_adapter(called, config)
    generator = torch.Generator().manual_seed(1)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p, std=0.2, generator=generator)
    return model


def use(model: Any, how: str) -> Any:
    model.base_model.model.set_experts_implementation(how)
    return model


def output(model: Any) -> Tensor:
    return logits(model.base_model.model)


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(hfm.token_ids(), use_cache=False)[0].float().pow(2).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the parametrization by which PEFT adds B A to weights that moekit reads."""
    register = parametrize.register_parametrization

    def refusing(module: Any, *args: Any, **given: Any) -> Any:
        assert module.config._experts_implementation != "moekit", "PEFT added B A to the weights"
        return register(module, *args, **given)

    monkeypatch.setattr(parametrize, "register_parametrization", refusing)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_operand_and_product_agree(name: str, no_product: None) -> None:
    """gpt_oss has biases, a clamp, transposed parameters, and alternating rows of gate and up."""
    model = adapted(name, 3, use_rslora=True)
    want, out = gradients(use(model, "eager")), output(model)
    got, ours = gradients(use(model, "moekit")), output(model)
    assert want.keys() == got.keys() and len(got) == 8
    assert all(bool(g.any()) for g in got.values())  # every adapter moves
    assert max(error(got[n], want[n]) for n in want) < 1e-4 and error(ours, out) < 1e-4
    with model.disable_adapter():
        base = output(model)
    assert error(ours, base) > 1e-2
    assert not any(n.endswith("original") for n, _ in model.named_parameters())


def test_adapters_are_chosen_merged_and_saved(no_product: None, tmp_path: Path) -> None:
    model = use(adapted("qwen3_moe", 2, 4).eval(), "moekit")
    outs = {}
    for active in ("x", "y", "x"):
        model.set_adapter(active)
        before = outs.get(active)
        outs[active] = output(model)
        assert before is None or torch.equal(before, outs[active])
    assert error(outs["x"], outs["y"]) > 1e-2
    model.base_model.set_adapter(["x", "y"])
    both = output(model)
    assert error(both, output(use(model, "eager"))) < 1e-4
    use(model, "moekit").set_adapter("x")
    model.save_pretrained(str(tmp_path))
    again = peft.PeftModel.from_pretrained(make(MODELS["qwen3_moe"]).eval(), str(tmp_path / "x"))
    assert torch.equal(output(use(again, "moekit")), outs["x"])
    with model.disable_adapter():
        base = output(model)
    plain = make(MODELS["qwen3_moe"]).eval()
    plain.set_experts_implementation("moekit")
    assert torch.equal(base, logits(plain))
    model.merge_adapter()
    assert error(output(model), outs["x"]) < 1e-4
    model.unmerge_adapter()
    assert error(output(model), outs["x"]) < 1e-4


@pytest.mark.parametrize("quant", ["int8_w8a16", "int4_w4a16_g32"])
def test_quantized_base(quant: str, no_product: None) -> None:
    """QLoRA: the frozen base is packed in the scheme, and adapters have gradients."""
    model, rounded = adapted("qwen3_moe", 4), adapted("qwen3_moe", 4)
    for module in rounded.modules():
        if hasattr(module, "gate_up_proj"):
            given = ExpertWeights(module.gate_up_proj.data, module.down_proj.data)
            dense = given.quantize(scheme(quant)).dequantize(scheme(quant))
            module.gate_up_proj.data, module.down_proj.data = dense.w13, dense.w2
    want = gradients(rounded)
    integration.install(quant=quant)
    got = gradients(use(model, "moekit"))
    assert got.keys() == want.keys() and len(got) == 8
    assert max(error(got[n], want[n]) for n in want) < 1e-4
    del model
    integration.install()


def test_batch_invariant_experts_stay_with_peft() -> None:
    model = adapted("qwen3_moe", 2)
    want = output(use(model, "eager"))
    integration.install(batch_invariant=True)
    assert error(output(use(model, "moekit")), want) < 1e-4
    del model
    integration.install()


def test_backends_without_adapters_say_so() -> None:
    model = use(adapted("qwen3_moe", 2), "moekit")
    integration.install(experts="marlin")
    with pytest.raises(Unsupported, match="experts 'marlin' cannot.*does not take adapters"):
        output(model)
    model.base_model.model.model.layers[0].mlp.experts.get_base_layer().down_proj.requires_grad_()
    with pytest.raises(WeightsError, match="below the adapters require a gradient: freeze them"):
        output(model)
    del model
    integration.install()


def test_one_parameter_may_be_the_target(no_product: None) -> None:
    for target in TARGETS:
        model = adapted("qwen3_moe", 2, targets=[target])
        want = gradients(use(model, "eager"))
        got = gradients(use(model, "moekit"))
        assert got.keys() == want.keys() and len(got) == 4
        assert max(error(got[n], want[n]) for n in want) < 1e-4


def test_saved_file_is_read(tmp_path: Path) -> None:
    """`moekit.lora.read` finds the matrices that the operand has, by their shapes."""
    from safetensors.torch import load_file

    model = adapted("qwen3_moe", 4)
    model.save_pretrained(str(tmp_path))
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "x")).to_dict()
    tensors = load_file(tmp_path / "x" / "adapter_model.safetensors")
    use(model, "moekit")
    output(model)
    ((name, kernel), *_) = integration.kernels(model).items()
    module = name.removeprefix("base_model.model.").split(".experts")[0] + ".experts"
    made = read(tensors, config, kernel.problem, module)
    experts = dict(model.named_modules())[name]
    held: dict[str, Any] = {}
    wrapper = dict(model.named_modules())[name.split(".experts")[0] + ".experts"]
    for each in (wrapper, wrapper.base_layer):
        which = "w2" if each.parameter_name == "down_proj" else "w13"
        held[which] = operands.Operand(each, ["x"]).matrices(torch.float32)
    assert experts is wrapper.get_base_layer() and made.w13_a is not None and made.w2_a is not None
    for which, a, b in (("w13", made.w13_a[:, 0], made.w13_b), ("w2", made.w2_a, made.w2_b)):
        assert torch.equal(a, held[which][0])
        assert torch.equal(b * made.scaling, held[which][1])
    with pytest.raises(MoekitError, match="no tensor is for 'model.layers.7.mlp.experts'"):
        read(tensors, config, kernel.problem, "model.layers.7.mlp.experts")
