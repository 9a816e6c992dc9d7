"""The state of the transformers integration between calls: packing, changes, freeing."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import hf_models as hfm
import pytest
import torch
from test_transformers_models import errors, logits
from torch import Tensor, nn

from moekit.errors import WeightsError

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

import moekit.integrations.transformers as integration  # noqa: E402
from moekit.integrations import forward  # noqa: E402
from moekit.integrations.packed_layer import Layer  # noqa: E402

FP32 = torch.float32


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


def make(hf: hfm.HFModel, dtype: torch.dtype = FP32, seed: int = 0, how: str = "moekit") -> Any:
    """Return a tiny model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(vocab_size=hfm.VOCAB, hidden_size=hf.hidden_size, num_experts_per_tok=hf.top_k)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = AutoConfig.for_model(hf.name, **sizes | dict(hf.config))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation=how
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def experts_of(model: Any) -> list[nn.Module]:
    return [model.get_submodule(name) for name in integration.kernels(model)]


@torch.no_grad()
def eager_logits(model: Any) -> Tensor:
    """Return the logits of the same weights without moekit."""
    copied = copy.deepcopy(model)
    copied.set_experts_implementation("eager")
    return logits(copied)


def check(model: Any, bound: float = 1e-4) -> None:
    assert errors(logits(model), eager_logits(model)).max() < bound


# -- weights that change --------------------------------------------------------------------


def _in_place(module: nn.Module) -> None:
    module.down_proj.mul_(-0.5)


def _bias_in_place(module: nn.Module) -> None:
    module.get_parameter("gate_up_proj_bias").add_(1.0)


def _load_state_dict(module: nn.Module) -> None:
    module.load_state_dict({k: v.flip(0) for k, v in module.state_dict().items()})


def _assigned(module: nn.Module) -> None:
    module.load_state_dict({k: v.flip(0) for k, v in module.state_dict().items()}, assign=True)


def _new_parameter(module: nn.Module) -> None:
    values = module.down_proj.flip(0)
    del module.down_proj  # so that its address may be used again
    module.down_proj = nn.Parameter(values)


def _new_data(module: nn.Module) -> None:
    module.gate_up_proj.data = module.gate_up_proj.data.flip(0)


def _new_data_at_the_old_address(module: nn.Module) -> None:
    address = module.gate_up_proj.data_ptr()
    values = module.gate_up_proj.flip(0)
    module.gate_up_proj.data = torch.empty(0)
    tries = [torch.empty_like(values) for _ in range(64)]
    again = [t for t in tries if t.data_ptr() == address]
    module.gate_up_proj.data = (again or tries)[0].copy_(values)


def _view_of_the_same_memory(module: nn.Module) -> None:
    down = module.down_proj
    module.down_proj = nn.Parameter(down[:1].expand(down.shape), requires_grad=False)
    assert module.down_proj.data_ptr() == down.data_ptr()


def _optimizer_step(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.3).step()


