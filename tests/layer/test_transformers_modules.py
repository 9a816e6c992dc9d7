"""Single experts modules in the transformers integration: activations, formats, refusals."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hf_models as hfm
import pytest
import torch
from test_transformers_layer import installed, make  # noqa: F401 (an autouse fixture)
from test_transformers_models import errors
from torch import Tensor, nn

import moekit
from moekit.errors import InvalidProblem, MoekitError, UnknownBackend, Unsupported, WeightsError

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

import moekit.integrations.transformers as integration  # noqa: E402
from moekit.integrations.forward import experts_forward  # noqa: E402
from moekit.integrations.packed_layer import Layer  # noqa: E402

FP32 = torch.float32


def experts_class(model: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def module_of(model: str, name: str, dtype: torch.dtype = FP32, **config: Any) -> Any:
    sizes = dict(
        num_experts=8, num_local_experts=8, n_routed_experts=8, hidden_size=32,
        intermediate_size=48, moe_intermediate_size=48, hidden_act="silu", mlp_hidden_act="relu2",
    )  # fmt: skip
    made = SimpleNamespace(**sizes | config, _experts_implementation="moekit")
    module = experts_class(model, name)(made)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    return module.requires_grad_(False).to(dtype)


def inputs(tokens: int = 9, dtype: torch.dtype = FP32, top_k: int = 2, experts: int = 8) -> Any:
    ids = torch.rand(tokens, experts).topk(top_k).indices
    return 3 * torch.randn(tokens, 32, dtype=dtype), ids, torch.rand(tokens, top_k, dtype=dtype)


def both(module: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of moekit and of transformers."""
    ours = module(*args)
    module.config._experts_implementation = "grouped_mm"
    theirs = module(*args)
    module.config._experts_implementation = "moekit"
    return ours, theirs


def test_ids_past_the_last_expert_belong_to_other_ranks() -> None:
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    module._is_expert_parallel = True
    x, ids, weights = inputs(tokens=12)
    ids[::2, 0] = 8
    ids[3] = 8
    weights = weights.masked_fill(ids == 8, 0.0)
    ours, theirs = both(module, x, ids, weights)
    assert not ours[3].any()
    rows = torch.arange(12) != 3
    assert errors(ours[None, rows], theirs[None, rows]).max() < 1e-5


