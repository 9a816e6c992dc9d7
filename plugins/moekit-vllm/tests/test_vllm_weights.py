"""Quantized layers of vLLM, read for moekit: the checkpoint's numbers on each rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

import checkpoint_files as files  # noqa: E402
import vllm_quantized_layers as layers  # noqa: E402
from moekit_vllm import problem as problems  # noqa: E402
from moekit_vllm import weights as readers  # noqa: E402

from moekit import ExpertWeights, MoEProblem, ParallelConfig  # noqa: E402
from moekit.checkpoint import Checkpoint, load_experts  # noqa: E402
from moekit.errors import Unsupported  # noqa: E402

H, I = 256, 512
RANKS = [(1, 0), (2, 0), (2, 1)]


pytestmark = pytest.mark.usefixtures("vllm_process")


Make = Callable[..., files.Layer]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[Any, files.Layer] = {}

    def make(name: str, h: int = H, i: int = I) -> files.Layer:
        if (name, h, i) not in made:
            format = layers.FORMATS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name, h, i] = files.write(
                folder, format.packer, format.config, E=layers.E, H=h, I=i
            )
        return made[name, h, i]

    return make


def loaded(name: str, made: files.Layer, tp_size: int = 1, tp_rank: int = 0) -> Any:
    sizes = made.sizes["hidden_size"], made.sizes["intermediate_size"]
    layer = layers.empty_layer(layers.FORMATS[name], *sizes, tp_size=tp_size, tp_rank=tp_rank)
    with layers.rank_of_loaders(tp_rank):
        return layers.load(layer, made)


def numbers(weights: ExpertWeights, problem: MoEProblem) -> tuple[Tensor, Tensor]:
    """Return the fp32 values that the weights represent."""
    weights.check(problem)
    plain = weights.canonical(problem).dequantize(problem.quant)
    return plain.w13, plain.w2


@pytest.mark.parametrize(("tp_size", "tp_rank"), RANKS)
@pytest.mark.parametrize("name", layers.FORMATS)
def test_reads_what_the_checkpoint_holds(
    name: str, tp_size: int, tp_rank: int, checkpoint: Make
) -> None:
    format, made = layers.FORMATS[name], checkpoint(name)
    layer = loaded(name, made, tp_size, tp_rank)
    problem, read = problems.load(layer, layer.quant_method)
    assert problem.quant.name == format.scheme
    whole = problem.replace(
        intermediate_size=I,
        parallel=ParallelConfig(tp_size=tp_size, tp_rank=tp_rank, dp_size=1),
    )
    with Checkpoint(made.path) as opened:
        expected = numbers(load_experts(opened, None, 0, whole), whole)
    for got, want in zip(numbers(read, problem), expected, strict=True):
        assert torch.equal(got, want)
    if read.w13_input_scale is not None:
        assert torch.equal(read.w13_input_scale, torch.full((layers.E,), 0.03))
    memory = {p.data_ptr() for p in layer.parameters()}
    assert format.views == (read.w13.data_ptr() in memory) == (read.w2.data_ptr() in memory)


@pytest.mark.parametrize("name", ["fp8-block", "ct-int4-zp", "awq", "ct-nvfp4"])
def test_the_experts_of_a_rank(name: str, checkpoint: Make, monkeypatch: Any) -> None:
    """Under expert parallelism vLLM's first rank of two has the first half of the experts."""
    from vllm.config import get_current_vllm_config

    parallel = get_current_vllm_config().parallel_config
    monkeypatch.setattr(parallel, "enable_expert_parallel", True)
    made = checkpoint(name)
    layer = loaded(name, made, 2, 0)
    problem, read = problems.load(layer, layer.quant_method)
    assert (problem.parallel.ep_size, problem.intermediate_size, read.num_experts) == (2, I, 2)
    w13, w2 = numbers(read, problem)
    assert torch.equal(w13, torch.cat([made.gate, made.up], dim=1)[:2])
    assert torch.equal(w2, made.down[:2])


def test_fp8_blocks_that_tensor_parallelism_cuts(checkpoint: Make) -> None:
    """I = 384 on two ranks is 192 neurons each: vLLM divides blocks into 64 x 64."""
    made = checkpoint("fp8-block", H, 384)
    for rank in range(2):
        layer = loaded("fp8-block", made, 2, rank)
        assert layer.quant_method.weight_scale_refine == (2, 2)
        problem, read = problems.load(layer, layer.quant_method)
        assert problem.intermediate_size == 256
        real = slice(0, 192) if rank == 0 else slice(64, 256)
        mine = slice(192 * rank, 192 * (rank + 1))
        w13, w2 = numbers(read, problem)
        assert torch.equal(w13.unflatten(1, (2, 256))[:, 0, real], made.gate[:, mine])
        assert torch.equal(w13.unflatten(1, (2, 256))[:, 1, real], made.up[:, mine])
        assert torch.equal(w2[:, :, real], made.down[:, :, mine])
        assert int(w2.count_nonzero()) == int(made.down[:, :, mine].count_nonzero())


# -- what moekit knows of vLLM -------------------------------------------------------------

