"""Reading: any slice, only the needed bytes, little memory, progress, files that change."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import sys
import threading
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from safetensors.torch import load_file, save_file

from moekit import ParallelConfig
from moekit.checkpoint import Checkpoint, load_experts, load_layers, problem_from_config, progress
from moekit.checkpoint import files as checkpoint_reading
from moekit.errors import WeightsError

MIB = 1 << 20


@pytest.mark.parametrize(("far", "span"), [(0, 1), (64, 100), (1 << 14, 1 << 18)])
def test_any_slice(far: int, span: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, distant and near runs, odd offsets and other shapes, against the library."""
    monkeypatch.setattr(checkpoint_reading, "_FAR", far)
    monkeypatch.setattr(checkpoint_reading, "_SPAN", span)
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
        got = checkpoint.read("c", slice(1, 2), slice(0, 2), slice(3, 9), shape=(4, 10, 96))
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
            before = read_calls()
            load_experts(checkpoint, None, 0, problem)
            assert 0.97 < checkpoint.bytes_read * ep * tp / total < 1.05, (ep, tp)
            # Short runs of w2 are read with the gaps between them, but never more than the experts.
            most = checkpoint.bytes_read if tp == 1 else total / ep
            assert read_calls() - before < most + 64 * 1024


def read_calls() -> int:
    """Return the bytes that read system calls of this process have returned."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return int(re.search(r"rchar: (\d+)", text)[1])


def resident(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("format", ["bf16", "transposed"])
def test_peak_memory(
    format: str, ep: int, tp: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The peak is at most one shard and this rank's weights, in addition to what was there."""
    path = tmp_path_factory.mktemp(format)
    E, H, I = 16, 1024, 512
    stem, tensors = "model.layers.0.feed_forward.experts", {}
    if format == "transposed":
        tensors[f"{stem}.gate_up_proj"] = torch.ones(E, H, 2 * I).bfloat16()
        tensors[f"{stem}.down_proj"] = torch.ones(E, I, H).bfloat16()
    else:
        for e in range(E):
            for name, shape in dict(gate_proj=(I, H), up_proj=(I, H), down_proj=(H, I)).items():
                tensors[f"{stem}.{e}.{name}.weight"] = torch.ones(shape).bfloat16()
    config = dict(
        model_type="llama4_text", hidden_size=H, intermediate_size=I, num_local_experts=E,
        num_experts_per_tok=1,
    )  # fmt: skip
    files.save(path, tensors, config, shards=2)
    shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    parallel = ParallelConfig(ep_size=ep, tp_size=tp)
    problem = problem_from_config(path, parallel=parallel, device="cpu")
    del tensors
    load_experts(path, None, 0, problem)  # so that threads and modules are loaded
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not let a process reset its peak")
    before = resident("VmRSS")
    weights = load_experts(path, None, 0, problem)
    mine = weights.w13.nbytes + weights.w2.nbytes
    assert mine == 3 * E * H * I * 2 // ep // tp
    peak = resident("VmHWM") - before
    assert mine * 0.5 < peak < mine + shard, (peak / MIB, mine / MIB, shard / MIB)


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


class TestProgress:
    def test_a_bar_shows_bytes(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        files.write(tmp_path, files.bf16, E=4, layers=2)
        problem = problem_from_config(tmp_path, device="cpu")
        list(load_layers(tmp_path, None, [0, 1], problem, progress=True))
        out, err = capsys.readouterr()
        assert not out and err.endswith("\n")
        assert re.search(r"loading experts: 100%.*B/s", err.split("\r")[-1])

    def test_no_bar_without_a_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(shown: bool | None) -> str:
            with progress.progress(100, "x", shown) as report:
                report(Path("a"), 50)
            return capsys.readouterr().err

        monkeypatch.setattr(progress, "_DELAY", 0.0)
        assert run(None) == ""
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        assert "x:  50%" in run(None) and run(False) == ""

    def test_no_bar_for_quick_loads(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        with progress.progress(100, "x") as report:
            report(Path("a"), 100)
        assert capsys.readouterr().err == ""

    def test_without_tqdm_each_file_is_a_line_in_the_log(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        files.write(tmp_path, files.bf16, E=4, layers=2)
        problem = problem_from_config(tmp_path, device="cpu")
        with caplog.at_level(logging.INFO, "moekit"):
            list(load_layers(tmp_path, None, [0, 1], problem, progress=True))
        names = [re.search(r"loading experts: .*/(.*), 0.0 of", m)[1] for m in caplog.messages]
        stored = {file.name for file in tmp_path.glob("*.safetensors")}
        assert len(names) == len(set(names)) and set(names) <= stored and names


class TestFilesThatChange:
    """A file is read only if it is still the one whose header was read."""

    ROWS, COLUMNS = 512, 4096  # rows of 8 KB; 64 columns of them are short runs

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(self.ROWS, self.COLUMNS).bfloat16()}, file)
        return file

    def cut(self, checkpoint: Checkpoint) -> torch.Tensor:
        return checkpoint.read("a", slice(0, self.ROWS), slice(0, 64))

    @pytest.mark.parametrize("held_open", [False, True])
    def test_replaced(self, file: Path, held_open: bool) -> None:
        """A rename replaces the file, as downloads do. An open file stays the old one."""
        with Checkpoint(file) as checkpoint:
            if held_open:
                self.cut(checkpoint)
            other = file.with_suffix(".part")
            save_file({"b": torch.zeros(self.ROWS, self.COLUMNS).bfloat16()}, other)
            other.replace(file)
            if held_open:
                assert bool((self.cut(checkpoint) == 1).all())
                checkpoint.close()
            with pytest.raises(WeightsError, match=f"{file}: replaced or written to after its"):
                self.cut(checkpoint)

    def test_written_to(self, file: Path) -> None:
        with Checkpoint(file) as checkpoint:
            self.cut(checkpoint)
            with file.open("r+b") as stream:
                stream.seek(-100, os.SEEK_END)
                stream.write(b"\1" * 100)
            with pytest.raises(WeightsError, match=f"{file}: replaced or written to after its"):
                self.cut(checkpoint)

    def test_truncated_in_the_middle_of_reading(self, file: Path) -> None:
        """Truncated many times; with a mapped file, the process would die of SIGBUS."""
        data = file.read_bytes()
        stop = threading.Event()

        def shrink_and_grow() -> None:
            while not stop.is_set():
                os.truncate(file, len(data) // 2)
                os.truncate(file, len(data))

        thread = threading.Thread(target=shrink_and_grow)
        thread.start()
        try:
            failed = 0
            for _ in range(200):
                try:
                    with Checkpoint(file) as checkpoint:
                        self.cut(checkpoint)
                except WeightsError as error:
                    assert str(file) in str(error)
                    failed += 1
        finally:
            stop.set()
            thread.join()
        assert failed > 0
