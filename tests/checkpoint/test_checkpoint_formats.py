"""Every format in use, loaded on every rank of TP x EP: exactly the packed numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from checkpoint_cases import CASES, FP8, GPTQ, RANKS, ct
from torch import Tensor

import moekit
from moekit import ExpertWeights, MoEProblem, ParallelConfig
from moekit.backends.reference import oracle
from moekit.checkpoint import Checkpoint, detect, load_experts, problem_from_config
from moekit.errors import WeightsError
from moekit.testing import assert_close

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, files.Layer] = {}

    def make(name: str) -> files.Layer:
        if name not in made:
            torch.manual_seed(len(name))
            case = CASES[name]
            made[name] = files.write(tmp_path_factory.mktemp(name), case.packer, case.config, E=4)
        return made[name]

    return make


def held(problem: MoEProblem, block: int = 1) -> list[int]:
    """Return the rank's neurons: one run, or whole blocks and a part of one of the last."""
    i, p = problem.local_intermediate_size, problem.parallel
    whole, rest = divmod(i, block)
    if not rest or block % rest or p.tp_size == 1:
        return list(range(p.tp_rank * i, (p.tp_rank + 1) * i))
    mine = list(range(p.tp_rank * whole * block, (p.tp_rank + 1) * whole * block))
    first = p.tp_size * whole * block + p.tp_rank * rest
    return mine + list(range(first, first + rest))


def shares(layer: files.Layer, problem: MoEProblem, block: int = 1) -> tuple[Tensor, Tensor]:
    """Return the values that a rank's w13 and w2 must represent."""
    mine = held(problem, block)
    experts = [p % problem.num_experts for p in problem.local_experts]
    w13 = torch.cat([layer.gate[experts][:, mine], layer.up[experts][:, mine]], dim=1)
    return w13, layer.down[experts][:, :, mine]


def values(weights: ExpertWeights, problem: MoEProblem) -> tuple[Tensor, Tensor]:
    """Return fp32 values of each matrix (of gate and up, if each has its own scale)."""
    weights.check(problem)
    scale = weights.w13_scale
    if scale is not None and scale.dim() == 2 and scale.shape[1] == 2:
        rows = weights.w13.shape[1] // 2
        each = scale.repeat_interleave(rows, dim=1)[:, :, None]
        return weights.w13.float() * each, weights.w2.float() * weights.w2_scale[:, :, None]
    plain = weights.canonical(problem).dequantize(problem.quant)
    return plain.w13, plain.w2


@pytest.mark.parametrize("name", CASES)
def test_detected(name: str, layer) -> None:
    case, made = CASES[name], layer(name)
    found = detect(made.path)
    (group,) = found.groups
    assert (group.scheme, found.layers, found.model_type) == (case.scheme, (0,), "qwen3_moe")
    p = group.problem
    assert (p.num_experts, p.hidden_size, p.intermediate_size) == (4, 128, 256)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].scheme and "act-order" not in n])
def test_every_rank_has_its_part_of_the_packed_numbers(name: str, layer) -> None:
    made = layer(name)
    with Checkpoint(made.path) as checkpoint:
        for parallel in RANKS:
            problem = problem_from_config(checkpoint, parallel=parallel, device="cpu")
            assert problem.quant.name == CASES[name].scheme
            weights = load_experts(checkpoint, None, 0, problem)
            got = values(weights, problem)
            for have, want in zip(got, shares(made, problem), strict=True):
                assert torch.equal(have, want), parallel


@pytest.mark.parametrize("name", CASES)
def test_dequantized_at_load(name: str, layer) -> None:
    made, dtype = layer(name), (torch.float32, torch.bfloat16)[len(name) % 2]
    with Checkpoint(made.path) as checkpoint:
        for parallel in (r for r in RANKS if r.ep_size == 3 and r.tp_size != 2):
            problem = problem_from_config(
                checkpoint, parallel=parallel, device="cpu", dequantize=True, dtype=dtype
            )
            weights = load_experts(checkpoint, None, 0, problem, dequantize=True)
            weights.check(problem)
            for have, want in zip((weights.w13, weights.w2), shares(made, problem), strict=True):
                assert torch.equal(have, want.to(dtype)), parallel


