"""Tensors that are pushed one by one give the same bits as `load_experts` on the same files."""

from __future__ import annotations

import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from checkpoint_cases import CASES, FP8, RANKS, ct
from torch import Tensor

from moekit import ExpertWeights, MoEProblem, ParallelConfig
from moekit.checkpoint import Checkpoint, detect, load_experts, problem_from_config
from moekit.checkpoint.pushed import PushedExperts
from moekit.checkpoint.schemes import scheme_for
from moekit.errors import WeightsError
from moekit.formats.methods import declared_format, format_of_scheme
from moekit.problem.quant import SCHEMES

pytest.importorskip("safetensors")

SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, files.Layer] = {}

    def make(name: str) -> files.Layer:
        if name not in made:
            torch.manual_seed(len(name))
            path = tmp_path_factory.mktemp(name)
            made[name] = files.write(path, CASES[name].packer, config(name), E=4)
        return made[name]

    return make


def config(name: str) -> dict[str, Any] | None:
    """Return the config of a case; int8 that is not packed must be said to be so."""
    said = CASES[name].config
    unpacked = CASES[name].packer is files.int8
    return said | {"format": "int-quantized"} if said and unpacked else said


def push_all(pushed: PushedExperts, made: files.Layer, physical: int, seed: int = 0) -> None:
    """Push each tensor for each physical expert, in any order, in memory that is overwritten."""
    todo = [
        (expert, name) for expert in range(physical) for name in made.tensors if "experts" in name
    ]
    random.Random(seed).shuffle(todo)
    E = made.sizes["num_experts"]
    for expert, name in todo:
        _, number, module, suffix = name.rsplit(".", 3)
        if int(number) == expert % E:
            tensor = made.tensors[name].clone(memory_format=torch.contiguous_format)
            pushed.push(suffix, SHARDS[module], expert, tensor)
            tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).zero_()


def assert_equal(have: ExpertWeights, want: ExpertWeights) -> None:
    for field in fields(ExpertWeights):
        a, b = getattr(have, field.name), getattr(want, field.name)
        if not isinstance(b, Tensor):
            assert a == b or (a is None and b is None), field.name
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        a, b = (t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b), field.name


@pytest.mark.parametrize(
    ("name", "dequantize"),
    [(name, case.scheme is None) for name, case in CASES.items()]
    + [pytest.param(n, True, marks=pytest.mark.full) for n, c in CASES.items() if c.scheme],
)
def test_the_same_bits_as_from_files(name: str, dequantize: bool, layer) -> None:
    """Also of a rank that holds replicas of one expert."""
    made = layer(name)
    with Checkpoint(made.path) as checkpoint:
        for seed, parallel in enumerate(RANKS[dequantize :: 2 + 2 * dequantize]):
            problem = problem_from_config(
                checkpoint,
                parallel=parallel,
                device="cpu",
                dequantize=dequantize,
                num_redundant_experts=3 * (seed % 2),
            )
            want = load_experts(checkpoint, None, 0, problem, dequantize=dequantize)
            found = declared_format(config(name), 128, 256, "model.layers.0.mlp.experts")
            pushed = PushedExperts(problem, found, dequantize=dequantize)
            push_all(pushed, made, problem.num_physical_experts, seed)
            assert_equal(pushed.finish(), want)


@pytest.mark.parametrize("name", ["bf16", "gptq-act-order", "awq", "ct-nvfp4", "modelopt-fp8"])
def test_under_another_default_device(name: str, layer) -> None:
    made, parallel = layer(name), ParallelConfig(tp_size=4, tp_rank=3)
    problem = problem_from_config(made.path, parallel=parallel, device="cpu")
    want = load_experts(made.path, None, 0, problem)
    with torch.device("meta"):
        assert_equal(load_experts(made.path, None, 0, problem), want)
        pushed = PushedExperts(problem, declared_format(config(name), 128, 256))
        push_all(pushed, made, 4)
        assert_equal(pushed.finish(), want)


def test_weights_are_not_kept() -> None:
    """A half-loaded layer holds scales and the places of weights, but no pushed tensor."""
    pushed = loader(problem_for("fp8_block"))
    for shard, stack in random_stacks().items():
        tensor = stack.to(torch.float8_e4m3fn)
        pushed.push("weight", shard, 0, tensor)
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None


