"""The adapters' own decisions, with the library's stand-in: slots, sharing, routes, reasons."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import flashinfer_registry
import flashinfer_standins
import pytest
import torch
import torch.distributed as dist
from flashinfer_registry import dispatchers
from moekit_flashinfer import dispatcher, library, moekit_dispatchers, moekit_experts
from moekit_flashinfer.experts import experts_transient
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rank_pools import rank_pool

import moekit
from moekit import MoEProblem, ParallelConfig, Routing
from moekit.errors import BackendBroken, BackendError, InvalidInput
from moekit.runtime.workspace import Workspace
from moekit.testing import assert_close, cases
from moekit.testing.cases import make_case, random_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is tested")

SPECS = {spec.name: spec for spec in (*moekit_dispatchers(), *moekit_experts())}


def problem(rank: int = 0, ranks: int = 1, **changes) -> MoEProblem:
    sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, max_num_tokens=16)
    parallel = ParallelConfig(ep_size=ranks, ep_rank=rank)
    return MoEProblem(**{**sizes, "device": "cpu", "parallel": parallel, **changes})


pool = rank_pool(2)


def made(rank, ranks, name="flashinfer_alltoall", **changes):
    spec, p = dispatchers()[name], problem(rank, ranks, **changes)
    return spec.load()(spec, p, dist.group.WORLD)


def routing(p: MoEProblem, tokens: int, absent: float = 0.3) -> Routing:
    ids = torch.rand(tokens, p.num_physical_experts).argsort(dim=1)[:, : p.top_k].int()
    ids[torch.rand(ids.shape) < absent] = -1
    return Routing(torch.rand(tokens, p.top_k), ids.contiguous())


# -- one-sided --------------------------------------------------------------------------------


def buffers_are_shared_and_freed(rank, ranks):
    mapped, reserved = flashinfer_standins.Driver.mapped, flashinfer_standins.Driver.reserved
    first, second = made(rank, ranks), made(rank, ranks)
    other = made(rank, ranks, max_num_tokens=8)
    assert first.lease.value is second.lease.value and first.lease.value is not other.lease.value
    assert len(mapped) == 2 * ranks
    first.destroy()
    first.destroy()
    assert len(mapped) == 2 * ranks, "freed while another layer uses it"
    second.destroy()
    other.destroy()
    assert not mapped and not reserved
    assert first.buffer_bytes() == 0


def views_outlive_the_memory(rank, ranks):
    d = made(rank, ranks)
    tensor = d.lease.value.calls.all[0].memory.tensor
    view, descriptor = tensor[0, :8], weakref.ref(tensor._capsule_wrapper)
    del tensor
    d.destroy()
    gc.collect()
    assert descriptor() is not None, "torch reads it when the view goes"
    del view


def a_third_call_in_flight_is_refused(rank, ranks):
    d = made(rank, ranks)
    p, one = d.problem, d.buffer_bytes()
    x = torch.randn(3, p.hidden_size, dtype=p.dtype)
    calls = [d.prepare(x, routing(p, 3), None).result() for _ in range(2)]
    assert d.buffer_bytes() == 2 * one, "the second call needs memory of its own"
    with pytest.raises(InvalidInput, match="2 calls are in flight"):
        d.prepare(x, routing(p, 3), None)
    for call in calls:
        d.finalize(torch.zeros_like(call.x), call, torch.empty_like(x)).result()
    d.abandon(d.prepare(x, routing(p, 3), None).result())
    assert d.lease.value.calls.in_flight == 0
    d.destroy()


@pytest.mark.parametrize(
    "work",
    [
        buffers_are_shared_and_freed,
        views_outlive_the_memory,
        a_third_call_in_flight_is_refused,
    ],
)
def test_one_sided_memory(pool, work):
    pool.run(work)


def without_a_copy(rank, ranks, hidden, dtype, version):
    d = made(rank, ranks, hidden_size=hidden, dtype=dtype)
    x = torch.randn(5 + rank, hidden, dtype=dtype)
    route = routing(d.problem, 5 + rank, absent=0.0)
    outs = []
    for in_place in (False, True):
        with flashinfer_standins.using(version):
            tokens = d.prepare(x, route, None).result()
        total = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0).sum(1, keepdim=True)
        y = d.output(tokens) if in_place else torch.empty_like(tokens.x)
        y.copy_(torch.where(total > 0, tokens.x * total, 0.0))
        assert y.shape == tokens.x.shape
        out = torch.full_like(x, float("nan"))
        outs.append(d.finalize(y, tokens, out).result())
    want = x * route.topk_weights.sum(dim=1, keepdim=True)
    for out in outs:
        torch.testing.assert_close(out.float(), want.float(), atol=3e-2, rtol=3e-2)
    assert torch.equal(outs[0], outs[1])
    d.destroy()


@pytest.mark.parametrize("version", flashinfer_standins.VERSIONS)
@pytest.mark.parametrize(("hidden", "dtype"), [(64, torch.bfloat16), (24, torch.float32)])
def test_output_without_a_copy(pool, hidden, dtype, version):
    pool.run(without_a_copy, hidden, dtype, version)


def full_layers(rank, ranks, seed, name, tokens, changes):
    """Through a kernel, against the oracle, with slots and whole tokens without an expert."""
    cases.use_seed(seed)
    p = problem(rank, ranks, max_num_tokens=tokens, **changes)
    backends = flashinfer_registry.registry()
    kernel = moekit.compose(p, name, "torch", backends=backends, workspace=Workspace())
    packed = kernel.pack(random_weights(p))
    whole = p.replace(parallel=ParallelConfig())
    for index, kind in enumerate(("masked", "rows", "none", "random")):
        case = make_case(whole, tokens - 3 * rank, kind, (index, rank))
        out = kernel(case.x, packed, case.routing)
        assert_close(out, case.reference(), p, f"rank {rank}, {kind}", case=case)
    kernel.destroy()


@pytest.mark.parametrize("name", ["standin_one_sided", "standin_two_sided"])
@pytest.mark.parametrize("tokens", [dispatcher.REROUTED_FROM - 1, dispatcher.REROUTED_FROM + 9])
def test_ids_without_an_expert_below_and_above_rerouting(pool, name, tokens):
    pool.run(full_layers, cases.seed(), name, tokens, {})


def test_one_expert_on_a_rank(pool):
    """-1 divided by one expert a rank would be rank -1."""
    pool.run(full_layers, cases.seed(), "standin_one_sided", 9, {"num_experts": 2, "top_k": 1})


@pytest.mark.parametrize("hidden", [24, 136, 272])
@pytest.mark.parametrize("tokens", [7, 9])
def test_payloads_of_any_width_stay_aligned(pool, hidden, tokens):
    """The stand-in traps where a vector store of the library would."""
    changes = {"hidden_size": hidden, "quant": "fp8_block", "top_k": 1, "dtype": torch.bfloat16}
    pool.run(full_layers, cases.seed(), "standin_one_sided", tokens, changes)


# -- reasons ----------------------------------------------------------------------------------


def reasons(name: str, **changes) -> str:
    p = problem(ranks=changes.pop("ranks", 4), **changes)
    spec = dataclasses.replace(SPECS[name], requires=(), devices=("cpu",))
    return "; ".join(spec.unsupported(p))


ONE, TWO = "flashinfer_alltoall", "flashinfer_alltoall_two_sided"
SLICED, SHARED = ParallelConfig(ep_size=2, tp_size=2), ParallelConfig(ep_size=4, dp_size=2)
FP16_BLOCKS = {"quant": "fp8_block", "dtype": torch.float16}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (ONE, {"top_k": 3}, "top_k=3 has no compiled kernel"),
        (ONE, {"num_experts": 128, "ranks": 128}, "128 ranks exceed 64"),
        (ONE, {"num_experts": 6}, "6 experts must be a multiple of ep_size=4"),
        (ONE, {"max_num_tokens": None}, "set max_num_tokens"),
        (ONE, {"parallel": SLICED}, "tensor parallelism is not supported (tp_size=2)"),
        (ONE, {"parallel": SHARED}, "every rank must have a batch of tokens"),
        (TWO, {"top_k": 33, "num_experts": 64}, "top_k=33 exceeds 32"),
        (TWO, {"num_experts": 6, "ranks": 2}, "not a multiple of 4"),
        (TWO, {"hidden_size": 36}, "not a multiple of 16 bytes"),
        ("flashinfer_allgather", {"parallel": SHARED}, "every rank must have a batch of tokens"),
        ("flashinfer_cutlass", {"quant": "fp8_tensor"}, "quant scheme fp8_tensor is not supported"),
        ("flashinfer_cutlass", {"activation": "gelu"}, "activation gelu is not supported"),
        ("flashinfer_cutlass", FP16_BLOCKS, "computes in bfloat16 only"),
    ],
)
def test_limits_are_reasons(name, changes, reason):
    assert reason in reasons(name, **changes)


def test_within_the_limits_there_is_no_reason():
    for name in ("flashinfer_alltoall", "flashinfer_alltoall_two_sided", "flashinfer_allgather"):
        assert reasons(name) == ""
    assert reasons("flashinfer_cutlass") == ""
    assert reasons("flashinfer_cutlass", hidden_size=36) == ""  # moekit pads it to 40


USABLE = ("0.6.8", "0.6.8.post1", "0.7.2", "0.7.2.post1", "")
OTHERS = ("0.6.7", "0.6.9", "0.6.18.post1", "0.7", "0.7.1", "0.7.3")


@pytest.mark.parametrize("version", USABLE + OTHERS)
def test_versions(monkeypatch, version):
    usable = version in USABLE
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert (library.unsupported() == []) is usable
    needed = ">=0.6.8,<0.6.9 or >=0.7.2,<0.7.3 is required"
    reason = f"flashinfer-python {version} is installed, but {needed}"
    assert usable or reason in reasons("flashinfer_cutlass")
    if version:
        assert all(each.contains(version) for each in declared()) is usable


def declared() -> list[SpecifierSet]:
    """Return what the extra ``library`` asks pip for."""
    tomllib = pytest.importorskip("tomllib")
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    found = tomllib.loads(text)["project"]["optional-dependencies"]["library"]
    return [Requirement(each).specifier for each in found]


# -- the library's modules --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "flashinfer.comm.trtllm_alltoall does not load: ModuleNotFoundError"),
        ("raise RuntimeError('no driver')", "does not load: RuntimeError: no driver"),
        ("def moe_comm(): ...", "moe_prepare is missing; moe_comm cannot be called: too many"),
    ],
)
def test_a_library_is_judged_by_what_it_offers(monkeypatch, tmp_path, text, said):
    folder = tmp_path / "flashinfer" / "comm"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    if text is not None:
        (folder / "trtllm_alltoall.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendBroken, match=f"{said}.*pip install 'moekit-flashinfer.library"):
        calls = {"moe_prepare": "10", "moe_comm": "9"}
        library._compiled("comm.trtllm_alltoall", calls, "comm", "gen_comm_alltoall_module")
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


def test_compilation_is_reported(caplog):
    spec = SimpleNamespace(name="fused_moe_90", is_compiled=False, sources=["a.cu", "b.cu"])
    with caplog.at_level(logging.WARNING), library.compiling(lambda: spec):
        assert "compiles fused_moe_90: 2 files" in caplog.text
    assert "flashinfer-jit-cache has it" in caplog.text


def test_failed_compilation_says_what_to_do():
    spec = SimpleNamespace(name="comm", is_compiled=True)
    with pytest.raises(BackendError, match="comm is not available: RuntimeError: no nvcc; put"):
        with library.compiling(lambda: spec):
            raise RuntimeError("no nvcc")


# -- experts ----------------------------------------------------------------------------------


def test_sizes_grow_with_rows_and_cover_the_buffers():
    for scheme in ("none", "fp8_tensor_static", "fp8_block"):
        p = problem(quant=scheme, dtype=torch.bfloat16, hidden_size=512, intermediate_size=256)
        sizes = [experts_transient(p, rows) for rows in (0, 1, 100, 1000, 10000)]
        assert sizes[0] == 0 and sizes == sorted(sizes)
        pairs = 10000 * p.top_k
        # permuted x or GEMM 2's rows, and GEMM 1's, at the least
        assert sizes[-1] > pairs * (p.hidden_size + 2 * p.intermediate_size) * 2


# -- the fused kernel -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_dropped_weights_are_freed(scheme):
    """Neither the layer nor the window, which other layers share, keeps what a call was given."""
    sizes = dict(hidden_size=256, intermediate_size=128, dtype=torch.bfloat16, quant=scheme)
    p = problem(**sizes)
    backends = flashinfer_registry.registry()
    kernel = moekit.compose(p, "standin_mega", backends=backends, workspace=Workspace())
    case, packed = make_case(p, 5), kernel.pack(random_weights(p))
    kernel(case.x, packed, case.routing)
    dropped = [weakref.ref(tensor) for tensor in packed.experts.values()]
    del packed
    gc.collect()
    assert not [ref for ref in dropped if ref() is not None]
    assert not kernel.experts.lease.value.runner._validated_weights
    kernel.destroy()