def neurons(w13: Tensor, w2: Tensor) -> Tensor:
    """Return (I, 2 H + H), each neuron's gate row, up row and down column, sorted."""
    gate, up = w13.chunk(2)
    return torch.unique(torch.cat([gate, up, w2.T], dim=1), dim=0)


def assert_ranks_hold_all(shares: list[tuple[Tensor, Tensor]], made: files.Layer) -> None:
    """Assert that the ranks' (w13, w2) hold every neuron once, in any order."""
    for expert in range(len(made.gate)):
        halves = [torch.cat([w13[expert].chunk(2)[half] for w13, _ in shares]) for half in (0, 1)]
        w2 = torch.cat([w2[expert] for _, w2 in shares], dim=1)
        want = neurons(torch.cat([made.gate[expert], made.up[expert]]), made.down[expert])
        assert len(want) == made.gate.shape[1]
        assert torch.equal(neurons(torch.cat(halves), w2), want)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", [n for n in CASES if "act-order" in n])
def test_act_order_is_cut_into_whole_groups(name: str, tp_size: int, layer, tmp_path: Path) -> None:
    """The groups of w2 are scattered over all neurons, and a rank takes whole groups, with biases.

    The bias of a row is the sum of its weights.
    """
    made, biases, whole = layer(name), {}, []
    for expert in range(4):
        for which, rows in (("gate", made.gate), ("up", made.up), ("down", made.down)):
            stem = f"model.layers.0.mlp.experts.{expert}.{which}_proj"
            biases[f"{stem}.bias"] = rows[expert].sum(1)
    config = json.loads((made.path / "config.json").read_text())
    files.save(tmp_path, made.tensors | biases, config)
    for rank in range(tp_size):
        parallel = ParallelConfig(tp_size=tp_size, tp_rank=rank)
        problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
        assert problem.quant.name == CASES[name].scheme
        weights = load_experts(tmp_path, None, 0, problem)
        assert weights.w13_g_idx is not None and (weights.w2_g_idx is None) == (tp_size > 1)
        whole.append(values(weights, problem))
        torch.testing.assert_close(weights.w13_bias, whole[-1][0].sum(2))
        assert torch.equal(weights.w2_bias, made.down.sum(2))
    assert_ranks_hold_all(whole, made)


# -- blocks that a rank's share cuts ---------------------------------------------------------------

