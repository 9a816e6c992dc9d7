"""GGUF models: exactly the numbers of the gguf library, on every rank, in every layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

import gguf_files as files  # noqa: E402

import moekit  # noqa: E402
from moekit import MoEProblem, ParallelConfig  # noqa: E402
from moekit.backends.reference import oracle  # noqa: E402
from moekit.checkpoint import Checkpoint, detect, load_experts, problem_from_config  # noqa: E402
from moekit.errors import WeightsError  # noqa: E402
from moekit.formats.gguf import dequantize  # noqa: E402
from moekit.testing import assert_close  # noqa: E402

E, H, I = 4, 512, 256
FIELDS = dict(
    embedding_length=H, expert_feed_forward_length=I, expert_count=E, expert_used_count=2,
    block_count=2, feed_forward_length=1024,
)  # fmt: skip
MIXED = ("Q4_K", "Q4_K", "Q6_K")


@pytest.fixture
def rng() -> Any:
    return np.random.default_rng(torch.randint(1 << 30, ()).item())


def write(folder: Path, rng: Any, types: tuple[str, str, str], **more: Any) -> tuple[Path, dict]:
    arch, split = more.pop("arch", "qwen3moe"), more.pop("split", 0)
    tensors = files.experts(rng, types, E=E, H=H, I=I, **more)
    folder.mkdir(exist_ok=True)
    return files.write(folder / "m.gguf", tensors, arch, split, **FIELDS), tensors


def full(tensors: dict, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Return w13 (E, 2I, H) and w2 (E, H, I) in fp32, by the gguf library."""
    made = {}
    for role in ("gate", "up", "gate_up", "down"):
        if found := tensors.get(f"blk.{layer}.ffn_{role}_exps.weight"):
            made[role] = files.values(*found)
    tensor = {role: torch.from_numpy(data.astype(np.float32)) for role, data in made.items()}
    w13 = tensor["gate_up"] if "gate_up" in tensor else torch.cat([tensor["gate"], tensor["up"]], 1)
    return w13, tensor["down"]


def expected(full_weights: tuple[Tensor, Tensor], p: MoEProblem) -> tuple[Tensor, Tensor]:
    """Cut a rank's part; the neurons are runs, as GGUF's are when they are dequantized."""
    w13, w2 = full_weights
    mine = slice(p.local_neurons.start, p.local_neurons.stop)
    held = list(p.local_experts)
    gate, up = w13[held].chunk(2, dim=1)
    return torch.cat([gate[:, mine], up[:, mine]], 1), w2[held][:, :, mine]