# What a method offers to the rest of vLLM, in 0.26 to 0.33. `Extended` replaces what depends on
# vLLM's kernel or on parameters that moekit has packed.
_KNOWN_MEMBERS = {
    "apply", "apply_monolithic", "create_weights", "get_fused_moe_quant_config",
    "has_unpadded_output", "is_monolithic", "maybe_make_prepare_finalize", "maybe_roundup_sizes",
    "method_name", "mk_can_overlap_shared_experts", "select_gemm_impl", "skip_forward_padding",
    "supports_eplb", "supports_internal_mk", "topk_indices_dtype", "uses_weight_scale_2_pattern",
}  # fmt: skip


def test_methods_offer_nothing_new() -> None:
    """A version that fails here has a member to read about, and perhaps to replace."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    members = {name for name in vars(FusedMoEMethodBase) if not name.startswith("_")}
    assert members <= _KNOWN_MEMBERS


def test_vllm_has_the_methods_that_are_read() -> None:
    import vllm.model_executor.layers

    (folder,) = vllm.model_executor.layers.__path__
    sources = [*Path(folder, "quantization").rglob("*.py"), *Path(folder, "fused_moe").glob("*.py")]
    defined = {name for f in sources for name in re.findall(r"^class (\w+)", f.read_text(), re.M)}
    missing = readers.READERS.keys() - defined
    assert missing == {"CompressedTensorsWNA16MarlinMoEMethod"}  # of 0.26


# -- what stays with vLLM --------------------------------------------------------------------


def test_unknown_methods_are_refused(checkpoint: Make) -> None:
    layer = loaded("fp8-tensor", checkpoint("fp8-tensor"))

    class HummingMoEMethod:
        pass

    with pytest.raises(Unsupported, match="does not read the weights of HummingMoEMethod"):
        problems.load(layer, HummingMoEMethod())


def _round_up(layer: Any) -> None:
    layer.moe_config.hidden_dim_unpadded -= 64


REFUSED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    **{
        f"padded {name}": (name, _round_up, r"rounded up .* from \(192, 512\) to \(256, 512\)")
        for name in ("fp8-tensor", "ct-int8", "ct-int4", "ct-nvfp4")
    },
    "other blocks": (
        "fp8-block",
        lambda layer: setattr(layer.quant_method, "weight_block_size", [64, 128]),
        r"blocks of 128 x 128 \(got \[64, 128\]\)",
    ),
    "EPLB with static scales": (
        "fp8-static",
        lambda layer: setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True),
        "EPLB moves experts",
    ),
    "activations in mxfp4": (
        "ct-mxfp4",
        lambda layer: setattr(layer.quant_method, "use_cutlass_mxfp4", True),
        "CUTLASS_MXFP4_MXFP4",
    ),
    "eight bits in groups": (
        "gptq",
        lambda layer: setattr(layer.quant_method.quant_config, "weight_bits", 8),
        "no scheme for 8-bit integers in groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_moekit_lacks_is_refused(case: str, checkpoint: Make) -> None:
    name, change, match = REFUSED[case]
    layer = loaded(name, checkpoint(name))
    change(layer)
    with pytest.raises(Unsupported, match=match):
        problems.load(layer, layer.quant_method)


def _marlin(method: Any) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    method.fp8_backend = Fp8MoeBackend.MARLIN


def _a_scale_for_each_token(method: Any) -> None:
    """As 0.33 quantizes in batch-invariant mode."""
    method.per_act_token_quant = True


@pytest.mark.parametrize(
    ("name", "change", "scheme"),
    [
        ("fp8-block", _marlin, "fp8_w8a16_block"),
        ("fp8-tensor", _marlin, "fp8_w8a16_tensor"),
        ("fp8-static", _marlin, "fp8_w8a16_tensor"),
        ("ct-fp8-channel", _marlin, "fp8_w8a16_channel"),
        ("fp8-tensor", _a_scale_for_each_token, "fp8_channel_token"),
    ],
)
def test_vllms_choice_decides_about_activations(
    name: str, change: Callable[[Any], None], scheme: str, checkpoint: Make
) -> None:
    made = checkpoint(name)
    layer = loaded(name, made)
    change(layer.quant_method)
    problem, read = problems.load(layer, layer.quant_method)
    assert problem.quant.name == scheme
    read.check(problem)
    if not scheme.endswith("tensor"):  # where gate and up get one scale
        check_numbers(read, problem, made)


def check_numbers(read: ExpertWeights, problem: MoEProblem, made: files.Layer) -> None:
    w13, w2 = numbers(read, problem)
    assert torch.equal(w13, torch.cat([made.gate, made.up], dim=1))
    assert torch.equal(w2, made.down)


def test_cpus_with_amx_leave_activations_alone(checkpoint: Make, monkeypatch) -> None:
    """vLLM's kernel for fp8 blocks on these CPUs takes bf16 activations."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    made = checkpoint("fp8-block")
    layer = loaded("fp8-block", made)
    assert layer.quant_method.fp8_backend.name == "CPU"
    problem, read = problems.load(layer, layer.quant_method)
    assert problem.quant.name == "fp8_w8a16_block"
    check_numbers(read, problem, made)
