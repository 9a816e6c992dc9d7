"""Every method's parameters are read as the weights that they store. SGLang is a stand-in.

The parameters have the shapes and orders of SGLang's create_weights (0.5.15 and 0.5.23).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang_standin as standin
import torch
from moekit_sglang.problem import facts_of
from moekit_sglang.weights import READERS, read
from sglang_layers import made, started, taken
from sglang_layers import sglang as sglang  # a fixture

import moekit
from moekit import SCHEMES
from moekit.errors import Unsupported

L, H, INNER = 3, 256, 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row in each half byte of a word, from the lowest


def weights(scheme: str) -> moekit.ExpertWeights:
    draw = torch.Generator().manual_seed(0)
    w13 = torch.randn(L, 2 * INNER, H, generator=draw) / 8
    w2 = torch.randn(L, H, INNER, generator=draw) / 8
    return moekit.ExpertWeights(w13, w2).quantize(SCHEMES[scheme])


def stored(made: moekit.ExpertWeights, names: tuple[str, str], convert=lambda t: t, scales=None):
    """Return codes and scales under names, as ``convert`` and ``scales`` lay them out."""
    found = {}
    for name in ("w13", "w2"):
        found[f"{name}_{names[0]}"] = convert(getattr(made, name))
        found[f"{name}_{names[1]}"] = (scales or (lambda t: t))(getattr(made, f"{name}_scale"))
    return found


def words(codes: torch.Tensor) -> torch.Tensor:
    """Pack (L, N, K / 2) into (L, K / 8, N) int32, as GPTQ and compressed-tensors do."""
    return codes.contiguous().view(torch.int32).transpose(1, 2).contiguous()


def flipped(scales: torch.Tensor) -> torch.Tensor:
    return scales.transpose(1, 2).contiguous()


def exponents(scales: torch.Tensor) -> torch.Tensor:
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8)


def awq(codes: torch.Tensor) -> torch.Tensor:
    """Pack (L, N, K / 2) into (L, K, N / 8) int32, rows in AWQ's order."""
    values = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2).transpose(1, 2).int()
    packed = torch.zeros(*values.shape[:2], values.shape[2] // 8, dtype=torch.int32)
    for place, row in enumerate(AWQ_ORDER):
        packed |= values[:, :, row::8] << (4 * place)
    return packed


BLOCKS = dict(quant_config=SimpleNamespace(weight_block_size=[128, 128]))
SYMMETRIC = dict(is_sym=True, desc_act=False, weight_bits=4)
CASES = {
    "Fp8MoEMethod": (
        "fp8_block", lambda w: stored(w, ("weight", "weight_scale_inv")), BLOCKS, {},
    ),
    "W8A8FP8MoEMethod": (
        "fp8_channel_token", lambda w: stored(w, ("weight", "weight_scale")), {}, {},
    ),
    "CompressedTensorsW8A8Fp8MoE": (
        "fp8_block", lambda w: stored(w, ("weight", "weight_scale")), {},
        dict(weight_block_size=[128, 128]),
    ),
    "W8A8Int8MoEMethod": (
        "int8_channel_token", lambda w: stored(w, ("weight", "weight_scale")), {}, {},
    ),
    "Mxfp4MoEMethod": (
        "mxfp4_w4a16",
        lambda w: stored(w, ("weight", "weight_scale"), scales=exponents),
        dict(hidden_size=H, intermediate_size_per_partition=INNER), {},
    ),
    "CompressedTensorsWNA16TritonMoE": (
        "int4_w4a16_g32", lambda w: stored(w, ("weight_packed", "weight_scale"), words, flipped),
        {}, dict(actorder=None, num_bits=4),
    ),
    "GPTQMarlinMoEScheme": (
        "int4_w4a16_g128", lambda w: stored(w, ("qweight", "scales"), words, flipped), {},
        dict(quant_config=SimpleNamespace(**SYMMETRIC)),
    ),
    "AWQMoEScheme": (
        "int4_w4a16_g64", lambda w: stored(w, ("qweight", "scales"), awq, flipped), {},
        dict(quant_config=SimpleNamespace(zero_point=False, weight_bits=4)),
    ),
    "MoeWNA16Method": (
        "int4_w4a16_g128", lambda w: stored(w, ("qweight", "scales")),
        dict(quant_config=SimpleNamespace(has_zp=False, weight_bits=4)), {},
    ),
}  # fmt: skip


def layer_of(name: str, parameters=None, **config):
    """Return a layer whose method, or whose scheme, has a name; compressed-tensors have schemes."""
    scheme, store, method, of_scheme = CASES[name]
    owner = type(name, (standin.Method,), {})
    if name == "CompressedTensorsWNA16TritonMoE":
        owner = type(name, (type("CompressedTensorsWNA16MoE", (standin.Method,), {}),), {})
    fields: dict = {"hidden": H, "inner": INNER, **config}
    if of_scheme:
        fields["scheme"] = owner(**of_scheme)
        return made(parameters or store(weights(scheme)), "SomeFusedMoEMethod", **fields)
    return made(parameters or store(weights(scheme)), name, method, **fields)


def _read(layer):
    return read(facts_of(layer, layer.quant_method))


@pytest.mark.parametrize("name", CASES)
def test_a_method_is_read_and_computes(name) -> None:
    """As moekit does with the weights themselves."""
    scheme, expected = CASES[name][0], weights(CASES[name][0])
    found, got = _read(layer_of(name))
    assert found == scheme and not got.interleaved
    for field in ("w13", "w2", "w13_scale", "w2_scale"):
        stated, mine = getattr(expected, field), getattr(got, field)
        assert torch.equal(mine.float().view(stated.shape), stated.float()), field
    started()
    assert taken(layer := layer_of(name, params_dtype=torch.bfloat16))
    x, topk = torch.randn(5, H).bfloat16(), (torch.rand(5, 2), torch.tensor([[0, 2]] * 5))
    kernel = layer.quant_method.moekit_experts.kernel
    want = kernel(x, kernel.pack(expected), moekit.Routing(*topk))
    assert torch.equal(layer(x, standin.TopK(*topk)), want) and want.abs().max() > 0


def test_per_tensor_fp8(monkeypatch) -> None:
    fp8 = torch.float8_e4m3fn
    parameters = {
        "w13_weight": torch.randn(L, 2 * INNER, H).to(fp8),
        "w2_weight": torch.randn(L, H, INNER).to(fp8),
        "w13_weight_scale": torch.rand(L, 2), "w2_weight_scale": torch.rand(L),
    }  # fmt: skip
    method = dict(quant_config=SimpleNamespace(weight_block_size=None))
    layer = made(parameters, "Fp8MoEMethod", method, hidden=H, inner=INNER)
    assert _read(layer)[0] == "fp8_tensor"
    inputs = {"w13_input_scale": torch.rand(L), "w2_input_scale": torch.rand(L)}
    layer = made(parameters | inputs, "Fp8MoEMethod", method, hidden=H, inner=INNER)
    assert _read(layer)[0] == "fp8_tensor_static"
    standin.arguments.enable_eplb = True
    with pytest.raises(Unsupported, match="static activation scales differ"):
        _read(layer)


def _changed(name, **attributes):
    layer = layer_of(name)
    vars(getattr(layer, "scheme", layer.quant_method)).update(attributes)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: made(method="GGUFMoEMethod"), "does not read the weights of GGUFMoEMethod"),
        (lambda: _changed("Fp8MoEMethod", use_mxfp8=True), "no fp8 weights with use_mxfp8"),
        (lambda: made(method="Fp8MoEMethod"), "quantizes its 16-bit weights"),
        (
            lambda: _changed("CompressedTensorsW8A8Fp8MoE", weight_block_size=[64, 64]),
            "fp8 blocks of 128 x 128",
        ),
        (lambda: _changed("Mxfp4MoEMethod", hidden_size=512), "rounded up"),
        (
            lambda: _changed("GPTQMarlinMoEScheme", quant_config=SimpleNamespace(is_sym=False)),
            "no zero points",
        ),
        (lambda: _changed("CompressedTensorsWNA16TritonMoE", num_bits=3), "3-bit integers"),
    ],
)
def test_what_moekit_does_not_read(layer, reason) -> None:
    found = layer()
    with pytest.raises(Unsupported, match=reason):
        _read(found)


def test_every_reader_is_tested() -> None:
    names = {n.replace("16TritonMoE", "16MoE") for n in CASES} | {"UnquantizedFusedMoEMethod"}
    assert names == set(READERS)