# -- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "TQ2_0"])
def test_blocks_of_any_shape(name: str, rng: Any) -> None:
    data = files.blocks(rng, (7, 1024), name)
    elements, nbytes = gguf.GGML_QUANT_SIZES[files.Types[name]]
    found = dequantize(torch.from_numpy(data).view(7, 1024 // elements, nbytes), name)
    assert torch.equal(found, torch.from_numpy(files.values(data, name)))


def test_blocks_that_the_library_cannot_read() -> None:
    with pytest.raises(WeightsError, match="cannot read Q8_K: pip install -U gguf"):
        dequantize(torch.zeros(2, 292, dtype=torch.uint8), "Q8_K")


@pytest.mark.parametrize("library", ["gguf", "safetensors"])
def test_without_the_library(library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"m.{library}"
    (tmp_path / name).write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "moekit.checkpoint.gguf_file", raising=False)
    monkeypatch.delattr(moekit.checkpoint, "gguf_file", raising=False)
    with pytest.raises(WeightsError, match=f"{name}: .* a library: pip install {library}"):
        Checkpoint(tmp_path / name)


# -- whole layers ------------------------------------------------------------------------------

RANKS = [
    ParallelConfig(ep_size=ep, ep_rank=e, tp_size=tp, tp_rank=t, dp_size=1)
    for ep, e, tp, t in ((1, 0, 1, 0), (2, 1, 1, 0), (1, 0, 4, 3), (3, 2, 8, 5))
]


@pytest.mark.parametrize("parallel", RANKS, ids=lambda p: f"ep{p.ep_size}tp{p.tp_size}")
@pytest.mark.parametrize(
    "types",
    [MIXED, ("Q8_0",) * 3, ("Q4_0",) * 3, ("Q5_K", "Q4_1", "F16"), ("MXFP4",) * 3],
    ids="-".join,
)
def test_dequantized(types: Any, parallel: ParallelConfig, rng: Any, tmp_path: Path) -> None:
    path, tensors = write(tmp_path, rng, types)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # rounded once
        problem = problem_from_config(path, dequantize=True, parallel=parallel, dtype=dtype)
        found = load_experts(path, None, 0, problem, dequantize=True)
        w13, w2 = expected(full(tensors), problem)
        assert torch.equal(found.w13, w13.to(dtype)) and torch.equal(found.w2, w2.to(dtype))


@pytest.mark.parametrize("parallel", RANKS, ids=lambda p: f"ep{p.ep_size}tp{p.tp_size}")
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("Q4_0", "int4_w4a16_g32"),
        ("Q8_0", "int8_w8a16_g32"),
        ("MXFP4", "mxfp4_w4a16"),
    ],
)
def test_blocks_that_a_scheme_holds(
    kind: str, scheme: str, parallel: ParallelConfig, rng: Any, tmp_path: Path
) -> None:
    path, tensors = write(tmp_path, rng, (kind,) * 3)
    assert detect(path).groups[0].scheme == scheme
    problem = problem_from_config(path, parallel=parallel)
    assert problem.quant.name == scheme
    weights = load_experts(path, None, 0, problem)
    weights.check(problem)
    assert weights.w13.dtype == (torch.int8 if kind == "Q8_0" else torch.uint8)
    found = weights.canonical(problem).dequantize(problem.quant)
    w13, w2 = expected(full(tensors), problem)
    assert torch.equal(found.w13, w13) and torch.equal(found.w2, w2)
    assert (w13 == 0).any() and (w13 < 0).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_unquantized(kind: str, rng: Any, tmp_path: Path) -> None:
    path, tensors = write(tmp_path, rng, (kind,) * 3)
    problem = problem_from_config(path)
    assert problem.dtype == {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    found = load_experts(path, None, 0, problem)
    assert found.w13.dtype == problem.dtype
    w13, w2 = full(tensors)
    assert torch.equal(found.w13.float(), w13) and torch.equal(found.w2.float(), w2)


def test_gate_and_up_in_one_tensor(rng: Any, tmp_path: Path) -> None:
    path, tensors = write(tmp_path, rng, MIXED, fused=True, layers=(1,))
    found = detect(path)
    p = found.groups[0].problem
    assert (found.layers, p.num_experts, p.top_k) == ((1,), E, 2)
    assert (p.hidden_size, p.intermediate_size) == (H, I)
    problem = problem_from_config(path, dequantize=True, dtype=torch.float32)
    weights = load_experts(path, None, 1, problem, dequantize=True)
    w13, w2 = full(tensors, 1)
    assert torch.equal(weights.w13, w13) and torch.equal(weights.w2, w2)


def test_a_split_model_by_any_file_or_its_folder(rng: Any, tmp_path: Path) -> None:
    _, tensors = write(tmp_path, rng, MIXED, layers=(0, 1), split=2)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in shards] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    (tmp_path / "mmproj-x.gguf").write_bytes(b"an encoder of images")
    for path in (*shards, tmp_path):
        problem = problem_from_config(path, dequantize=True, dtype=torch.float32)
        weights = load_experts(path, None, 1, problem, dequantize=True)
        assert torch.equal(weights.w2, full(tensors, 1)[1])
    shards[1].unlink()
    with pytest.raises(WeightsError, match="m-00002-of-00003.gguf: no such file"):
        Checkpoint(shards[0])