def test_no_tokens() -> None:
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    out = module(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert out.shape == (0, 32)


def fp8_experts(**options: Any) -> Any:
    """Return transformers' module for 4 fp8 experts of 256 x 128."""
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    if not set(options) <= set(inspect.signature(fp8.FP8Experts).parameters):
        pytest.skip(f"fp8 experts of this transformers have no {', '.join(options)}")
    config = SimpleNamespace(
        num_local_experts=4, hidden_size=256, moe_intermediate_size=128, hidden_act="silu",
        _experts_implementation="moekit",
    )  # fmt: skip
    wrap = importlib.import_module("transformers.integrations.moe").use_experts_implementation
    made = wrap(
        experts_class=type("Experts", (fp8.FP8Experts,), {}),
        experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    return made(config, block_size=(128, 128), **options).requires_grad_(False)


def test_transformers_fp4_experts() -> None:
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    module = fp8_experts(scale_fmt="ue8m0", expert_dtype="fp4")
    problem = moekit.MoEProblem(
        num_experts=4, top_k=2, hidden_size=256, intermediate_size=128, dtype=FP32
    )
    plain = moekit.compose(problem, "local", "reference")
    full = []
    for name in ("gate_up_proj", "down_proj"):
        module.get_parameter(name).random_(-128, 128)
        scale = module.get_parameter(f"{name}_scale_inv")
        scale.copy_(torch.randint(-6, -3, scale.shape).float().exp2())
        full.append(
            fp8.Fp8Dequantize(None)._dequantize_one(module.get_parameter(name), scale, FP32)
        )
    x, routing = torch.randn(6, 256), moekit.route(torch.randn(6, 4), 2)
    want = plain(x, plain.pack(moekit.ExpertWeights(*full)), routing)
    got = module(x, routing.topk_ids, routing.topk_weights)
    assert errors(got[None], want[None]).max() < 1e-5
    kernel = Layer.of(module).kernel
    assert kernel is not None and kernel.problem.quant.name == "mxfp4_w4a16"
    scale.fill_(float("nan"))
    with pytest.raises(WeightsError, match="cannot run Experts in mxfp4_w4a16: .* not finite"):
        module(x, routing.topk_ids, routing.topk_weights)


def test_fp4_with_other_scales() -> None:
    module = fp8_experts(expert_dtype="fp4")
    with pytest.raises(
        Unsupported, match=r"cannot run Experts: .*fp4 with scales in e8m0 .got.*int8"
    ):
        module(torch.randn(3, 256), torch.tensor([[0, 1]] * 3), torch.rand(3, 2))


def test_transformers_fp8_experts() -> None:
    module = fp8_experts()
    scheme = moekit.SCHEMES["fp8_block"]
    full = moekit.ExpertWeights(torch.randn(4, 256, 256) / 16, torch.randn(4, 256, 128) / 11)
    stored = full.quantize(scheme)
    module.gate_up_proj.data, module.down_proj.data = stored.w13, stored.w2
    module.gate_up_proj_scale_inv.data = stored.w13_scale
    module.down_proj_scale_inv.data = stored.w2_scale
    x = torch.randn(6, 256, dtype=torch.bfloat16)
    routing = moekit.route(torch.randn(6, 4), 2)
    out = module(x, routing.topk_ids, routing.topk_weights)
    kernel = Layer.of(module).kernel
    assert kernel is not None and kernel.problem.quant.name == "fp8_block"
    problem = kernel.problem.replace(quant="none", dtype=FP32)
    plain = moekit.compose(problem, "local", "torch")
    weights = plain.pack(stored.canonical(kernel.problem).dequantize(scheme))
    want = plain(x.float(), weights, routing)
    assert errors(out[None], want[None]).max() < 9e-2

    module.activation_scheme = "static"
    integration.repack(module)
    with pytest.raises(Unsupported, match="static activations"):
        module(x, routing.topk_ids, routing.topk_weights)
    module.activation_scheme = "dynamic"
    integration.install(quant="int8_w8a16")
    with pytest.raises(Unsupported, match="quantized already"):
        module(x, routing.topk_ids, routing.topk_weights)


# -- refusals ------------------------------------------------------------------------


def test_options_are_checked_at_once() -> None:
    with pytest.raises(UnknownBackend, match="nonesuch"):
        integration.install(experts="nonesuch")
    with pytest.raises(UnknownBackend, match="nonesuch"):
        integration.install(dispatcher="nonesuch")
    with pytest.raises(InvalidProblem, match="int3"):
        integration.install(quant="int3")


def test_a_scheme_that_needs_scales_from_a_checkpoint() -> None:
    integration.install(quant="fp8_tensor_static")
    with pytest.raises(WeightsError, match="w13_input_scale is missing"):
        module_of("qwen3_moe", "Qwen3MoeExperts")(*inputs())


def test_a_transformers_without_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.uninstall()
    moe = importlib.import_module("transformers.integrations.moe")
    monkeypatch.delattr(moe, "ExpertsInterface")
    with pytest.raises(MoekitError, match=r"pip install 'moekit\[hf\]'"):
        integration.install()


def test_a_model_without_experts() -> None:
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        dense = transformers.LlamaConfig(num_hidden_layers=1)
        model = transformers.AutoModelForCausalLM.from_config(dense)
        model.set_experts_implementation("moekit")
        transformers.AutoModelForCausalLM.from_config(dense, experts_implementation="moekit")


def test_quantized_modules_outside_the_interface() -> None:
    """transformers replaces gpt-oss's experts by kernels for mxfp4, where it has these."""
    base = importlib.import_module("transformers.quantizers.base").HfQuantizer
    mxfp4 = importlib.import_module("transformers.integrations.mxfp4")

    class Quantizer(base):  # type: ignore[misc, valid-type]
        quantization_config = SimpleNamespace(quant_method="mxfp4")
        pre_quantized = False
        is_serializable = is_trainable = False

        def __init__(self) -> None: ...

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            model.model.layers[1].mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)

    Quantizer().preprocess_model(model=make(hfm.GPT_OSS, how="eager"))
    with pytest.raises(Unsupported, match=r"Mxfp4GptOssExperts at model\.layers\.1.*dequantized"):
        Quantizer().preprocess_model(model=make(hfm.GPT_OSS))


class Odd(nn.Module):
    """An experts module with one fault."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        gate_up, down = torch.randn(8, 96, 32), torch.randn(8, 32, 48)
        for name, value in (dict(gate_up_proj=gate_up, down_proj=down) | parameters).items():
            if value is not None:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def act_fn(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no weights": (lambda: Odd(down_proj=None), "Odd: it must have .*found: gate_up_proj"),
    "a stranger's parameter": (lambda: Odd(scale=torch.ones(8)), "parameters scale are unknown"),
    "integers": (
        lambda: Odd(down_proj=torch.ones(8, 32, 48, dtype=torch.int8)),
        "down_proj must .*got torch.float32 .* and torch.int8",
    ),
    "packed": (
        lambda: Odd(gate_up_proj=torch.ones(8, 96, 16, dtype=torch.uint8)),
        "gate_up_proj and down_proj must .*got torch.uint8.*dequantized",
    ),
    "two dimensions": (lambda: Odd(down_proj=torch.ones(8, 48)), "must have 3 dimensions"),
    "no data": (
        lambda: Odd(down_proj=torch.ones(8, 32, 48, device="meta")),
        "down_proj of Odd has no data",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_moekit_cannot_run(case: str) -> None:
    build, match = REFUSED[case]
    with pytest.raises(MoekitError, match=match):
        experts_forward(build(), *inputs())
    experts_forward(Odd(), *inputs())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu2_and_mul": lambda x: x.relu().square(),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_recognized_by_their_numbers(kind: str) -> None:
    """test_transformers_every_module.py compares the modules of transformers."""
    module = Odd()
    module.act_fn = ACTIVATIONS[kind]  # type: ignore[method-assign]
    experts_forward(module, *inputs())
    kernel = Layer.of(module).kernel
    assert kernel is not None and kernel.problem.activation == moekit.Activation(kind)


def test_an_activation_that_moekit_does_not_know() -> None:
    for unknown in (lambda x: nn.functional.silu(x).clamp(max=3.0), torch.tanh):
        module = Odd()
        module.act_fn = unknown  # type: ignore[method-assign]
        with pytest.raises(Unsupported, match="none of moekit's activations"):
            experts_forward(module, *inputs())


def test_weights_on_the_input_of_several_experts() -> None:
    with pytest.raises(Unsupported, match=r"Odd: router weights .* num_experts_per_tok=2"):
        experts_forward(Odd(), *inputs(), weight_on_input=True)


def test_a_norm_after_each_expert() -> None:
    module = Odd()
    module.has_post_expert_norm = True
    with pytest.raises(Unsupported, match="norm after each expert"):
        experts_forward(module, *inputs())


# -- processes -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_packs() -> None:
    """The child has no such thread, and does not wait for it."""
    packs, forked = threading.Event(), threading.Event()
    module = Odd()

    def act_fn(x: Tensor) -> Tensor:
        packs.set()
        forked.wait(60)
        return nn.functional.silu(x)

    module.act_fn = act_fn  # type: ignore[method-assign]
    thread = threading.Thread(target=experts_forward, args=(module, *inputs()))
    thread.start()
    assert packs.wait(60)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=integration.repack, args=(nn.Module(),))
    child.start()
    forked.set()
    child.join(60)
    code = child.exitcode
    child.kill()
    thread.join()
    assert code == 0