FP8_BLOCK = FP8 | dict(activation_scheme="dynamic", weight_block_size=[128, 128])


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that writes fp8 in blocks of 128 x 128, for any I."""
    made: dict[int, files.Layer] = {}

    def make(inner: int) -> files.Layer:
        if inner not in made:
            torch.manual_seed(inner)
            path = tmp_path_factory.mktemp(f"blocks-{inner}")
            packer = files.fp8(128, 128, "weight_scale_inv")
            made[inner] = files.write(path, packer, FP8_BLOCK, E=2, H=256, I=inner)
        return made[inner]

    return make


@pytest.mark.parametrize("inner", [128, 256, 320, 384, 448, 640, 768, 896])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_blocks_are_never_cut(inner: int, tp_size: int, blocks) -> None:
    """Every rank has the stored numbers of whole blocks, padded with zeros.

    All ranks together have each neuron once, and their outputs add up to the whole layer's.
    """
    made, seen = blocks(inner), []
    whole = problem_from_config(made.path, device="cpu")
    assert whole.quant.name == "fp8_block"
    whole = whole.replace(dtype=torch.float32)
    x, routing = torch.randn(6, 256), moekit.route(torch.randn(6, 2), top_k=2, renormalize=False)
    total = torch.zeros(6, 256)
    for rank in range(tp_size):
        problem = whole.replace(parallel=ParallelConfig(tp_size=tp_size, tp_rank=rank, dp_size=1))
        weights, mine = load_experts(made.path, None, 0, problem), list(problem.local_neurons)
        assert all(neuron // 128 * 128 in mine for neuron in mine)
        room = problem.local_intermediate_size
        assert (
            room == whole.replace(parallel=ParallelConfig(tp_size=tp_size)).local_intermediate_size
        )
        w13, w2 = values(weights, problem)
        for half, want in zip(w13.chunk(2, dim=1), (made.gate, made.up), strict=True):
            assert torch.equal(half[:, : len(mine)], want[:, mine])
            assert not half[:, len(mine) :].any()
        assert torch.equal(w2[:, :, : len(mine)], made.down[:, :, mine])
        assert not w2[:, :, len(mine) :].any()
        assert (w13.shape[1], w2.shape[2]) == (2 * room, room)
        kernel = moekit.compose(problem)
        total += kernel(x, kernel.pack(weights), routing)
        seen += mine
    assert sorted(seen) == list(range(inner))
    want = oracle(
        x,
        ExpertWeights(torch.cat([made.gate, made.up], 1), made.down),
        routing,
        whole.replace(quant="none"),
    )
    kernel = moekit.compose(whole)
    alone = kernel(x, kernel.pack(load_experts(made.path, None, 0, whole)), routing)
    error, before = (float((out - want).norm() / want.norm()) for out in (total, alone))
    # Activations have the groups of one rank, so only the order of sums differs.
    assert error < before * 1.001 + 1e-6


@pytest.mark.parametrize("interleaved", [False, True])
def test_biases_and_fused_rows_of_padded_blocks(interleaved: bool, tmp_path: Path) -> None:
    """Gate and up in one tensor, with biases: their padding is also zero."""
    experts, hidden, inner = 2, 128, 384
    stem, names = "model.layers.0.mlp.experts", moekit.checkpoint.NAMES["gpt_oss"]
    names = replace(names, transposed=False, interleaved=interleaved)
    tensors: dict[str, Tensor] = {}
    for name, (n, k) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
        packed = [files.fp8(128, 128, "scale")(files.matrix(n, k))[0] for _ in range(experts)]
        tensors[f"{stem}.{name}"] = torch.stack([one["weight"] for one in packed])
        tensors[f"{stem}.{name}_scale"] = torch.stack([one["scale"] for one in packed])
        tensors[f"{stem}.{name}_bias"] = torch.randn(experts, n).bfloat16()
    files.save(tmp_path, tensors, {})
    layer = MoEProblem(
        num_experts=experts, top_k=1, hidden_size=hidden, intermediate_size=inner, device="cpu",
        quant="fp8_block", activation="swigluoai", has_bias=True,
    )  # fmt: skip
    bias = tensors[f"{stem}.gate_up_proj_bias"]
    for rank in range(2):
        problem = layer.replace(parallel=ParallelConfig(tp_size=2, tp_rank=rank))
        if interleaved:  # a block of rows would mix gate and up
            weights = load_experts(tmp_path, names, 0, problem)
            held = 2 * len(problem.local_neurons)
            first = 2 * problem.local_neurons.start
            assert torch.equal(weights.w13_bias[:, :held], bias[:, first : first + held])
            assert not weights.w13_bias[:, held:].any()
            continue
        weights = load_experts(tmp_path, names, 0, problem)
        weights.check(problem)
        mine, room = list(problem.local_neurons), problem.local_intermediate_size
        for half in (0, 1):
            got = weights.w13_bias[:, half * room : (half + 1) * room]
            want = bias[:, half * inner : (half + 1) * inner]
            assert torch.equal(got[:, : len(mine)], want[:, mine])
            assert not got[:, len(mine) :].any()


def test_slices_that_cut_blocks_are_refused_with_a_reason() -> None:
    """The error for slices of I / tp_size describes the expected weights."""
    problem = MoEProblem(
        num_experts=2, top_k=1, hidden_size=128, intermediate_size=384, device="cpu",
        quant="fp8_block", parallel=ParallelConfig(tp_size=2, tp_rank=1),
    )  # fmt: skip
    weights = ExpertWeights(torch.randn(2, 384, 128), torch.randn(2, 128, 192))
    with pytest.raises(WeightsError, match="neurons 256 to 384 of 384, padded with zeros to 256"):
        weights.quantize(problem.quant).check(problem)


@pytest.mark.parametrize("name", ["ct-mxfp8", "ct-mxfp4-mxfp8"])
def test_small_groups_are_exact_or_refused(name: str, tmp_path: Path) -> None:
    """Quarters of 160 are 32 + 8; quarters of 224 are 32 + 24, which cuts a group unevenly."""
    case, quarter = CASES[name], ParallelConfig(tp_size=4, tp_rank=3)
    made = files.write(tmp_path / "even", case.packer, case.config, E=2, H=64, I=160)
    problem = problem_from_config(made.path, parallel=quarter, device="cpu")
    got = values(load_experts(made.path, None, 0, problem), problem)
    assert all(map(torch.equal, got, shares(made, problem, 32)))
    made = files.write(tmp_path / "odd", case.packer, case.config, E=2, H=64, I=224)
    with pytest.raises(WeightsError, match="tp_size=4 cuts its groups of 32 columns of w2"):
        problem_from_config(made.path, parallel=quarter, device="cpu")
    problem = problem_from_config(made.path, parallel=quarter, device="cpu", quant=case.scheme)
    with pytest.raises(WeightsError, match="which cuts .* groups of 32; use expert parallelism"):
        load_experts(made.path, None, 0, problem)


def test_a_stored_block_of_gate_and_up(tmp_path: Path) -> None:
    """In one tensor with I = 192, a block of scales covers rows of gate and of up."""
    hidden, inner, experts = 128, 192, 2
    rows, stem = 2 * inner, "model.layers.0.mlp.experts"
    scale = torch.rand(experts, 3, 1)
    weight = torch.randn(experts, rows, hidden).to(files.FP8)
    files.save(
        tmp_path,
        {
            f"{stem}.gate_up_proj": weight,
            f"{stem}.gate_up_proj_scale_inv": scale,
            f"{stem}.down_proj": torch.randn(experts, hidden, inner).to(files.FP8),
            f"{stem}.down_proj_scale_inv": torch.ones(experts, 1, 2),
        },
        dict(
            model_type="qwen3_moe", num_experts=experts, num_experts_per_tok=1, hidden_size=hidden,
            moe_intermediate_size=inner, quantization_config=FP8_BLOCK,
        ),
    )  # fmt: skip
    problem = problem_from_config(tmp_path, device="cpu")
    with pytest.raises(WeightsError, match="gate and up have rows in one block of 128; use quant="):
        load_experts(tmp_path, None, 0, problem)
    problem = problem_from_config(tmp_path, device="cpu", dequantize=True, dtype=torch.float32)
    weights = load_experts(tmp_path, None, 0, problem, dequantize=True)
    assert torch.equal(weights.w13, weight.float() * scale.repeat_interleave(128, 1))


def test_4_bit_groups_are_refined(tmp_path: Path) -> None:
    """I = 384: halves are 192 = 128 + 64 columns; quarters are 96 = 64 + 32."""
    layer = files.write(tmp_path, files.pack_quantized(128, True), ct(group=128), E=2, I=384)
    names = []
    for tp_size in (1, 2, 4):
        seen = []
        for rank in range(tp_size):
            parallel = ParallelConfig(tp_size=tp_size, tp_rank=rank)
            problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
            weights = load_experts(tmp_path, None, 0, problem)
            got, block = values(weights, problem), problem.quant.weight.group[1]
            assert all(map(torch.equal, got, shares(layer, problem, block)))
            seen += held(problem, block)
        assert sorted(seen) == list(range(384))
        names.append(problem.quant.name)
    assert names == ["int4_w4a16_g128_zp", "int4_w4a16_g128_zp", "int4_w4a16_g64_zp"]


def test_act_order_and_groups_that_are_shared(tmp_path: Path) -> None:
    """Quarters of 6 groups of 32 are one and a half groups of sorted columns."""
    packer = files.gptq(32, zero_points=True, act_order=True)
    config = GPTQ | dict(sym=False, desc_act=True)
    made, whole = files.write(tmp_path, packer, config, E=2, H=64, I=192), []
    for rank in range(4):
        parallel = ParallelConfig(tp_size=4, tp_rank=rank)
        problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
        assert problem.quant.name == "int4_w4a16_g32_zp_act_order"
        whole.append(values(load_experts(tmp_path, None, 0, problem), problem))
    assert_ranks_hold_all(whole, made)


@pytest.mark.parametrize("name", [n for n in CASES if "act-order" in n])
def test_selection_knows_act_order(name: str, layer) -> None:
    """The chosen backend declares the scheme, and computes with the packed numbers."""
    made = layer(name)
    problem = problem_from_config(made.path, device="cpu", dtype=torch.float32)
    kernel = moekit.compose(problem)
    declared = moekit.registry().expert(kernel.explanation.chosen.experts).schemes
    assert problem.quant.name in declared
    packed = kernel.pack(load_experts(made.path, None, 0, problem))
    x, logits = torch.randn(9, problem.hidden_size), torch.randn(9, 4)
    routing = moekit.route(logits, top_k=2, renormalize=True)
    w13 = torch.cat([made.gate, made.up], dim=1)
    plain = problem.replace(quant="none")  # the bounds of fp32
    want = oracle(x, ExpertWeights(w13, made.down), routing, plain)
    assert_close(kernel(x, packed, routing), want, plain)


def test_act_order_that_the_config_does_not_mention(tmp_path: Path) -> None:
    """Columns may be in order with desc_act, as with static groups, or out of order without."""
    ordered, shuffled = tmp_path / "ordered", tmp_path / "shuffled"
    layer = files.write(ordered, files.gptq(32), GPTQ | dict(sym=True, desc_act=True), E=2)
    for quant in ("int4_w4a16_g32_act_order", "int4_w4a16_g32"):
        problem = problem_from_config(ordered, device="cpu", quant=quant)
        weights = load_experts(ordered, None, 0, problem)
        assert weights.w13_g_idx is None and weights.w2_g_idx is None
        assert all(map(torch.equal, values(weights, problem), shares(layer, problem)))
    assert problem_from_config(ordered, device="cpu").quant.name == "int4_w4a16_g32_act_order"
    files.write(shuffled, files.gptq(32, act_order=True), GPTQ | dict(sym=True), E=2)
    problem = problem_from_config(shuffled, device="cpu")
    assert problem.quant.name == "int4_w4a16_g32"
    with pytest.raises(WeightsError, match="is in act-order; use quant='int4_w4a16_g32_act_order'"):
        load_experts(shuffled, None, 0, problem)


@pytest.mark.parametrize("name", ["awq", "gptq-zp", "gptq", "ct-int4-zp", "ct-int4", "bf16"])
def test_a_share_that_ends_within_a_word(name: str, tmp_path: Path) -> None:
    """36 of 72 neurons, where words hold eight rows or columns."""
    packers = {
        "awq": files.awq(-1),
        "gptq-zp": files.gptq(-1, zero_points=True),
        "gptq": files.gptq(-1),
        "ct-int4-zp": files.pack_quantized(-1, True),
        "ct-int4": files.pack_quantized(-1),
        "bf16": files.bf16,
    }
    if name.startswith("ct"):
        config = ct(strategy="channel")
    else:
        config = (CASES[name].config or {}) | dict(group_size=-1)
    layer = files.write(tmp_path, packers[name], config, E=2, H=64, I=72)
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
        got = values(load_experts(tmp_path, None, 0, problem), problem)
        assert all(map(torch.equal, got, shares(layer, problem)))


def test_input_scales_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Any rank may quantize tokens for any expert, before they travel."""
    config = FP8 | dict(activation_scheme="static")
    layer = files.write(tmp_path, files.fp8(-1, -1, static=True), config, E=4, H=64, I=64)
    for expert, value in enumerate((0.5, 0.25, 0.75, 0.125)):
        stem = f"model.layers.0.mlp.experts.{expert}"
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.tensors[f"{stem}.{name}.input_scale"] = torch.tensor(value + (name[0] == "d"))
    files.save(tmp_path, layer.tensors, json.loads((tmp_path / "config.json").read_text()))
    for rank in range(4):
        parallel = ParallelConfig(ep_size=4, ep_rank=rank)
        problem = problem_from_config(tmp_path, parallel=parallel, device="cpu")
        weights = load_experts(tmp_path, None, 0, problem)
        assert (weights.w13_input_scale, weights.w2_input_scale) == (0.75, 1.75)