@pytest.mark.parametrize("name", CASES)
def test_the_declared_format_is_the_stored_one(name: str, layer) -> None:
    stored, declared = (
        detect(layer(name).path).groups[0].formats[0],
        declared_format(config(name), 128, 256),
    )
    assert str(declared) == str(stored) and declared.activation == stored.activation
    assert {part.suffix for part in stored.parts.values()} <= {
        part.suffix for part in declared.parts.values()
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_format(name: str) -> None:
    assert scheme_for(format_of_scheme(SCHEMES[name]), 512) == name


# -- stacks, halves and biases ----------------------------------------------------------------


def problem_for(quant: str = "none", tp: int = 1, rank: int = 0, **more: Any) -> MoEProblem:
    sizes = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=256)
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    return MoEProblem(**{**sizes, "quant": quant, "parallel": parallel, "device": "cpu", **more})


def loader(problem: MoEProblem, **options: Any) -> PushedExperts:
    return PushedExperts(problem, format_of_scheme(problem.quant), **options)


def random_stacks(E: int = 4, H: int = 128, I: int = 256) -> dict[str, Tensor]:
    shapes = {"w1": (E, I, H), "w3": (E, I, H), "w2": (E, H, I)}
    return {shard: torch.randn(shape).bfloat16() for shard, shape in shapes.items()}


@pytest.mark.parametrize("H", [128, 256])
@pytest.mark.parametrize("how", ["stack", "transposed", "w13", "interleaved", "w13-transposed"])
def test_stacks_of_experts(how: str, H: int) -> None:
    """A stack, of (in, out) matrices or with gate and up in one, gives each expert its matrix.

    The shapes of square matrices do not tell whether they are transposed.
    """
    stacks, problem = random_stacks(H=H), problem_for(tp=4, rank=3, hidden_size=H)
    singly = loader(problem)
    for shard, stack in stacks.items():
        for expert in range(4):
            assert singly.push("weight", shard, expert, stack[expert])
    pushed = loader(problem, transposed="transposed" in how, interleaved=how == "interleaved")
    if how != "stack" and how != "transposed":
        gate, up = stacks.pop("w1"), stacks.pop("w3")
        stacks["w13"] = torch.cat([gate, up], 1)
        if how == "interleaved":
            stacks["w13"] = torch.stack([gate, up], 2).flatten(1, 2)
    for shard, stack in stacks.items():
        given = stack.mT.contiguous() if "transposed" in how else stack
        assert pushed.push("weight", shard, 0, given)
    assert_equal(pushed.finish(), singly.finish())


@pytest.mark.parametrize("rank", range(2))
def test_stacks_as_gpt_oss_has_them(rank: int, layer) -> None:
    """mxfp4 bytes and exponents with alternating rows of gate and up, as engines name them."""
    made = layer("ct-mxfp4")
    problem = problem_from_config(
        made.path, device="cpu", parallel=ParallelConfig(tp_size=2, tp_rank=rank)
    )
    pushed = PushedExperts(
        problem, declared_format({"quant_method": "mxfp4"}, 128, 256), interleaved=True
    )
    stem = "model.layers.0.mlp.experts.{}.{}_proj.{}"
    for suffix, stored in (("weight", "weight_packed"), ("weight_scale", "weight_scale")):
        gate, up, down = (
            torch.stack([made.tensors[stem.format(e, which, stored)] for e in range(4)])
            for which in ("gate", "up", "down")
        )
        assert pushed.push(suffix, "w13", 0, torch.stack([gate, up], 2).flatten(1, 2))
        assert pushed.push(suffix, "w2", 0, down)
    assert_equal(pushed.finish(), load_experts(made.path, None, 0, problem))


