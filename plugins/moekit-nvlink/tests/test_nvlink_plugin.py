"""The plugin's answers before anything runs: reasons, memory, settings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moekit_nvlink import buffers, moekit_dispatchers
from moekit_nvlink.buffers import Buffers, open_memory
from moekit_nvlink.layout import Layout
from moekit_nvlink.settings import PROGRAMS_VARIABLE, Settings
from moekit_nvlink.transfer import Tile
from nvlink_host import problems

import moekit
from moekit.errors import BackendError, GroupMismatch, InvalidInput, PeerFailed

HT, LL = moekit_dispatchers()


def layer(**changes) -> moekit.MoEProblem:
    values = {"num_experts": 256, "top_k": 8, "hidden_size": 7168, "intermediate_size": 2048,
              "max_num_tokens": 128, "device": moekit.DeviceSpec("cuda", (9, 0))}  # fmt: skip
    return moekit.MoEProblem(**{**values, "parallel": moekit.ParallelConfig(ep_size=8), **changes})


@pytest.mark.parametrize("spec", [HT, LL], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_k": 33}, "top_k=33 exceeds 32"),
        ({"hidden_size": 7160}, "hidden_size must be a multiple of 16 (got 7160)"),
        ({"max_num_tokens": None}, "set max_num_tokens"),
        ({"device": moekit.DeviceSpec.parse("gfx942")}, "needs NVIDIA GPUs"),
        ({"parallel": moekit.ParallelConfig(ep_size=8, nodes=2)}, "on 2 hosts, and it serves one"),
        ({"parallel": moekit.ParallelConfig(ep_size=128)}, "128 ranks exceed 64"),
    ],
)
def test_reasons(spec, changes, reason: str) -> None:
    assert any(reason in each for each in spec.unsupported(layer(**changes)))


@pytest.mark.parametrize("spec", [HT, LL], ids=lambda spec: spec.name)
@pytest.mark.parametrize("parallel", [(8, 1, 8), (3, 1, 3), (4, 2, 8), (4, 2, 4), (8, 1, 2)])
def test_supported_shapes(spec, parallel) -> None:
    ep, tp, dp = parallel
    problem = layer(parallel=moekit.ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp))
    assert spec.unsupported(problem) == []


def test_rows_that_an_int32_cannot_number() -> None:
    reasons = LL.unsupported(layer(max_num_tokens=2**20))
    assert any("2147483648 rows on all ranks" in each for each in reasons)
    assert LL.unsupported(layer(max_num_tokens=2**20 - 1)) == []


@pytest.mark.parametrize("other", ["moekit_flashinfer", "moekit_deepep"])
def test_it_precedes_others_on_up_to_four_gpus(other: str) -> None:
    """FlashInfer, which precedes DeepEP, was compared on two and four GPUs."""
    problems = [layer(parallel=moekit.ParallelConfig(ep_size=ranks)) for ranks in (2, 4, 8)]
    theirs = pytest.importorskip(other).moekit_dispatchers()
    ahead = [HT.priority_for(p) > max(spec.priority_for(p) for spec in theirs) for p in problems]
    assert ahead == [True, True, False]
    assert all(LL.priority_for(p) < HT.priority_for(p) for p in problems)


def test_settings_are_checked(monkeypatch) -> None:
    monkeypatch.setenv(PROGRAMS_VARIABLE, "fast")
    with pytest.raises(InvalidInput, match=f"{PROGRAMS_VARIABLE}='fast': expected .*; set one"):
        Settings.read()
    assert any(PROGRAMS_VARIABLE in each for each in HT.unsupported(layer()))


def test_settings_of_the_environment(monkeypatch) -> None:
    assert Settings.read() == Settings(programs=64)
    monkeypatch.setenv(PROGRAMS_VARIABLE, "24")
    assert Settings.read() == Settings(programs=24, most_multiprocessors=24)


@pytest.mark.parametrize(
    ("tokens", "words", "tile"),
    [
        (100, 3584, Tile(100, 1, 4096, 8)),
        (512, 3584, Tile(128, 1, 4096, 8)),
        (1024, 3584, Tile(64, 1, 4096, 8)),
        (2048, 1024, Tile(64, 4, 1024, 8)),
        (2048, 40, Tile(64, 16, 64, 8)),
        (2049, 1024, Tile(64, 8, 1024, 8)),
        (2049, 3584, Tile(64, 2, 4096, 8)),
    ],
)
def test_programs_that_dispatch(tokens: int, words: int, tile: Tile, monkeypatch) -> None:
    """From 513 tokens on, two programs of half the warps stand for each program of the default."""
    monkeypatch.setattr(Tile, "few_programs", 128)  # the stand-in has fewer
    assert Tile.of_dispatch(tokens, words, Settings(programs=32)) == tile


def test_programs_that_dispatch_are_at_most_as_many_as_given() -> None:
    given = Settings(programs=24, most_multiprocessors=24)
    assert Tile.of_dispatch(513, 1024, given) == Tile(24, 16, 1024, 16)
    assert Tile.of_dispatch(4096, 3584, given) == Tile(24, 4, 4096, 16)


def test_other_symmetric_memory_is_refused(monkeypatch) -> None:
    """Its kernels write to addresses of CUDA's; other libraries may have set another one."""
    name = "torch.distributed._symmetric_memory"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    for spec in (HT, LL):
        assert any("is set to 'NVSHMEM'" in each for each in spec.unsupported(layer()))
    for backend, usable in (("NCCL", False), ("CUDA", True), (None, True)):
        set_to = SimpleNamespace(get_backend=lambda device, found=backend: found)
        monkeypatch.setitem(sys.modules, name, set_to)
        assert (HT.unsupported(layer()) == []) is usable


