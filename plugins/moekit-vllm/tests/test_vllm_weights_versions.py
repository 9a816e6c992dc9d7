"""Layouts that differ between versions of vLLM, in stand-ins for layers.

The parameters have the shapes and attributes that the methods of 0.26 and 0.33 create, and hold
what their loaders write. vLLM is not needed; 0.32's own layers are in `test_vllm_weights.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import checkpoint_files as files
import pytest
import torch
from moekit_vllm import weights
from moekit_vllm.problem import facts_of
from moekit_vllm.weights import real_neurons, whole_blocks
from torch import Tensor, nn

from moekit import SCHEMES, ExpertWeights
from moekit.errors import Unsupported

E, H, I = 3, 128, 256


def method(name: str, **fields: Any) -> Any:
    """Return an object of a class with the name of one of vLLM's methods."""
    return type(name, (), fields)()


def layer(quant: Any, parameters: dict[str, Tensor]) -> Any:
    config = SimpleNamespace(
        hidden_dim=H,
        hidden_dim_unpadded=H,
        intermediate_size=I,
        intermediate_size_per_partition=I,
        intermediate_size_per_partition_unpadded=I,
        is_act_and_mul=True,
        has_bias=False,
        tp_size=1,
        tp_rank=0,
        num_logical_experts=E,
        experts_per_token=1,
        in_dtype=torch.bfloat16,
        is_sequence_parallel=False,
        moe_parallel_config=SimpleNamespace(
            enable_eplb=False, use_ep=False, ep_size=1, ep_rank=0, dp_size=1
        ),
    )
    activation = SimpleNamespace(value="silu")
    made = SimpleNamespace(
        moe_config=config, quant_method=quant, activation=activation, global_num_experts=E
    )
    for name, tensor in parameters.items():
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return made


def read_layer(made: Any) -> tuple[str, ExpertWeights]:
    return weights.read(facts_of(made, made.quant_method))


Packed = list[tuple[dict[str, Tensor], Tensor]]


def pack(packer: files.Packer) -> dict[str, Packed]:
    """Return the tensors and numbers of every expert's gate, up and down."""
    sizes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {n: [packer(files.matrix(*size)) for _ in range(E)] for n, size in sizes.items()}


def parameters(packed: dict[str, Packed], transposed: bool) -> dict[str, Tensor]:
    """Return parameters as vLLM's loaders fill them, with gate and up beside each other.

    transposed: The loader transposes the checkpoint's (N, K) tensors.
    """
    found: dict[str, Tensor] = {}
    for suffix in packed["gate"][0][0]:
        for name, parts in (("w13", ("gate", "up")), ("w2", ("down",))):
            each = [[packed[part][e][0][suffix] for part in parts] for e in range(E)]
            if each[0][0].dim() < 2:  # g_idx and the shape: the last one that is loaded stays
                found[f"{name}_{suffix}"] = torch.stack([one[-1] for one in each])
                continue
            if transposed:
                each = [[t.t() for t in one] for one in each]
            rows = 1 if transposed or suffix in ("qweight", "scales", "qzeros") else 0
            found[f"{name}_{suffix}"] = torch.stack([torch.cat(one, rows) for one in each])
    return {name: t.contiguous() for name, t in found.items()}


def meant(packed: dict[str, Packed]) -> tuple[Tensor, Tensor]:
    gate, up, down = (torch.stack([values for _, values in one]) for one in packed.values())
    return torch.cat([gate, up], dim=1), down


def check(made: Any, packed: dict[str, Packed], scheme: str) -> None:
    found, read = read_layer(made)
    assert found == scheme
    plain = read.dequantize(SCHEMES[scheme])
    for got, want in zip((plain.w13, plain.w2), meant(packed), strict=True):
        assert torch.equal(got, want)


# -- compressed-tensors of 0.26: Marlin's K-first layout ---------------------------------