@pytest.mark.parametrize("quant", ["fp8_block", "fp8_channel_token", "fp8_tensor"])
def test_stacks_of_scales_of_transposed_matrices(quant: str) -> None:
    """Scales of blocks are transposed with their matrices, scales of channels are not."""
    suffix = {"fp8_block": "weight_scale_inv"}.get(quant, "weight_scale")
    stacks, problem = random_stacks(), problem_for(quant)
    weights = {s: w.to(torch.float8_e4m3fn) for s, w in stacks.items()}
    shapes = {"fp8_block": (-128, -128), "fp8_channel_token": (-1, 0), "fp8_tensor": (0, 0)}[quant]
    scales = {}
    for shard, w in stacks.items():
        n, k = (1 if not s else size // -s for s, size in zip(shapes, w.shape[1:], strict=True))
        scales[shard] = torch.rand(4, n, k) + 0.1
    singly, pushed = loader(problem), loader(problem, transposed=True)
    for shard in stacks:
        for expert in range(4):
            singly.push("weight", shard, expert, weights[shard][expert])
            # scalars have the shape () or (1,)
            scale = scales[shard][expert]
            scale = scale if quant != "fp8_tensor" else scale.reshape([1] * (expert % 2))
            singly.push(suffix, shard, expert, scale)
        pushed.push("weight", shard, 0, weights[shard].mT)
        given = scales[shard].mT if quant == "fp8_block" else scales[shard]
        pushed.push(suffix, shard, 0, given)
    assert_equal(pushed.finish(), singly.finish())
    if quant == "fp8_tensor":
        with pytest.raises(
            WeightsError, match=r"is \(2,\), expected one number for one expert or 4"
        ):
            pushed.push(suffix, "w1", 0, torch.rand(2))


def test_a_stack_and_one_of_its_experts() -> None:
    pushed, stacks = loader(problem_for()), random_stacks()
    pushed.push("weight", "w1", 3, stacks["w1"][3])
    with pytest.raises(WeightsError, match="experts.3.w1.weight was already loaded"):
        pushed.push("weight", "w1", 0, stacks["w1"])


@pytest.mark.parametrize("held", [None, [3, 1, 3]])
def test_a_stack_of_this_ranks_experts(held: list[int] | None) -> None:
    """Round-robin placements, and what eplb has moved, leave a rank with other experts."""
    stacks, redundant = random_stacks(), 2 if held else 0
    parallel = ParallelConfig(ep_size=2, ep_rank=1)
    problem = problem_for(parallel=parallel, num_redundant_experts=redundant)
    pushed, mine = loader(problem, experts=held), held or [2, 3]
    for shard, stack in stacks.items():
        assert pushed.push("weight", shard, problem.local_experts.start, stack[mine])
    weights = pushed.finish()
    assert torch.equal(weights.w2, stacks["w2"][mine])
    assert torch.equal(weights.w13, torch.cat([stacks["w1"], stacks["w3"]], 1)[mine])


def test_experts_of_other_ranks_are_not_needed() -> None:
    problem = problem_for(parallel=ParallelConfig(ep_size=2, ep_rank=1), num_redundant_experts=2)
    pushed = loader(problem)  # physical 3, 4, 5: experts 3, 0, 1
    needed = [pushed.push("weight", "w2", e, torch.zeros(128, 256).bfloat16()) for e in range(6)]
    assert needed == [True, True, False, True, True, True]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_and_experts_without_a_gate(tp: int) -> None:
    w1, w2 = torch.randn(4, 256, 128), torch.randn(4, 128, 256)
    b1, b2 = torch.randn(4, 256), torch.randn(4, 128)
    for rank in range(tp):
        problem = problem_for(tp=tp, rank=rank, activation="relu2", has_bias=True)
        pushed, mine = loader(problem), slice(rank * 256 // tp, (rank + 1) * 256 // tp)
        for expert in range(4):
            for shard, tensors in (("w1", (w1, b1)), ("w2", (w2, b2))):
                for suffix, tensor in zip(("weight", "bias"), tensors, strict=True):
                    assert pushed.push(suffix, shard, expert, tensor[expert])
        weights = pushed.finish()
        assert torch.equal(weights.w13, w1[:, mine].bfloat16())  # as engines convert them
        assert torch.equal(weights.w13_bias, b1[:, mine].bfloat16())
        assert torch.equal(weights.w2_bias, b2.bfloat16())


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_blocks_are_loaded_again_in_place(rank: int, tmp_path: Path) -> None:
    """Ranks hold whole blocks, rank 7 none, and zeros behind them."""
    said = FP8 | dict(activation_scheme="dynamic", weight_block_size=[128, 128])
    packer = files.fp8(128, 128, "weight_scale_inv")
    made = files.write(tmp_path, packer, said, E=2, H=256, I=896)
    parallel = ParallelConfig(tp_size=8, tp_rank=rank)
    problem = problem_from_config(tmp_path, device="cpu", parallel=parallel)
    pushed = PushedExperts(problem, declared_format(said, 256, 896))
    for _ in range(2):
        for tensor in pushed.out.values():
            tensor.view(torch.uint8).fill_(7)
        push_all(pushed, made, 2)
        assert_equal(pushed.finish(), load_experts(tmp_path, None, 0, problem))


# -- wrong input ------------------------------------------------------------------------------


def push_one(**changes: Any) -> None:
    pushed = loader(problem_for(changes.pop("quant", "none"), tp=changes.pop("tp", 1)))
    tensor = torch.zeros(256, 128).bfloat16()
    pushed.push(**{"suffix": "weight", "shard": "w1", "expert": 0, "tensor": tensor, **changes})


WRONG = {
    "shard": (dict(shard="gate"), r"shard_id='gate': expected one of w1, w3, w13, w2"),
    "no shard": (dict(shard=None), "shard_id=None: expected one of w1"),
    "expert": (dict(expert=4), r"expert_id=4: expected 0\.\.3"),
    "no number": (dict(expert=True), r"expert_id=True: expected 0\.\.3"),
    "suffix": (dict(suffix="qweight"), "no tensors 'qweight': .* unquantized have weight"),
    "shape": (
        dict(tensor=torch.zeros(256, 64).bfloat16()),
        r"w1.weight of expert 0 is \(256, 64\), expected \(256, 128\) for one expert or \(4, 256",
    ),
    "sliced already": (
        dict(tensor=torch.zeros(64, 128).bfloat16(), tp=4),
        "expected .* load the whole tensor, and each rank takes its part",
    ),
    "transposed": (
        dict(tensor=torch.zeros(4, 128, 256).bfloat16()),
        "transpose it, or construct the layer with is_fused_checkpoint_transposed=True",
    ),
    "dtype": (dict(tensor=torch.zeros(256, 128).int()), "is torch.int32, expected torch.bfloat16"),
    "quantized": (dict(quant="fp8_block"), "is torch.bfloat16, expected torch.float8_e4m3fn"),
    "meta": (dict(tensor=torch.zeros(256, 128, device="meta")), "expected a dense tensor with"),
    "halves": (dict(shard="w13"), r"w13.weight is \(256, 128\), expected gate and up of 256"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(WeightsError, match=message):
        push_one(**arguments)


def test_a_round_goes_on_after_a_refused_tensor() -> None:
    stacks, pushed = random_stacks(), loader(problem_for())
    assert pushed.push("weight", "w1", 0, stacks["w1"])
    with pytest.raises(WeightsError, match="experts.1.w1.weight was already loaded; finish this"):
        pushed.push("weight", "w1", 1, stacks["w1"][1])
    with pytest.raises(WeightsError, match="w2.weight of expert 1 is torch.float64, expected"):
        pushed.push("weight", "w2", 1, stacks["w2"][1].double())
    assert pushed.push("weight", "w3", 0, stacks["w3"])
    with pytest.raises(WeightsError, match="4 of 12 tensors of this rank were not loaded: .*0.w2"):
        pushed.finish()
    assert pushed.loading and pushed.push("weight", "w2", 0, stacks["w2"])
    assert torch.equal(pushed.finish().w13, torch.cat([stacks["w1"], stacks["w3"]], 1))
    assert not pushed.loading


@pytest.mark.parametrize(
    ("name", "bad", "factor", "said"),
    [
        ("bf16", "down_proj.weight", torch.nan, "w2.weight holds values that are not finite"),
        ("fbgemm-fp8", "down_proj.weight_scale", torch.nan, "w2.weight_scale holds values that"),
        ("gptq", "down_proj.scales", torch.nan, "w2.scales holds values that are not finite"),
    ],
)
def test_tensors_with_wrong_values_are_named(
    name: str, bad: str, factor: float, said: str, layer
) -> None:
    made, bad = layer(name), f"model.layers.0.mlp.experts.1.{bad}"
    problem = problem_from_config(made.path, device="cpu")
    pushed = PushedExperts(problem, declared_format(config(name), 128, 256))
    tensors = made.tensors | {bad: made.tensors[bad] * factor}
    push_all(pushed, replace(made, tensors=tensors), 4)
    with pytest.raises(WeightsError, match=f"experts.1.{said}"):
        pushed.finish()
    push_all(pushed, made, 4)  # nothing of the failed round is left
    assert_equal(pushed.finish(), load_experts(made.path, None, 0, problem))


@pytest.mark.parametrize("name", ["bf16", "gptq", "fbgemm-fp8"])
def test_pushes_from_several_threads(name: str, layer) -> None:
    made = layer(name)
    problem = problem_from_config(made.path, device="cpu")
    pushed = PushedExperts(problem, declared_format(config(name), 128, 256))
    experts = [name for name in made.tensors if "experts" in name]
    random.Random(0).shuffle(experts)

    def push(name: str) -> bool:
        _, number, module, suffix = name.rsplit(".", 3)
        return pushed.push(suffix, SHARDS[module], int(number), made.tensors[name])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(push, experts))
    finally:
        sys.setswitchinterval(before)
    assert_equal(pushed.finish(), load_experts(made.path, None, 0, problem))


@pytest.mark.parametrize(
    "ignore",
    ["layers.3.mlp.experts", "layers.3.mlp.experts.0.w1", "re:.*3", "layers.3.mlp", "layers.3",
     r"re:layers\.3\..*experts\.\d+\.(gate|up|down)_proj$", "layers.3.*", "*.3.mlp.experts*",
     "layers.3.mlp.experts.*"],
)  # fmt: skip
def test_modules_that_a_config_leaves_out(ignore: str) -> None:
    said = FP8 | dict(modules_to_not_convert=["lm_head", "*.mlp.gate", "re:.*mlp.gate$", ignore])
    assert not declared_format(said, 128, 256, "layers.3.mlp.experts").dtype
    for other in ("layers.4.mlp.experts", "layers.30.mlp.experts", "layers.4.mlp.experts_too"):
        quantized = ignore != "re:.*3" or "3" not in other
        assert bool(declared_format(said, 128, 256, other).dtype) == quantized


@pytest.mark.parametrize(
    "target",
    [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"re:.*experts.*",
     r"re:.*experts\.\d+\.w[123]$"],
)  # fmt: skip
def test_a_config_group_of_the_experts(target: str) -> None:
    """Its targets name an expert's Linear as checkpoints do."""
    groups = {"a": ct(8)["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*", "Linear"]}}
    groups["b"] = ct(4, group=32)["config_groups"]["group_0"] | {"targets": [target]}
    found = declared_format(ct(4) | {"config_groups": groups}, 128, 256, "layers.3.mlp.experts")
    assert (found.dtype, found.group) == ("int4", (1, 32))


@pytest.mark.parametrize("target", [r"re:.*mlp\.experts\.\d+\.down_proj$", "down_proj", "w2"])
def test_matrices_of_two_config_groups(target: str) -> None:
    """The description of down does not speak for gate and up."""
    groups = {"a": ct(8)["config_groups"]["group_0"] | {"targets": ["Linear"]}}
    groups["b"] = ct(4, group=32)["config_groups"]["group_0"] | {"targets": [target]}
    with pytest.raises(WeightsError, match="(gate_proj|w1) and (down_proj|w2) of .* differently"):
        declared_format(ct(4) | {"config_groups": groups}, 128, 256, "layers.3.mlp.experts")


def test_a_tensor_after_the_last_one_is_named() -> None:
    """A replica that comes after `finish` begins a new round, and the error says which it was."""
    stacks, pushed = random_stacks(), loader(problem_for(num_redundant_experts=2))
    for shard, stack in stacks.items():
        for expert in range(4):
            pushed.push("weight", shard, expert, stack[expert])
    assert not pushed.lacking()
    pushed.finish()
    pushed.push("weight", "w3", 5, stacks["w3"][1])
    pushed.push("weight", "w1", 0, stacks["w1"][0])
    said = "experts.1.w3.weight came after a complete round of loading and began a new one, and 10 "
    with pytest.raises(WeightsError, match=said + "of 12 tensors of this rank were not loaded"):
        pushed.finish()
    for shard, stack in stacks.items():
        for expert in range(4):
            if (shard, expert) not in (("w3", 1), ("w1", 0)):
                pushed.push("weight", shard, expert, stack[expert])
    assert torch.equal(pushed.finish().w2[4:], stacks["w2"][:2])
