from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import moekit
from moekit import Activation, DeviceSpec, MoEProblem, ParallelConfig
from moekit.errors import InvalidProblem
from moekit.problem import partition
from moekit.problem.activation import apply_activation
from moekit.testing import cases

SIZES = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96, device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(quant="fp8_block", activation="swigluoai", has_bias=True, dtype=torch.float16),
        dict(activation=Activation("silu", limit=10.0), max_num_tokens=7, device="sm90"),
        dict(parallel=ParallelConfig(ep_size=4, ep_rank=3, dp_size=1), num_redundant_experts=2),
    ],
)
def test_repr_round_trips(changes: dict) -> None:
    problem = MoEProblem(**{**SIZES, **changes})
    again = eval(repr(problem), {**vars(moekit), "torch": torch})
    assert again == problem and hash(again) == hash(problem)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(top_k=9), "top_k=9 exceeds num_experts=8"),
        (dict(hidden_size=0), "hidden_size=0"),
        (dict(device="sm900"), "'sm900' is not understood"),
        (dict(device=torch.device("cuda:99")), "'cuda:99' was asked for"),
        (dict(device="cuda:99"), "'cuda:99' was asked for"),
        (dict(dtype=torch.int8), "it must be one of torch.bfloat16"),
        (dict(activation="swish"), "choose one of: .*silu"),
        (dict(quant="fp9"), "choose one of: none, fp8_tensor"),
        (dict(device="sm-90"), "'sm-90' is not understood; expected a torch device"),
        (dict(apply_router_weight_on_input=True), "needs top_k=1"),
        (dict(parallel=ParallelConfig(ep_size=9)), "a rank would hold none"),
        (dict(parallel=ParallelConfig(tp_size=5)), "tp_size=5 must divide"),
        (dict(num_redundant_experts=-1), "must be an integer of at least 0"),
    ],
)
def test_contradictions_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        MoEProblem(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ParallelConfig(ep_size=2, ep_rank=2),
        lambda: ParallelConfig(tp_size=0),
        lambda: ParallelConfig(dp_size=-1),
        lambda: ParallelConfig(ep_size=4, dp_size=3),
        lambda: ParallelConfig(ep_size=2, dp_size=8),
        lambda: partition(8, 2, 2),
        lambda: partition(8, 2, -1),
        lambda: apply_activation(torch.randn(2, 3), Activation("silu")),
    ],
)
def test_bad_parts_are_refused(make) -> None:
    with pytest.raises(InvalidProblem):
        make()


def test_partition_tiles_and_gives_the_remainder_to_the_first_ranks() -> None:
    parts = [partition(10, 4, rank) for rank in range(4)]
    assert [len(p) for p in parts] == [3, 3, 2, 2]
    assert [i for p in parts for i in p] == list(range(10))


def test_derived_sizes() -> None:
    problem = MoEProblem(
        **{**SIZES, "num_experts": 10},
        num_redundant_experts=1,
        parallel=ParallelConfig(ep_size=4, ep_rank=2, tp_size=2),
    )
    assert problem.num_physical_experts == 11
    assert list(problem.local_experts) == [6, 7, 8] and problem.num_local_experts == 3
    assert problem.local_intermediate_size == 48 and problem.w13_rows == 96
    assert problem.replace(activation=Activation("relu2")).w13_rows == 48
    assert problem.logical_expert(10) == 0
    assert problem.parallel.moves_tokens
    assert not ParallelConfig(ep_size=4, dp_size=1).moves_tokens


@pytest.mark.parametrize(
    ("device", "meets"),
    [
        ("sm90", "any cuda cuda>=8.0 cuda>=9.0 cuda==9.0"),
        ("sm100", "any cuda cuda>=8.0 cuda>=9.0"),
        ("gfx942", "any cuda gfx942"),
        ("cpu", "any cpu"),
        ("xpu", "any xpu"),
    ],
)
def test_what_devices_meet(device: str, meets: str) -> None:
    wanted = "any cpu xpu cuda cuda>=8.0 cuda>=9.0 cuda==9.0 cuda==8.0 gfx942 gfx90a"
    assert [w for w in wanted.split() if DeviceSpec.parse(device).meets(w)] == [
        w for w in wanted.split() if w in meets.split()
    ]


def test_amd_gpus_have_an_arch_instead_of_a_capability(monkeypatch) -> None:
    module = SimpleNamespace(
        get_device_name=lambda _: "AMD Instinct MI300X",
        get_device_capability=lambda _: (9, 4),
        get_device_properties=lambda _: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"),
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    found = DeviceSpec.of(torch.device("cuda"))
    assert found == DeviceSpec("cuda", None, "AMD Instinct MI300X", "gfx942")


def test_device_spec_of_another_machine() -> None:
    assert DeviceSpec.parse("sm100") == DeviceSpec("cuda", (10, 0))
    assert DeviceSpec.parse("sm_90a").capability == (9, 0)
    assert str(DeviceSpec.parse("sm90")) == "cuda sm90"
    assert str(DeviceSpec.parse("gfx942")) == "cuda gfx942"
    if not torch.cuda.is_available():
        with pytest.raises(InvalidProblem, match="another machine by its architecture"):
            DeviceSpec.parse("cuda")


@pytest.mark.parametrize(
    ("inner", "tp_size", "local", "held"),
    [
        (512, 4, 128, [128, 128, 128, 128]),
        (384, 2, 256, [256, 128]),
        (768, 4, 256, [256, 256, 128, 128]),
        (896, 4, 256, [256, 256, 256, 128]),
        (384, 8, 128, [128, 128, 128, 0, 0, 0, 0, 0]),
        (320, 2, 256, [256, 64]),
        (320, 1, 384, [320]),
    ],
)
def test_ranks_hold_whole_blocks(inner: int, tp_size: int, local: int, held: list[int]) -> None:
    """And the kit cuts weights in the same way: its ranks have the whole layer's very numbers."""
    problem = MoEProblem(
        num_experts=2, top_k=1, hidden_size=64, intermediate_size=inner, quant="fp8_block",
        device="cpu", dtype=torch.float32,
    )  # fmt: skip
    full = cases.unquantized_weights(problem)
    whole = cases.quantized(full, problem).dequantize(problem.quant)
    at = 0
    for rank, count in enumerate(held):
        mine = problem.replace(parallel=ParallelConfig(tp_size=tp_size, tp_rank=rank))
        assert mine.local_intermediate_size == local
        assert list(mine.local_neurons) == list(range(at, at + count))
        shard = cases.tp_shard(full, mine)
        shard.check(mine)
        plain = shard.dequantize(mine.quant)
        assert torch.equal(plain.w2[:, :, :count], whole.w2[:, :, at : at + count])
        assert not plain.w2[:, :, count:].any() and not plain.w13[:, count:local].any()
        for half in (0, 1):
            got = plain.w13[:, half * local : half * local + count]
            first = half * problem.local_intermediate_size + at
            assert torch.equal(got, whole.w13[:, first : first + count])
        at += count
    assert at == inner
    assert problem.replace(quant="none").local_intermediate_size == inner