def marlin(packer: files.Packer, **quant: Any) -> tuple[Any, dict[str, Packed]]:
    """Return a layer whose parameters are (E, K / 8, N), and what it means."""
    said = SimpleNamespace(**({"symmetric": True, "actorder": None} | quant))
    packed = pack(packer)
    held = parameters(packed, transposed=True)
    # 0.26 makes g_idx for every checkpoint; without act-order nothing is loaded into it.
    for name, size in (("w13", H), ("w2", I)):
        held.setdefault(f"{name}_weight_g_idx", torch.full((E, size), -(2**30)))
    name = "CompressedTensorsWNA16MarlinMoEMethod"
    made = layer(method(name, num_bits=4, weight_quant=said), held)
    for name in ("w13", "w2"):
        getattr(made, f"{name}_weight_packed").is_transposed = True
    assert made.w13_weight_packed.shape == (E, H // 8, 2 * I)
    return made, packed


MARLIN: dict[str, tuple[files.Packer, dict[str, Any]]] = {
    "g64": (files.pack_quantized(64), {}),
    "g32_zp": (files.pack_quantized(32, True), {"symmetric": False}),
    "channel": (files.pack_quantized(-1), {}),
    "g32_act_order": (files.pack_quantized(32, act_order=True), {"actorder": "group"}),
}


@pytest.mark.parametrize("scheme", MARLIN)
def test_marlin(scheme: str) -> None:
    packer, quant = MARLIN[scheme]
    check(*marlin(packer, **quant), f"int4_w4a16_{scheme}")


def test_groups_of_the_act_order_that_are_runs() -> None:
    made, packed = marlin(files.pack_quantized(32), actorder="group")
    for name, size in (("w13", H), ("w2", I)):
        setattr(made, f"{name}_weight_g_idx", (torch.arange(size) // 32).expand(E, -1))
    check(made, packed, "int4_w4a16_g32")


def test_groups_of_no_scheme_are_refused() -> None:
    made, _ = marlin(files.pack_quantized(16))
    with pytest.raises(Unsupported, match=r"groups of 128, 64, 32 \(got 16\)"):
        read_layer(made)


def test_tensor_parallelism_that_cuts_the_act_order() -> None:
    """vLLM then keeps all of w2's scales on each rank."""
    made, _ = marlin(files.pack_quantized(32, act_order=True), actorder="group")
    config = made.moe_config
    config.intermediate_size_per_partition = config.intermediate_size_per_partition_unpadded = (
        I // 2
    )
    with pytest.raises(Unsupported, match="must not cut the groups of act-order"):
        read_layer(made)


# -- GPTQ of 0.26, which has act-order ---------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(act_order: bool) -> None:
    """Without act-order, g_idx is ignored."""
    packed = pack(files.gptq(32, act_order=act_order))
    config = SimpleNamespace(is_sym=True, desc_act=act_order, weight_bits=4)
    held = parameters(packed, transposed=False)
    held |= {name: t.half() for name, t in held.items() if name.endswith("qzeros")}  # as 0.26 does
    if not act_order:
        held |= {f"{name}_g_idx": torch.full((E, 1), 99) for name in ("w13", "w2")}
    made = layer(method("AutoGPTQMoEMethod", quant_config=config), held)
    assert made.w13_qweight.shape == (E, H // 8, 2 * I)
    check(made, packed, "int4_w4a16_g32" + "_act_order" * act_order)


@pytest.mark.parametrize("loaded", [set(), {"w2_bias"}])
def test_gptq_has_the_biases_that_were_loaded(loaded: set[str]) -> None:
    """0.32 and 0.33 make them for every model, and the config says nothing of them."""
    held = parameters(pack(files.gptq(32)), transposed=False)
    held |= {"w13_bias": torch.full((E, 2 * I), float("nan")), "w2_bias": torch.randn(E, H)}
    config = SimpleNamespace(is_sym=True, desc_act=False, weight_bits=4)
    made = layer(method("AutoGPTQMoEMethod", quant_config=config), held)
    made._loaded_expert_biases = loaded
    _, read = read_layer(made)
    if loaded:
        assert torch.equal(read.w2_bias, held["w2_bias"]) and not read.w13_bias.any()
    else:
        assert read.w13_bias is None and read.w2_bias is None


# -- 0.33 --------------------------------------------------------------------------------


def test_weights_that_are_quantized_anew_are_refused() -> None:
    made = layer(method("Fp8PerBlockOnlineMoEMethod", requantization_source=object()), {})
    with pytest.raises(Unsupported, match="quantizes weights anew"):
        read_layer(made)


def test_moe_wna16_by_a_class_that_extends_it() -> None:
    """0.33 has INCARKWNA16MoEMethod. Its parameters are (E, N, K / 2) of bytes."""
    packed = pack(files.gptq(64))
    of_gptq = parameters(packed, transposed=False)
    held = {
        name: of_gptq[name].transpose(1, 2).contiguous().view(dtype)
        for stem in ("w13", "w2")
        for name, dtype in ((f"{stem}_qweight", torch.uint8), (f"{stem}_scales", torch.float16))
    }
    quant = type("INCARKWNA16MoEMethod", (type("MoeWNA16Method", (), {}),), {})()
    quant.quant_config = SimpleNamespace(has_zp=False, weight_bits=4)
    made = layer(quant, held)
    assert made.w13_qweight.shape == (E, 2 * I, H // 2)
    check(made, packed, "int4_w4a16_g64")


# -- backends of vLLM, which decide about activations ------------------------------------


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [
        ("MARLIN", "mxfp4_w4a16"),
        ("TRITON", "mxfp4_w4a16"),
        ("FLASHINFER_TRTLLM_MXFP4_BF16", "mxfp4_w4a16"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", "mxfp4_w4a8"),
        ("DEEPGEMM_MXFP4", None),
        ("AITER_MXFP4_FP8", None),
        ("CUTLASS_MXFP4_MXFP4", None),
    ],
)
def test_activations_of_mxfp4(backend: str, scheme: str | None) -> None:
    packed = pack(files.mxfp4(("weight", "weight_scale")))
    quant = method("Mxfp4MoEMethod", mxfp4_backend=SimpleNamespace(name=backend))
    made = layer(quant, parameters(packed, transposed=False))
    if scheme is not None:
        check(made, packed, scheme)
    else:
        with pytest.raises(Unsupported, match=backend):
            read_layer(made)


def test_activations_of_nvfp4() -> None:
    packed = pack(files.nvfp4(modelopt=True))
    held = parameters(packed, transposed=False)
    held["w13_weight_scale_2"] = torch.stack(
        [torch.cat([packed[p][e][0]["weight_scale_2"] for p in ("gate", "up")]) for e in range(E)]
    )
    for backend, a16, scheme in (
        ("MARLIN", False, "nvfp4_w4a16"),
        ("VLLM_CUTLASS", True, "nvfp4_w4a16"),
        ("MARLIN", None, "nvfp4_w4a16"),  # 0.26 has no such mark
        ("VLLM_CUTLASS", None, "nvfp4"),
        ("VLLM_CUTLASS", False, "nvfp4"),
    ):
        marks = {} if a16 is None else {"use_a16": a16}
        kind = SimpleNamespace(name=backend)
        quant = method("ModelOptNvFp4FusedMoE", nvfp4_backend=kind, **marks)
        check(layer(quant, held), packed, scheme)
    quant.per_token_activation = True
    with pytest.raises(Unsupported, match="a scale for each token"):
        read_layer(layer(quant, held))


# -- how much of a rank's share is the model's -------------------------------------------


@pytest.mark.parametrize(
    ("total", "tp_size", "held", "gpt_oss", "real"),
    [
        (2880, 1, 2944, True, [2880]),
        (2880, 2, 1536, True, [1536, 1440]),  # streamed: 1536 and 1344; whole: 1440 each
        (2880, 4, 768, True, [768, 768, 768, 720]),  # streamed: 768, ..., 576; whole: 736, ..., 672
        (2880, 2, 1536, False, [1440, 1440]),
    ],
)
def test_real_neurons(total: int, tp_size: int, held: int, gpt_oss: bool, real: list[int]) -> None:
    quant = method("GptOssMxfp4MoEMethod" if gpt_oss else "Mxfp4MoEMethod")
    made = layer(quant, {})
    made.moe_config.intermediate_size = total
    made.moe_config.intermediate_size_per_partition = held
    made.moe_config.intermediate_size_per_partition_unpadded = total // tp_size
    made.moe_config.tp_size = tp_size
    for rank, expected in enumerate(real):
        made.moe_config.tp_rank = rank
        assert real_neurons(made) == expected


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_padding_of_biases_becomes_zeros(activation: str) -> None:
    """A NaN there would spread: a row of zeros in w2 does not stop it."""
    nan = float("nan")
    held = {
        "w13_weight": torch.full((E, 2 * I, H), nan),
        "w2_weight": torch.full((E, H, I), nan),
        "w13_bias": torch.full((E, 2 * I), nan),
        "w2_bias": torch.full((E, H), nan),
    }
    made = layer(method("UnquantizedFusedMoEMethod"), held)
    made.moe_config.has_bias, made.activation.value = True, activation
    made.moe_config.hidden_dim_unpadded = H - 32
    made.moe_config.intermediate_size_per_partition_unpadded = I - 64
    _, read = read_layer(made)
    rows = torch.arange(2 * I)
    neuron = rows // 2 if activation == "swigluoai" else rows % I
    assert torch.equal(read.w13_bias.isnan(), (neuron < I - 64).expand(E, -1))
    assert torch.equal(read.w13.isnan().any(2), read.w13_bias.isnan())
    assert torch.equal(read.w2_bias.isnan(), (torch.arange(H) < H - 32).expand(E, -1))
    assert torch.equal(read.w2.isnan().any(2), read.w2_bias.isnan())
    assert not read.w2[:, :, I - 64 :].any() and not read.w13[:, :, H - 32 :].any()


@pytest.mark.parametrize("refined", [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("rank", range(3))
def test_blocks_that_ranks_divide(refined: tuple[int, int], rank: int) -> None:
    """vLLM may divide a block in other numbers of parts along rows than along columns."""
    share, generator = 192, torch.Generator().manual_seed(rank)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    whole = {"w13": drawn(E, 2, 5, 1), "w2": drawn(E, 1, 5)}  # scales of the checkpoint's blocks
    rows, columns = (128 // parts for parts in refined)
    begin = rank * share
    w13_scale = whole["w13"][:, :, torch.arange(begin, begin + share, rows) // 128]
    w2_scale = whole["w2"][:, :, torch.arange(begin, begin + share, columns) // 128]
    weights = ExpertWeights(
        w13=drawn(E, 2 * share, H).to(torch.float8_e4m3fn),
        w2=drawn(E, H, share).to(torch.float8_e4m3fn),
        w13_scale=w13_scale.repeat_interleave(refined[1], 3).flatten(1, 2),
        w2_scale=w2_scale.repeat_interleave(refined[0], 1),
    )
    config = SimpleNamespace(intermediate_size_per_partition=share, tp_rank=rank)
    found = whole_blocks(SimpleNamespace(moe_config=config), weights, refined)

    first, last = begin // 128, (begin + share - 1) // 128
    blocks = slice(first, last + 1)
    assert torch.equal(found.w13_scale, whole["w13"][:, :, blocks].flatten(1, 2))
    assert torch.equal(found.w2_scale, whole["w2"][:, :, blocks])
    inside = slice(begin - 128 * first, begin - 128 * first + share)
    w13 = found.w13.float().unflatten(1, (2, -1))
    assert torch.equal(w13[:, :, inside].flatten(1, 2), weights.w13.float())
    assert torch.equal(found.w2.float()[:, :, inside], weights.w2.float())
    assert found.w2.shape[2] == w13.shape[2] == 128 * (last - first + 1)
    assert w13.sum() == weights.w13.float().sum(), "zeros around it"
