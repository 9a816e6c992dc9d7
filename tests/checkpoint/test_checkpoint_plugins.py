"""Formats that plugins add are read from files and pushed, and their faults are contained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from fake_plugins import Fakes, installed, state
from right_fused import acme_moe
from torch import Tensor

import moekit
from moekit import MoEProblem, OperandQuant, ParallelConfig, QuantScheme, registry
from moekit.backends import builtin
from moekit.checkpoint import (
    Format,
    Method,
    PushedExperts,
    declared_format,
    detect,
    format_of_scheme,
    load_experts,
    problem_from_config,
)
from moekit.discovery import registry as plugins
from moekit.errors import InvalidInput, WeightsError
from moekit.formats import methods
from moekit.plugin import FormatSpec
from moekit.problem.quantize import dequantize, quantize

pytest.importorskip("safetensors")

NF4 = acme_moe.nf4.SCHEME
CONFIG = {"quant_method": "acme_nf4", "group_size": 64}


@pytest.fixture(autouse=True)
def offer() -> Iterator[Callable[[Any], None]]:
    """Return a function that registers a scheme or format until the test ends."""
    offered: list[Any] = []

    def add(record: Any) -> None:
        registry().register(record)
        offered.append(record)

    for each in (NF4, *acme_moe.moekit_formats()):
        add(each)
    yield add
    for each in offered:
        registry().unregister(each)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    yield from installed(tmp_path, monkeypatch)


def pack(values: Tensor) -> files.Packed:
    """Store values as QLoRA does, with the even column in the upper half of a byte."""
    book = torch.tensor(acme_moe.nf4.NF4.codebook)
    absmax = files.grouped(values, 1, 64)
    each = files.spread(absmax, *values.shape, 1, 64)
    codes = (values[..., None] / each[..., None] - book).abs().argmin(dim=-1)
    weight = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    return {"weight": weight, "absmax": absmax}, book[codes] * each


@pytest.mark.parametrize("config", [CONFIG, None], ids=["declared", "shown by its tensors"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_reads_files(config: dict[str, object] | None, tp_size: int, tmp_path: Path) -> None:
    made = files.write(tmp_path, pack, config, E=3)
    (group,) = detect(tmp_path).groups
    assert (group.scheme, group.stored.split()[0]) == (NF4.name, "acme_nf4")
    for rank in range(tp_size):
        split = ParallelConfig(tp_size=tp_size, tp_rank=rank, dp_size=1)
        problem = problem_from_config(tmp_path, parallel=split, device="cpu")
        mine = slice(rank * (256 // tp_size), (rank + 1) * (256 // tp_size))
        want = torch.cat([made.gate[:, mine], made.up[:, mine]], dim=1), made.down[:, :, mine]
        plain = load_experts(tmp_path, None, 0, problem).dequantize(problem.quant)
        for found, each in zip((plain.w13, plain.w2), want, strict=True):
            torch.testing.assert_close(found.float(), each)


def test_pushed_tensors_and_files_give_the_same_bits(tmp_path: Path) -> None:
    made = files.write(tmp_path, pack, CONFIG, E=2)
    problem = problem_from_config(tmp_path, device="cpu")
    pushed = PushedExperts(problem, declared_format(CONFIG, 128, 256))
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, tensor in made.tensors.items():
        if "experts" in name:
            *_, expert, matrix, suffix = name.split(".")
            assert pushed.push(suffix, shards[matrix], int(expert), tensor)
    files_, pushes = load_experts(tmp_path, None, 0, problem), pushed.finish()
    assert torch.equal(files_.w13, pushes.w13) and torch.equal(files_.w2_scale, pushes.w2_scale)
    kernel = moekit.compose(problem)
    routing = moekit.Routing(torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5))
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    assert torch.isfinite(kernel(x, kernel.pack(pushes), routing)).all()


def test_padded_neurons_have_the_schemes_code_of_zero(offer: Any) -> None:
    """Ranks hold whole blocks of 32 rows, so the last of three ranks has fewer neurons."""
    blocks = OperandQuant("nf4", (32, 32), codes=acme_moe.nf4.NF4)
    offer(scheme := QuantScheme(name="nf4_blocks", weight=blocks))
    format = format_of_scheme(scheme)
    split = ParallelConfig(tp_size=3, tp_rank=2, dp_size=1)
    sizes = {"num_experts": 1, "top_k": 1, "hidden_size": 64, "intermediate_size": 192 + 48}
    problem = MoEProblem(**sizes, quant=scheme, parallel=split, device="cpu")
    pushed = PushedExperts(problem, format)
    for shard, (n, k) in {"w1": (240, 64), "w3": (240, 64), "w2": (64, 240)}.items():
        weight, scale = quantize(torch.randn(n, k), blocks, None, None)
        for suffix, tensor in (("weight_packed", weight), ("weight_scale", scale)):
            pushed.push(suffix, shard, 0, tensor)
    neurons, held = len(problem.local_neurons), problem.local_intermediate_size
    assert neurons < held
    weights = pushed.finish()
    w2 = dequantize(weights.w2[0], weights.w2_scale[0], blocks)
    assert not w2[:, neurons:].any() and w2[:, :neurons].any()
    w13 = dequantize(weights.w13[0], weights.w13_scale[0], blocks)
    assert not w13[neurons:held].any() and not w13[held + neurons :].any()


def test_a_config_that_the_format_does_not_understand() -> None:
    for more, says in (
        ({"group_size": 32}, "group_size=32, and acme has groups of 64"),
        ({"double_quant": True}, "quantization_config.double_quant is True, which moekit does not"),
    ):
        with pytest.raises(WeightsError, match=says):
            declared_format(CONFIG | more, 128, 256)


class Broken(Method):
    """A format whose method raises "fault" or returns it."""

    fault: object = None

    def read(self, matrix: object) -> Format | None:
        if isinstance(self.fault, BaseException):
            raise self.fault
        return self.fault  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fault", "says"),
    [(KeyError("absmax"), "KeyError: 'absmax'"), (SystemExit(3), "SystemExit: 3"),
     ("nf4", "TypeError: read returned 'nf4'"), (None, "which is unknown for broken")],
)  # fmt: skip
def test_faults_of_a_format_name_it(
    fault: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer: Any
) -> None:
    monkeypatch.setattr(Broken, "fault", fault)
    offer(FormatSpec(name="broken", target=f"{__name__}:Broken"))
    files.write(tmp_path, pack, {"quant_method": "broken"}, E=1)
    with pytest.raises(WeightsError, match=says) as caught:
        detect(tmp_path)
    assert "broken" in str(caught.value)


def test_a_format_that_does_not_load(offer: Any) -> None:
    offer(FormatSpec(name="absent", target="no_such_package:Format", install_hint="pip install it"))
    with pytest.raises(WeightsError, match=r"'absent'.*does not load.*no_such_package.*install"):
        declared_format({"quant_method": "absent"}, 128, 256)


def source(name: str) -> str:
    return (
        "from moekit.plugin import FormatSpec, hookimpl\n"
        "@hookimpl\n"
        f"def moekit_formats():\n    return [FormatSpec(name={name!r}, target='x.y:Z')]\n"
    )


def test_no_plugin_may_take_the_name_of_a_format_of_moekit() -> None:
    """`moekit_formats` of the core repeats the names, so that discovery imports no format."""
    names = {name for method in methods.METHODS for name in method.names if "/" not in name}
    assert names == {spec.name for spec in builtin.moekit_formats()}


def test_clashes_and_faults_are_the_plugins_state(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.install("alpha", source("shared"))
    fakes.install("beta", source("shared"))
    fakes.install("gamma", source("fp8"))
    fakes.install("delta", source("No Name"))
    found = fakes.discover()
    reason = "checkpoint format 'shared' is also offered by beta-dist 1.0"
    assert (state(found, "alpha").state, state(found, "alpha").reason) == ("clash", reason)
    assert "'fp8' is a name of moekit's own format" in state(found, "gamma").reason
    assert state(found, "delta").state == "broken" and "'No Name'" in state(found, "delta").reason
    assert not state(found, "gamma").formats and "shared" not in found.formats
    monkeypatch.setattr(plugins, "_registry", found)
    with pytest.raises(WeightsError, match="quant_method 'shared'"):
        declared_format({"quant_method": "shared"}, 128, 256)
    with pytest.raises(InvalidInput):
        FormatSpec(name="x", target="no target")


def test_the_names_of_moekits_formats_are_taken() -> None:
    core = {spec.name for spec in registry().plugins[0].formats}
    assert core == set(methods._BY_NAME) - {"intel/auto-round"}
