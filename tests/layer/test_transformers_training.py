"""Models of transformers in train mode: every gradient, and what happens between the calls."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
import torch.distributed as dist
from test_transformers_gradients import error
from test_transformers_layer import check, experts_of, installed, make  # noqa: F401 (a fixture)
from test_transformers_models import MODELS, logits, outside
from test_transformers_modules import inputs, module_of
from torch import Tensor, nn

from moekit.errors import Unsupported

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

import moekit.integrations.transformers as integration  # noqa: E402
from moekit.integrations.packed_layer import Layer  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
OUTSIDE = ("dbrx", "longcat_flash", "step3p7")


def built(name: str) -> Any:
    """Return a tiny model in train mode whose experts moekit computes."""
    model = outside(name) if name in OUTSIDE else make(MODELS[name])
    model.set_experts_implementation("moekit")
    return model.train()


def loss_of(model: Any, seed: int = 1) -> Tensor:
    return model(hfm.token_ids(seed=seed), use_cache=False)[0].float().pow(2).mean()


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of one backward. They stay in the parameters."""
    model.zero_grad()
    loss_of(model).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def eager(model: Any) -> Any:
    copied = copy.deepcopy(model)
    copied.set_experts_implementation("eager")
    return copied


def compare(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 1e-4) -> None:
    assert got.keys() == want.keys() and len(want) > 2
    found = {name: error(got[name], want[name]) for name in want}
    assert max(found.values()) < bound, found


@pytest.mark.parametrize("name", [*MODELS, *OUTSIDE])
def test_gradients_of_every_parameter(name: str) -> None:
    """One step of an optimizer moves every expert that had tokens, and no other one."""
    model = built(name)
    theirs = eager(model)
    want, got = gradients(theirs), gradients(model)
    compare(got, want)
    for each in (model, theirs):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    before = built(name)
    experts = [n for n in want if "experts." in n and "shared" not in n and "router" not in n]
    assert len(integration.kernels(model)) == 2 and len(experts) >= 4
    for path in experts:
        moved, same, was = (m.get_parameter(path) for m in (model, theirs, before))
        assert error(moved.detach() - was, same - was) < 1e-4
        if was.dim() == 3:
            had_tokens = want[path].flatten(1).any(1)
            assert torch.equal((moved != was).flatten(1).any(1), had_tokens)
    with torch.no_grad():
        assert error(loss_of(model), loss_of(theirs)) < 1e-4


# -- frozen experts -------------------------------------------------------------------------


def freeze(model: Any) -> Any:
    """Leave only the attention to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    return model


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_attention_over_frozen_experts(name: str) -> None:
    """The experts are packed once, also where train and eval calls alternate in train mode."""
    model = freeze(built(name))
    theirs = eager(model)
    want = gradients(theirs)
    compare(gradients(model), want)
    packed = [layer.packed for layer in Layer.find(model).values()]
    logits(model)
    compare(gradients(model), want)
    assert [layer.packed for layer in Layer.find(model).values()] == packed
    check(model.eval())
    compare(gradients(model.train()), want)


def test_attention_over_experts_that_are_quantized_when_packed() -> None:
    integration.install(quant="int8_w8a16")
    model = freeze(built("gpt_oss"))
    got, theirs = gradients(model), eager(model)
    assert {k.problem.quant.name for k in integration.kernels(model).values()} == {"int8_w8a16"}
    for experts in (m for m in theirs.modules() if hasattr(m, "gate_up_proj")):
        for name in ("gate_up_proj", "down_proj"):
            weight = experts.get_parameter(name).data
            scale = weight.abs().amax(1, keepdim=True) / 127  # of each output; these are (E, K, N)
            weight.copy_((weight / scale).round() * scale)
    compare(got, gradients(theirs), 2e-3)


# -- what trainers do -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_autocast(name: str) -> None:
    model = built(name)
    exact = gradients(eager(model))
    with torch.autocast("cpu", BF16):
        ours, theirs = gradients(model), gradients(eager(model))
    assert {k.problem.dtype for k in integration.kernels(model).values()} == {BF16}
    assert {g.dtype for g in ours.values()} == {FP32}
    found = torch.tensor([[error(g[n], exact[n]) for n in exact] for g in (ours, theirs)])
    assert found[0].median() < 1.3 * found[1].median()
    compare(gradients(model), exact)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_activation_checkpointing(name: str, reentrant: bool, frozen: bool) -> None:
    model = built(name)
    if frozen:
        freeze(model)
    model.enable_input_require_grads()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compare(gradients(model), want, 1e-5)
    compare(gradients(model), want, 1e-5)


def test_training_keeps_no_packed_copy() -> None:
    """Calls without gradients pack again, and see the weights after each step."""
    model = built("gpt_oss")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        gradients(model)
        assert integration.memory(model).packed == 0 and len(integration.kernels(model)) == 2
        optimizer.step()
        check(model.eval())
        assert integration.memory(model).packed > 0
        model.train()


def test_parameters_that_a_trainer_swaps() -> None:
    """A flat parameter whose views replace the module's parameters during a call."""
    module = module_of("gpt_oss", "GptOssExperts", swiglu_alpha=1.702, swiglu_limit=7.0)
    x, ids, weights = inputs()
    own = dict(module.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in own.values()]).requires_grad_()

    def call(how: str) -> Tensor:
        module.config._experts_implementation = how
        parts = flat.split([p.numel() for p in own.values()])
        for (name, p), part in zip(own.items(), parts, strict=True):
            module._parameters[name] = part.view(p.shape)
        out = module(x, ids, weights)
        module._parameters.update(own)
        return torch.autograd.grad(out.pow(2).mean(), flat)[0]

    assert error(call("moekit"), call("eager")) < 1e-5
    with torch.no_grad():
        flat.mul_(-0.5)
    assert error(call("moekit"), call("eager")) < 1e-5