def test_gpt_oss(rng: Any, tmp_path: Path) -> None:
    """gpt-oss has biases and its own activation; the kernel computes what the library stores."""
    path, tensors = write(tmp_path, rng, ("MXFP4",) * 3, arch="gpt-oss", bias=True)
    problem = problem_from_config(path, device="cpu", dtype=torch.float32)
    assert (problem.activation.name, problem.has_bias) == ("swigluoai", True)
    weights = load_experts(path, None, 0, problem)
    biases = {role: tensors[f"blk.0.ffn_{role}_exps.bias"][0] for role in ("gate", "up", "down")}
    want = np.concatenate([biases["gate"], biases["up"]], axis=1)
    assert torch.equal(weights.w13_bias, torch.from_numpy(want))
    assert torch.equal(weights.w2_bias, torch.from_numpy(biases["down"]))
    kernel = moekit.compose(problem)
    x = torch.randn(5, H)
    ids = torch.rand(5, E).topk(2).indices
    routing = moekit.Routing(topk_weights=torch.rand(5, 2), topk_ids=ids)
    out = kernel(x, kernel.pack(weights), routing)
    w13, w2 = full(tensors)
    dense = moekit.ExpertWeights(w13=w13, w2=w2, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    plain = problem.replace(quant="none")
    assert_close(out, oracle(x, dense, routing, plain), problem)


def test_grok_has_ggmls_gelu(rng: Any, tmp_path: Path) -> None:
    path, _ = write(tmp_path, rng, MIXED, arch="grok")
    assert detect(path).groups[0].problem.activation.name == "gelu_tanh"


# -- wrong uses --------------------------------------------------------------------------------


def test_blocks_without_a_scheme_say_what_to_do(rng: Any, tmp_path: Path) -> None:
    path, _ = write(tmp_path, rng, MIXED)
    assert detect(path).groups[0].scheme is None
    with pytest.raises(
        WeightsError, match="GGUF Q4_K in blk.*gate.* and GGUF Q6_K in .*down.*no scheme"
    ):
        problem_from_config(path)
    problem = problem_from_config(path, quant="none")
    with pytest.raises(WeightsError, match="dequantize=True"):
        load_experts(path, None, 0, problem)


def test_wrong_layers_names_and_models(rng: Any, tmp_path: Path) -> None:
    path, tensors = write(tmp_path, rng, MIXED)
    problem = problem_from_config(path, dequantize=True)
    with pytest.raises(WeightsError, match="layer 7 has no .* choose one of the 1 layers from 0"):
        load_experts(path, None, 7, problem, dequantize=True)
    with pytest.raises(WeightsError, match=r"blk.0.ffn_down_exps.weight is \(4, 512, 1, 210\)"):
        load_experts(path, None, 0, problem.replace(num_experts=8), dequantize=True)
    del tensors["blk.0.ffn_up_exps.weight"]
    files.write(path, tensors, **FIELDS)
    with pytest.raises(WeightsError, match="blk.0.ffn_up_exps.weight is missing"):
        load_experts(path, None, 0, problem, dequantize=True)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(WeightsError, match=r"2 models are in this folder \(m.gguf, other.gguf\)"):
        Checkpoint(tmp_path)


def test_an_unknown_architecture(rng: Any, tmp_path: Path) -> None:
    path, tensors = write(tmp_path, rng, MIXED, arch="novel")
    with pytest.raises(WeightsError, match="of the GGUF architecture 'novel'"):
        detect(path)
    problem = MoEProblem(
        num_experts=E, top_k=2, hidden_size=H, intermediate_size=I, dtype=torch.float32
    )
    weights = load_experts(path, None, 0, problem, dequantize=True)
    assert torch.equal(weights.w2, full(tensors)[1])


def test_a_dense_model(rng: Any, tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_down.weight": (files.blocks(rng, (H, I), "Q8_0"), "Q8_0")}
    path = files.write(tmp_path / "dense.gguf", tensors, "llama", embedding_length=H)
    with pytest.raises(WeightsError, match="no layer has experts called blk"):
        detect(path)
