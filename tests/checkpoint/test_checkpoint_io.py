"""Reading: any slice, only the needed bytes, files that change."""

from __future__ import annotations

import itertools
import os
import random
import threading
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from safetensors.torch import load_file, save_file

from moekit import ParallelConfig
from moekit.checkpoint import Checkpoint, load_experts, problem_from_config
from moekit.errors import WeightsError


def test_any_slice(tmp_path: Path) -> None:
    """Also in other shapes, against whole tensors; a change of the result is not seen by others."""
    file = tmp_path / "model.safetensors"
    save_file(
        {
            "a": torch.randint(-128, 127, (3,), dtype=torch.int8),
            "b": torch.randn(5, 70, 33).bfloat16(),
            "c": torch.randn(40, 96),
            "d": torch.randint(255, (7, 11, 5), dtype=torch.uint8),
            "e": torch.randn(()),
            "f": torch.randn(6, 8, 16).to(torch.float8_e4m3fn),
            "z": torch.zeros(0, 4),
        },
        file,
    )
    expected, draw, read = load_file(file), random.Random(3), 0
    with Checkpoint(file) as checkpoint:
        assert checkpoint.names() == sorted(expected) and checkpoint.names("b") == ["b"]
        for name, tensor in expected.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            for _ in range(30):
                parts = [slice(*sorted(draw.choices(range(n + 1), k=2))) for n in tensor.shape]
                parts = parts[: draw.randint(0, len(parts))]
                got, want = checkpoint.read(name, *parts), tensor[tuple(parts)]
                assert got.dtype == want.dtype and got.shape == want.shape
                assert torch.equal(
                    got.view(torch.uint8) if got.dim() else got,
                    want.contiguous().view(torch.uint8) if got.dim() else want,
                )
                read += want.nbytes
                assert checkpoint.bytes_read == read
        checkpoint.read("c").zero_()
        got = checkpoint.view("c", slice(1, 2), slice(0, 2), slice(3, 9), shape=(4, 10, 96))
        assert torch.equal(got, expected["c"].view(4, 10, 96)[1:2, :2, 3:9])


FORMATS = {
    "bf16": (files.bf16, None),
    "fp8": (
        files.fp8(128, 128, "weight_scale_inv"),
        dict(quant_method="fp8", weight_block_size=[128, 128]),
    ),
    "gptq": (
        files.gptq(128, zero_points=True),
        dict(quant_method="gptq", sym=False, desc_act=False),
    ),
    "ct": (files.pack_quantized(128), None),
    "awq": (files.awq(128), dict(quant_method="awq", group_size=128)),
}


@pytest.mark.parametrize("format", FORMATS)
def test_only_this_ranks_bytes_are_read(format: str, tmp_path: Path) -> None:
    packer, config = FORMATS[format]
    made = files.write(tmp_path, packer, config, E=6, H=512, I=512)
    total = sum(t.nbytes for name, t in made.tensors.items() if "experts" in name)
    for ep, tp in itertools.product((1, 2, 3), (1, 2, 4)):
        parallel = ParallelConfig(ep_size=ep, ep_rank=ep - 1, tp_size=tp, tp_rank=tp - 1)
        with Checkpoint(tmp_path) as checkpoint:
            problem = problem_from_config(checkpoint, parallel=parallel, device="cpu")
            load_experts(checkpoint, None, 0, problem)
            assert 0.97 < checkpoint.bytes_read * ep * tp / total < 1.05, (ep, tp)


def test_the_number_of_threads_is_restored(tmp_path: Path) -> None:
    """Loading threads use one core each, but threads that start later do not."""
    files.write(tmp_path, files.awq(32), dict(quant_method="awq", group_size=32), E=4)
    problem, seen = problem_from_config(tmp_path, device="cpu"), []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load_experts(tmp_path, None, 0, problem)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), seen) == (3, [3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["replaced", "written", "truncated"])
def test_files_that_change(how: str, tmp_path: Path) -> None:
    """A layer is read only if its files are still the ones that were opened."""
    files.write(tmp_path, files.bf16, E=2, H=64, I=64, shards=1)
    problem, (file,) = problem_from_config(tmp_path, device="cpu"), tmp_path.glob("*.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        load_experts(checkpoint, None, 0, problem)
        if how == "replaced":
            other = file.with_suffix(".part")
            save_file({"b": torch.zeros(640, 640)}, other)
            other.replace(file)  # as downloads do
        elif how == "written":
            with file.open("r+b") as stream:
                stream.seek(-100, os.SEEK_END)
                stream.write(b"\1" * 100)
        else:
            os.truncate(file, file.stat().st_size // 2)
        said = "truncated" if how == "truncated" else "replaced or written to"
        with pytest.raises(WeightsError, match=f"{file}: {said} after its header was read"):
            load_experts(checkpoint, None, 0, problem)
        file.unlink()
        with pytest.raises(WeightsError, match=f"{file}: cannot be opened"):
            load_experts(checkpoint, None, 0, problem)