def test_fsdp() -> None:
    """FSDP2 frees the whole parameters after a call, and gathers them for the backward."""
    from torch.distributed.fsdp import fully_shard

    model = built("gpt_oss")
    theirs = eager(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            want, got = gradients(theirs), gradients(model)
            compare({name: g.full_tensor() for name, g in got.items()}, want)
            for each in (model, theirs):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            assert error(logits(model.eval()), logits(theirs)) < 1e-4
            model.train().reshard()  # which FSDP leaves to a backward
    finally:
        dist.destroy_process_group()


def test_ids_past_the_last_expert_have_no_gradient() -> None:
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    module._is_expert_parallel = True
    x, ids, weights = inputs(tokens=12)
    ids[::2, 0] = 8
    ids[3] = 8
    weights = weights.masked_fill(ids == 8, 0.0).requires_grad_()
    module(x, ids, weights).sum().backward()
    assert torch.equal(weights.grad != 0, ids < 8)


def test_compiled_models_break_the_graph() -> None:
    block = built("qwen3_moe").model.layers[0].mlp
    x, results = torch.randn(2, 5, 96), []
    for call in (block, torch.compile(block, backend="eager")):
        block.zero_grad()
        call(x).pow(2).mean().backward()
        results.append({n: p.grad.clone() for n, p in block.named_parameters()})
    compare(*results, 1e-5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Skip calling `torch.compiler.disable"):
        torch.compile(block, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


# -- LoRA -----------------------------------------------------------------------------------

LORA: dict[str, dict[str, Any]] = {
    "attention": dict(target_modules=["q_proj", "v_proj"]),
    "experts": dict(
        target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("target", LORA)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_lora(name: str, target: str, dtype: torch.dtype) -> None:
    """Every adapter has a gradient, also one that PEFT adds to the experts' parameters."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model = make(MODELS[name], how="eager").train()
    config = peft.LoraConfig(r=2, lora_dropout=0.0, **LORA[target])
    model = peft.get_peft_model(model, config)
    for n, parameter in model.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(parameter, std=0.1)
    found: list[Any] = []
    for how in ("eager", "moekit"):
        model.base_model.model.set_experts_implementation(how)
        with torch.autocast("cpu", BF16, enabled=dtype is BF16):
            found.append((gradients(model), logits(model.base_model.model)))
    (want, outputs), (got, ours) = found
    assert all("lora" in n for n in want) and all(g.any() for g in got.values())
    if dtype is FP32:
        compare(got, want)
        assert error(ours, outputs) < 1e-4
    else:
        assert torch.tensor([error(got[n], want[n]) for n in want]).median() < 0.1


# -- what has no gradients ------------------------------------------------------------------

INT8 = dict(quant="int8_w8a16")
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], object], str]] = {
    "quantized weights": (INT8, lambda model: None, "parameters require a gradient.*int8_w8a16"),
    "batch-invariant": (
        dict(batch_invariant=True),
        freeze,
        "training=True and batch_invariant=True exclude each other",
    ),
    "freed": (
        dict(free_original=True),
        lambda model: (freeze(model), logits(model)),
        "free_original=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_without_a_backward(case: str) -> None:
    """They run, as many models run outside torch.no_grad(). Their backward raises the reason."""
    options, change, match = REFUSED[case]
    model = built("gpt_oss").eval()
    want = logits(eager(model))
    integration.install(**options)
    change(model)
    for _ in range(2):
        out = model(hfm.token_ids(), use_cache=False).logits
        assert error(out.detach(), want) < 5e-2
        with pytest.raises(Unsupported, match=f"moekit cannot train GptOssExperts: .*{match}"):
            out.sum().backward()
    del model, out
    integration.install()


# -- programs -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("dtype", "first", "apart"), [("float32", 1e-4, 0.1), ("bfloat16", 0.05, 0.3)]
)
def test_learning_as_with_eager_experts(dtype: str, first: float, apart: float) -> None:
    """Training from scratch: the largest distance of the curves in 8 steps, and in all.

    A rounding that sends a token to another expert changes the later steps.
    """
    program = runpy.run_path(str(ROOT / "benchmarks" / "loss_curves.py"))
    text = program["documentation"]()
    ours, theirs = (
        program["losses"](how, dtype, 0.0, 30, text, rows=2) for how in ("moekit", "eager")
    )
    assert program["distances"](ours[:8], theirs[:8])[0] < first
    assert program["distances"](ours, theirs)[0] < apart
    assert sum(ours[-10:]) / 10 < ours[0] - 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls an old name of transformers
@pytest.mark.parametrize("adapters", [True, False])
def test_the_example_trains(
    adapters: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "finetune.py"
    if not adapters:
        monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    assert runpy.run_path(str(path))["main"](["--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "experts that moved: 0" in said and "experts that moved: 3" in said