CHANGES = [
    _in_place, _load_state_dict, _assigned, _new_parameter, _new_data,
    _new_data_at_the_old_address, _view_of_the_same_memory, _optimizer_step,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hf", [hfm.QWEN3_MOE, hfm.GPT_OSS], ids=lambda hf: hf.name)
def test_changed_weights_are_noticed(hf: hfm.HFModel, change: Callable[[nn.Module], None]) -> None:
    """Weights are read in place (qwen3_moe) or copied when packed (gpt_oss)."""
    model = make(hf)
    before = logits(model)
    with torch.no_grad():
        change(experts_of(model)[0])
    assert errors(eager_logits(model), before).max() > 1e-2
    check(model)


def test_changed_biases_and_dtypes_are_noticed() -> None:
    model = make(hfm.GPT_OSS)
    check(model)
    with torch.no_grad():
        _bias_in_place(experts_of(model)[0])
    check(model)
    model.to(torch.bfloat16)
    assert errors(logits(model), eager_logits(model)).median() < 3e-2
    assert {k.problem.dtype for k in integration.kernels(model).values()} == {torch.bfloat16}


def test_unchanged_weights_are_packed_once() -> None:
    model = make(hfm.GPT_OSS)
    logits(model)
    layers = Layer.find(model)
    packed = {name: layer.packed for name, layer in layers.items()}
    assert len(packed) == 2 and None not in packed.values()
    logits(model)
    with torch.inference_mode():
        model(hfm.token_ids(sequence=3))
    assert all(layers[name].packed is before for name, before in packed.items())
    assert len({id(layer.kernel) for layer in layers.values()}) == 1  # equal layers share it


def test_repack_after_changes_that_torch_does_not_record() -> None:
    model = make(hfm.GPT_OSS)
    before = logits(model)
    experts_of(model)[0].down_proj.data.mul_(-0.5)
    assert torch.equal(logits(model), before)  # as documented
    integration.repack(model)
    assert integration.kernels(model) == {}
    check(model)


def test_copies_and_pickles_have_their_own_weights() -> None:
    model = make(hfm.GPT_OSS)
    logits(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert integration.kernels(other) == {}
        with torch.no_grad():
            other.model.layers[0].mlp.experts.down_proj.mul_(2.0)
        check(other)
    check(model)
    assert errors(logits(copied), logits(model)).max() > 1e-2


def test_models_created_in_inference_mode_run() -> None:
    with torch.inference_mode():
        model = make(hfm.GPT_OSS)
        want = logits(model)
    assert errors(logits(model), want).max() == 0
    check(model)


# -- install, uninstall ---------------------------------------------------------------------


def test_installing_again() -> None:
    model = make(hfm.QWEN3_MOE)
    logits(model)
    name, layer = next(iter(Layer.find(model).items()))
    packed = layer.packed
    integration.install()
    assert layer.packed is packed
    integration.install(experts="reference", dispatcher="local")
    assert integration.kernels(model) == {}
    check(model)
    assert integration.kernels(model)[name].experts.spec.name == "reference"


def test_uninstall_leaves_nothing() -> None:
    moe = importlib.import_module("transformers.integrations.moe")
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    llama4 = importlib.import_module("transformers.models.llama4.modeling_llama4")
    dbrx = importlib.import_module("transformers.models.dbrx.modeling_dbrx")
    quantizer = importlib.import_module("transformers.quantizers.base").HfQuantizer
    owners = (moe.ExpertsInterface, base, llama4.Llama4TextMoe, dbrx.DbrxExperts, quantizer)
    integration.uninstall()
    clean = [dict(vars(owner)) for owner in owners]
    keys = set(moe.ALL_EXPERTS_FUNCTIONS.keys())
    assert "moekit" not in keys
    for _ in range(2):
        integration.install()
    assert set(moe.ALL_EXPERTS_FUNCTIONS.keys()) == keys | {"moekit"}
    assert [dict(vars(owner)) for owner in owners] != clean
    moe.ExpertsInterface.register("someone_elses", lambda *args: None)
    try:
        integration.uninstall()
        assert set(moe.ALL_EXPERTS_FUNCTIONS.keys()) == keys | {"someone_elses"}
    finally:
        moe.ExpertsInterface._global_mapping.pop("someone_elses")
    assert [dict(vars(owner)) for owner in owners] == clean
    with pytest.raises(ValueError, match='experts_implementation="moekit"'):
        make(hfm.QWEN3_MOE)


def test_backends_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read whenever a layer is packed, also if an equal one has a kernel."""

    def chosen(model: Any) -> set[str]:
        check(model)
        return {k.experts.spec.name for k in integration.kernels(model).values()}

    before, after = make(hfm.MIXTRAL), make(hfm.MIXTRAL, seed=1)
    assert chosen(before) == {"torch"}
    monkeypatch.setenv("MOEKIT_EXPERTS", "reference")
    assert chosen(after) == {"reference"} and chosen(before) == {"torch"}
    integration.repack(before)
    assert chosen(before) == {"reference"}


# -- memory ---------------------------------------------------------------------------------


def test_memory_doubles_only_if_weights_are_copied() -> None:
    in_place, copied = make(hfm.QWEN3_MOE), make(hfm.GPT_OSS)
    assert integration.memory(in_place).total == 0
    for model in (in_place, copied):
        logits(model)
    e, h, i, layers = 8, 96, 64, 2
    weights = layers * e * 3 * h * i * 4
    assert integration.memory(in_place) == integration.ExpertMemory(weights, 0)
    found = integration.memory(copied)
    biases = layers * e * (2 * i + h) * 4
    assert found.parameters == weights + biases
    assert weights <= found.packed <= found.parameters
    assert found.total == found.parameters + found.packed


def test_freed_parameters() -> None:
    integration.install(free_original=True)
    model, whole = make(hfm.GPT_OSS), make(hfm.GPT_OSS, how="eager")
    want = logits(whole)
    assert errors(logits(model), want).max() < 1e-4
    assert errors(logits(model), want).max() < 1e-4
    found = integration.memory(model)
    assert found.parameters < 0.02 * found.packed
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 96, 128)

    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.experts has no weights to save"):
        model.state_dict()
    with pytest.raises(WeightsError, match="pass assign=True"):
        model.load_state_dict(whole.state_dict())
    for lose, *args in (
        (integration.install,),
        (integration.uninstall,),
        (integration.repack, model),
    ):
        with pytest.raises(WeightsError, match="delete that model first"):
            lose(*args)
    with pytest.raises(WeightsError, match="load the model again"):
        logits(copy.deepcopy(model))
    assert errors(logits(model), want).max() < 1e-4  # these have no effect
    bias = model.model.layers[0].mlp.experts.down_proj_bias
    with torch.no_grad():
        bias.add_(1.0)
    with pytest.raises(WeightsError, match="gate_up_proj of GptOssExperts has no data"):
        logits(model)

    other = make(hfm.GPT_OSS, seed=1, how="eager")
    model.load_state_dict(other.state_dict(), assign=True)
    assert errors(logits(model), logits(other)).max() < 1e-4
    with pytest.raises(WeightsError, match="delete that model first"):
        integration.uninstall()
    del model, bias, args
    gc.collect()
    integration.uninstall()


@torch.no_grad()
def test_freed_parameters_serve_inputs_of_other_dtypes() -> None:
    """Under autocast, and afterwards. A call with another top-k fails, and loses no weights."""
    integration.install(free_original=True)
    model = make(hfm.GPT_OSS)
    module = model.model.layers[0].mlp.experts
    ids, weights = torch.rand(5, 8).topk(2).indices, torch.rand(5, 2)
    x = torch.randn(5, 96)
    want = module(x, ids, weights)
    assert module.gate_up_proj.is_meta
    low = module(x.bfloat16(), ids, weights)
    assert low.dtype == torch.bfloat16
    assert (low - want).norm() < 2e-2 * want.norm()
    with pytest.raises(WeightsError, match="load the model again"):
        module(x, ids[:, :1], weights[:, :1])
    assert torch.equal(module(x, ids, weights), want)


def test_parameters_that_are_read_in_place_are_not_freed() -> None:
    integration.install(free_original=True)
    model = make(hfm.QWEN3_MOE)
    check(model)
    assert integration.memory(model).packed == 0
    assert all(p.device.type == "cpu" for p in model.parameters())


# -- compilation -----------------------------------------------------------------------------


def run_first(block: torch.nn.Module) -> None:
    """Run the block once, if torch cannot bind a module while it compiles."""
    if not forward.BINDS_MODULES:
        block(torch.randn(1, 3, 96))


def test_compiled_blocks() -> None:
    """One graph serves all token counts, and a copy of the block runs on its own weights."""
    from torch._dynamo.testing import CompileCounter

    block = make(hfm.QWEN3_MOE).model.layers[0].mlp
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        run_first(block)
        for tokens in (19, 7, 5, 11):
            x = torch.randn(2, tokens, 96)
            assert errors(compiled(x), block(x)).max() < 1e-5
        assert counter.frame_count == 1
        copied = copy.deepcopy(block)
        run_first(copied)
        block.experts.down_proj.mul_(-1)
        assert errors(compiled(x), block(x)).max() < 1e-5
        out = torch.compile(copied, backend=counter, fullgraph=True, dynamic=True)(x)
        assert errors(out, copied(x)).max() < 1e-5
        assert errors(out, block(x)).max() > 1
    torch._dynamo.reset()


@pytest.mark.skipif(not forward.BINDS_MODULES, reason=forward.RUN_FIRST)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_blocks_with_cuda_graphs() -> None:
    block = make(hfm.QWEN3_MOE, torch.bfloat16).model.layers[0].mlp.cuda()
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for tokens in (16, 16, 16, 3, 3, 3, 16):  # a graph is recorded at the second call
            x = torch.randn(1, tokens, 96, dtype=torch.bfloat16, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            assert errors(compiled(x).float().cpu(), block(x).float().cpu()).max() < 1.5e-2
    torch._dynamo.reset()


def test_weights_are_packed_before_compiled_code_runs() -> None:
    """CUDA graphs must not capture it."""
    packed_when_compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        packed_when_compiled.append(Layer.of(experts).packed is not None)
        return graph

    block = make(hfm.GPT_OSS).model.layers[0].mlp
    experts = block.experts
    with torch.no_grad():
        run_first(block)
        torch.compile(block, backend=backend, fullgraph=True)(torch.randn(2, 5, 96))
    assert packed_when_compiled == [True]
    torch._dynamo.reset()


def test_layers_compiled_one_by_one() -> None:
    """They share compiled code, but each must run on its own weights."""
    model = make(hfm.LLAMA4)
    want = eager_logits(model)
    if not forward.BINDS_MODULES:
        logits(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert errors(logits(model), want).max() < 1e-4
    torch._dynamo.reset()


def test_layers_that_cannot_be_captured_have_the_tag() -> None:
    model = make(hfm.QWEN3_MOE)
    logits(model)
    found = next(iter(Layer.find(model).values()))
    assert not found.graph_safe  # on the CPU
    seen: list[object] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(node.target for node in graph.graph.nodes if "moekit" in str(node.target))
        return graph.forward

    for graphs in (False, True):
        seen.clear()
        torch._dynamo.reset()
        found.graph_safe = graphs
        layer = model.model.layers[0].mlp.experts
        inputs = torch.randn(5, 96), torch.rand(5, 8).topk(3).indices, torch.rand(5, 3)
        with torch.no_grad():
            torch.compile(layer, backend=compiler)(*inputs)
        (operator,) = seen
        assert (torch.Tag.cudagraph_unsafe in operator.tags) != graphs
    torch._dynamo.reset()


def test_the_operator_passes_opcheck() -> None:
    model = make(hfm.QWEN3_MOE)
    logits(model)
    number = next(iter(Layer.find(model).values())).number
    inputs = torch.randn(5, 96), torch.rand(5, 8).topk(3).indices, torch.rand(5, 3)
    torch.library.opcheck(
        torch.ops.moekit.transformers_experts.default, (*inputs, [], number, False)
    )