def test_steps_in_flight_fit_the_smallest_shared_memory() -> None:
    """A block has 99 KB on GPUs of compute capability 8.6 and 8.9."""
    for entries in range(1, 65):
        for size in (2, 4):
            tile = Tile.of_combine(4096, 7168, size, entries, 32)
            step = tile.tokens * tile.columns * size * entries
            assert (tile.stages - 1) * step <= 98 * 1024, entries


@pytest.mark.parametrize("batched", [False, True])
def test_layers_of_another_top_k_do_not_share_buffers(batched: bool) -> None:
    """Regions begin at multiples of 256 bytes, so buffers for few tokens have equal offsets."""
    small = {"parallel": moekit.ParallelConfig(ep_size=2), "max_num_tokens": 4}
    layouts = [Layout.of(layer(top_k=k, **small), batched) for k in (2, 4)]
    assert layouts[0].nbytes == layouts[1].nbytes and layouts[0] != layouts[1]


def test_regions_of_a_buffer_do_not_overlap() -> None:
    for batched, training in ((False, False), (False, True), (True, False)):
        problem = problems(3, 2, 10, 4, 48, 7, quant="fp8_block", training=training)[0]
        at = Layout.of(problem, batched)
        starts = [at.x, at.scale, at.ids, at.weights, at.y, at.grads, at.counts, at.flags]
        starts.append(at.nbytes)
        assert (at.counts > at.grads) is training
        assert starts == sorted(starts) and not any(start % 256 for start in starts[:-1])


def test_calls_of_one_size_share_their_views(monkeypatch) -> None:
    monkeypatch.setattr(buffers, "_MAX_REGIONS", 3)
    memory = torch.arange(64, dtype=torch.uint8)
    with torch.inference_mode():
        buffer = buffers.Buffer.of(memory, [0, 0], buffers.Lost.of(2, memory.device), 1)
        first = buffer.region(8, (2, 3), torch.int16)
    assert first.tolist() == memory[8:20].view(torch.int16).view(2, 3).tolist()
    assert not first.is_inference() and first is buffer.region(8, (2, 3), torch.int16)
    for rows in range(5):
        assert buffer.region(16, (rows, 4), torch.uint8).shape == (rows, 4)
    assert len(buffer.regions) <= 3 and first is not buffer.region(8, (2, 3), torch.int16)


class Group:
    """A group of as many ranks as are given a host and a GPU; this is rank 0."""

    def __init__(self, ranks, reach) -> None:
        self.ranks, self.reach = ranks, reach

    def size(self) -> int:
        return len(self.ranks)


@pytest.fixture
def machine(monkeypatch):
    """GPUs a, b and c of this host; the second exchange says whom other ranks cannot reach."""

    def exchange(what: str, mine: str, group: Group) -> list[str]:
        others = [json.dumps(each) for each in group.ranks] if "where" in what else group.reach
        return [mine, *others[1:]]

    cuda = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(
            uuid="abc"[getattr(device, "index", device)]
        ),
        device_count=lambda: 3,
        can_device_access_peer=lambda a, b: {a, b} != {0, 2},
    )
    monkeypatch.setattr(buffers, "exchange", exchange)
    monkeypatch.setattr(buffers.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(buffers.torch, "cuda", cuda)
    monkeypatch.setattr(buffers.ctypes, "CDLL", lambda name: SimpleNamespace())
    return torch.device("cuda", 0)


def test_ranks_must_reach_each_other(machine) -> None:
    check = buffers._check_reach
    check(Group([("here", "a"), ("here", "b")], ["[]", "[]"]), machine)
    check(Group([("here", "a"), ("here", "a")], ["[]", "[]"]), machine)
    with pytest.raises(
        GroupMismatch, match=r"GPU of rank 0 .* ranks \[1\] over NVLink.* use 'naive'"
    ):
        check(Group([("here", "a"), ("here", "c")], ["[]", "[]"]), machine)
    with pytest.raises(GroupMismatch, match=r"GPU of rank 1 .* ranks \[0\]"):
        check(Group([("here", "a"), ("here", "z")], ["[]", "[0]"]), machine)
    with pytest.raises(GroupMismatch, match="hosts here, there"):
        check(Group([("here", "a"), ("there", "b")], ["[]", "[]"]), machine)


def test_peers_without_atomics_are_out_of_reach(machine, monkeypatch) -> None:
    """GPUs over PCIe may read and write each other's memory, but flags are atomic."""
    asked = []

    def ask(value, attribute: int, mine: int, other: int) -> int:
        asked.append((attribute, mine, other))
        value._obj.value = 0
        return 0

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=ask)
    monkeypatch.setattr(buffers.ctypes, "CDLL", lambda name: driver)
    with pytest.raises(GroupMismatch, match=r"GPU of rank 0 .* ranks \[1\].* PCIe lacks"):
        buffers._check_reach(Group([("here", "a"), ("here", "b")], ["[]", "[]"]), machine)
    assert asked == [(3, 0, 1)]


