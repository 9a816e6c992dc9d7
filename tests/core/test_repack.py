"""`repack_` writes new weights into the memory of packed ones, and refuses those that misfit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moekit
from moekit import ExpertWeights, FusedMoE, ModularKernel, MoEProblem, PackedWeights
from moekit.errors import WeightsError
from moekit.problem import checksum as sums

E, H, I = 4, 128, 128
NAME = "model.layers.3.mlp.experts"


def kernel_for(quant: str = "none", **more: Any) -> ModularKernel:
    sizes = dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=I, quant=quant)
    return moekit.compose(MoEProblem(**sizes, dtype=torch.bfloat16, **more), experts="torch")


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    draw = torch.Generator().manual_seed(seed)
    shapes = (E, 2 * I, H), (E, H, I)
    return ExpertWeights(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))


def fresh(kernel: ModularKernel, given: ExpertWeights) -> PackedWeights:
    """Pack a copy, because packed weights may use the memory of the given ones."""
    return kernel.pack(given.quantize(kernel.problem.quant)._map(torch.clone))


def addresses(packed: PackedWeights) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in packed.tensors().items()}


@pytest.mark.parametrize("quant", ["none", "fp8_block", "int4_w4a16_g32_zp", "mxfp4_w4a16"])
def test_weights_are_quantized_on_the_way(quant: str) -> None:
    kernel, old, new = kernel_for(quant), weights(0), weights(1)
    packed = fresh(kernel, old)
    where, before = addresses(packed), packed.checksum()
    kernel.repack_(packed, new, checksum=new.checksum())
    assert packed.checksum() == fresh(kernel, new).checksum() != before
    kernel.repack_(packed, old.select([2, 0]), experts=[2, 0])
    mixed = new._map(torch.clone)
    for name, tensor in mixed.tensors().items():
        tensor[[0, 2]] = old.tensors()[name][[0, 2]]
    assert packed.checksum() == fresh(kernel, mixed).checksum()
    kernel.repack_(packed, fresh(kernel, old))
    assert packed.checksum() == before and addresses(packed) == where


def half(given: ExpertWeights) -> ExpertWeights:
    return given._map(Tensor.half)


@pytest.mark.parametrize(
    ("quant", "change", "more", "said"),
    [
        ("none", lambda w: w.select([0, 1, 2]), {}, r"w13 has shape \(3, 256, 128\), expected"),
        ("none", half, {}, "w13 is torch.float16, expected torch.bfloat16"),
        ("none", lambda w: w.quantize(moekit.SCHEMES["fp8_block"]), {}, "w13 is torch.float8"),
        ("fp8_block", lambda w: replace(w, w2=w.w2[:, :, :32]), {}, r"w2 has shape \(4, 128, 32\)"),
        ("fp8_block", lambda w: w.quantize(moekit.SCHEMES["fp8_tensor"]), {}, "w13_scale has"),
        ("fp8_tensor_static", lambda w: w, {}, "w13_input_scale is missing"),
        ("none", lambda w: w, {"experts": [0, 1]}, r"w13 has shape \(4, 256, 128\), expected \(2"),
        ("none", lambda w: w, {"experts": [0, 1, 2, 4]}, r"expected different integers in 0\.\.3"),
        ("none", lambda w: w, {"experts": [0, 1, 2, 2]}, r"expected different integers in 0\.\.3"),
        ("none", lambda w: w, {"experts": []}, r"expected different integers in 0\.\.3"),
        (
            "none",
            lambda w: w,
            {"checksum": "0" * 16},
            "have checksum [0-9a-f]{16}, not '0{16}': take",
        ),
    ],
)
def test_a_refusal_names_layer_and_tensor_and_writes_nothing(
    quant: str, change: Any, more: dict[str, Any], said: str
) -> None:
    kernel, scales = kernel_for(quant), {}
    if "static" in quant:
        scales = dict(w13_input_scale=torch.tensor(0.1), w2_input_scale=torch.tensor(0.1))
    packed = fresh(kernel, replace(weights(0), **scales))
    before = packed.checksum()
    with pytest.raises(WeightsError, match=f"^{NAME}: .*{said}"):
        kernel.repack_(packed, change(weights(1)), name=NAME, **more)
    assert packed.checksum() == before


def test_packed_weights_of_another_kind_are_refused() -> None:
    kernel, wide = kernel_for(), kernel_for(has_bias=True)
    packed = fresh(kernel, weights(0))
    other = weights(1)
    biased = replace(other, w13_bias=other.w13[:, :, 0], w2_bias=other.w2[:, :, 0])
    with pytest.raises(WeightsError, match="w13_bias is new; w2_bias is new"):
        kernel.repack_(packed, replace(fresh(wide, biased), made_for=None))
    with pytest.raises(WeightsError, match="packed for 'reference'"):
        kernel.repack_(packed, replace(packed, backend="reference"))
    with pytest.raises(WeightsError, match="packed for another problem"):
        wide.repack_(packed, biased)


def test_equal_shapes_of_another_scheme_are_refused() -> None:
    """Codes of mxfp4 and of int4 have equal shapes and dtypes, and mean other numbers."""
    kernel = kernel_for("int4_w4a16_g32")
    packed, other = fresh(kernel, weights(0)), fresh(kernel_for("mxfp4_w4a16"), weights(1))
    with pytest.raises(WeightsError, match="another problem .scheme='mxfp4_w4a16', not"):
        kernel.repack_(packed, other)


def test_experts_may_be_named_by_a_tensor() -> None:
    kernel = kernel_for()
    packed, few = fresh(kernel, weights(0)), torch.tensor([2, 0])
    kernel.repack_(packed, weights(1).select(few), experts=few)
    assert torch.equal(packed["w13"][few], weights(1).w13[few])


def test_a_trainable_layer_names_load_weights() -> None:
    layer = FusedMoE(E, 2, H, I, trainable=True, prefix=NAME)
    with pytest.raises(WeightsError, match=f"{NAME}' has no packed weights: call load_weights"):
        layer.repack_(weights(0))


def test_a_static_scale_changes_with_all_experts_only() -> None:
    kernel = kernel_for("fp8_tensor_static")
    scales = dict(w13_input_scale=torch.tensor(0.1), w2_input_scale=torch.tensor(0.1))
    old, new = replace(weights(0), **scales), replace(weights(1), **scales)
    packed = fresh(kernel, old)
    kernel.repack_(packed, new.select([1]), experts=[1])
    larger = replace(new, w2_input_scale=torch.tensor(0.2))
    with pytest.raises(WeightsError, match="a2_scale, which all experts share, would change"):
        kernel.repack_(packed, larger.select([1]), experts=[1])
    kernel.repack_(packed, larger)
    assert float(packed.shared["a2_scale"]) == pytest.approx(0.2)


def test_weights_in_the_same_memory() -> None:
    """An engine loads into packed memory, or moves experts there."""
    kernel = kernel_for()
    packed = fresh(kernel, weights(0))
    held = ExpertWeights(packed["w13"], packed["w2"])
    kernel.repack_(packed, held)
    assert packed.checksum() == weights(0).checksum()
    kernel.repack_(packed, held.select([0])._map(Tensor.contiguous), experts=[1])
    kernel.repack_(packed, ExpertWeights(packed["w13"][1:3], packed["w2"][1:3]), experts=[2, 3])
    assert packed.checksum() == weights(0).select([0, 0, 0, 2]).checksum()


@pytest.mark.parametrize("inference", [False, True])
def test_modes_of_autograd(inference: bool) -> None:
    kernel, new = kernel_for(), weights(1)
    with torch.inference_mode(inference):
        packed = fresh(kernel, weights(0))
    kernel.repack_(packed, new._map(lambda t: t.requires_grad_()))
    with torch.inference_mode():
        kernel.repack_(packed, weights(2))
    assert packed.checksum() == fresh(kernel, weights(2)).checksum()


def test_a_layer_keeps_its_memory() -> None:
    layer = FusedMoE(E, 2, H, I, quant="fp8_block", experts="torch", prefix=NAME)
    with pytest.raises(WeightsError, match=f"{NAME}' has no packed weights"):
        layer.repack_(weights(0))
    layer.load_weights(weights(0).quantize(layer.problem.quant))
    assert layer.packed is not None
    where, x, logits = addresses(layer.packed), torch.randn(3, H).bfloat16(), torch.randn(3, E)
    before = layer(x, logits)
    layer.repack_(weights(1))
    assert addresses(layer.packed) == where and not torch.equal(layer(x, logits), before)
    with pytest.raises(WeightsError, match=f"{NAME}: .*w13 has shape"):
        layer.repack_(weights(0).select([0]))
    layer.repack_(weights(0), checksum=weights(0).checksum())
    assert torch.equal(layer(x, logits), before)


def test_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums depend on bits, positions, names, shapes and dtypes, not on strides or parts."""
    given = weights(0)
    strided = given._map(lambda t: t.mT.contiguous().mT)
    assert strided.checksum() == given.checksum() != replace(given, interleaved=True).checksum()
    seen = {given.checksum(), half(given).checksum(), given.select([1, 0, 2, 3]).checksum()}
    high = given.w13.clone()
    high[0, 0, 3].neg_()  # the highest bit of a word of 8 bytes
    high[3, 0, 3].neg_()
    seen |= {
        replace(given, w13=high).checksum(),
        replace(given, w13=high.view(E, I, -1)).checksum(),
    }
    zero, minus = torch.zeros(5), torch.zeros(5).neg()
    seen |= {sums.checksum({name: t}) for name in "ab" for t in (zero, minus, zero[:4])}
    assert len(seen) == 3 + 2 + 6
    monkeypatch.setattr(sums, "_WORDS", 1000)
    assert weights(0).checksum() == given.checksum()