class Symmetric:
    """Stands for torch's symmetric memory; another rank may have no room."""

    def __init__(self, room: int) -> None:
        self.room, self.seen = room, []

    def empty(self, nbytes: int, **_):
        if nbytes > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(self, memory, *_):
        self.seen = [os.environ.get(name) for name in buffers._TORCH]
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * 2)


def test_memory_is_allocated_on_all_ranks_or_none(monkeypatch) -> None:
    """The rendezvous waits for every rank, so no rank may fail alone before it."""
    import torch.distributed._symmetric_memory as symmetric

    fake, others = Symmetric(100), [""]
    monkeypatch.setattr(buffers, "_check_reach", lambda *_: None)
    monkeypatch.setattr(buffers, "exchange", lambda what, mine, group: [mine, *others])
    monkeypatch.setattr(symmetric, "empty", fake.empty)
    monkeypatch.setattr(buffers, "_rendezvous", fake.rendezvous)
    first, second = buffers._TORCH
    monkeypatch.delenv(first, raising=False)
    monkeypatch.setenv(second, "0")
    memory, addresses, _ = open_memory(64, None, torch.device("cpu"))
    assert addresses == [memory.data_ptr()] * 2
    # Ranks may share a GPU or see one GPU each, and multicast is not used.
    assert fake.seen == ["1", "1"]
    assert first not in os.environ and os.environ[second] == "0"
    with pytest.raises(BackendError, match="rank 0: OutOfMemoryError.*; lower max_num_tokens"):
        open_memory(101, None, torch.device("cpu"))
    others[0] = "RuntimeError: no room"
    with pytest.raises(BackendError, match="rank 1: RuntimeError: no room"):
        open_memory(64, None, torch.device("cpu"))


@pytest.mark.parametrize("before", [None, "0"])
def test_two_threads_open_memory(monkeypatch, before: str | None) -> None:
    """The first thread ends while the second one is about to meet the ranks of its group."""
    import torch.distributed._symmetric_memory as symmetric

    for name in buffers._TORCH:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    inside = {group: threading.Event() for group in ("one", "other")}
    ended, seen = threading.Event(), []

    def rendezvous(memory, group: str):
        inside[group].set()
        assert (inside["other"] if group == "one" else ended).wait(20.0)
        seen.append([os.environ.get(name) for name in buffers._TORCH])
        return SimpleNamespace(buffer_ptrs=[])

    def use(group: str) -> None:
        if group == "other":
            assert inside["one"].wait(20.0)
        open_memory(64, group, torch.device("cpu"))
        ended.set()

    monkeypatch.setattr(buffers, "_check_reach", lambda *_: None)
    monkeypatch.setattr(buffers, "exchange", lambda what, mine, group: [mine])
    monkeypatch.setattr(symmetric, "empty", lambda nbytes, **_: torch.empty(nbytes))
    monkeypatch.setattr(buffers, "_rendezvous", rendezvous)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, ("one", "other")))
    assert seen == [["1", "1"]] * 2
    assert [os.environ.get(name) for name in buffers._TORCH] == [before] * 2


def test_buffers_in_flight(monkeypatch) -> None:
    """A second buffer is made for a second call; a lost rank is an error."""
    at = Layout.of(problems(2, 1, 4, 2, 16, 4)[0], True)

    def opened(nbytes: int, *_):
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory, [memory.data_ptr()] * 2, None

    monkeypatch.setattr(buffers, "open_memory", opened)
    monkeypatch.setattr(buffers, "exchange", lambda *_: [])
    held = Buffers(Group([0, 1], []), at, torch.device("cpu"))
    first, second = held.take(), held.take()
    assert held.nbytes == 2 * at.nbytes and first is not second
    held.calls.give_back(second)
    first.lost.ranks[1] = 1
    with pytest.raises(PeerFailed, match="rank 1 did not come"):
        held.take()


@pytest.mark.parametrize(
    "layers", ["--quick", pytest.param("--all", marks=pytest.mark.full)], ids=lambda arg: arg[2:]
)
def test_kernels_compile_for_hopper(layers: str, tmp_path) -> None:
    found = importlib.util.find_spec("triton")
    if not Path(found.origin, "../backends/nvidia/bin/cuobjdump").resolve().exists():
        pytest.skip("this triton has no NVIDIA backend")
    command = [sys.executable, str(Path(__file__).parent / "nvlink_compile.py"), layers]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.count("registers") > 10, made.stdout + made.stderr
