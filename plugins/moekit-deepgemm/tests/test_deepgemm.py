"""Finding the library, planning, the glue kernels. Numbers as a whole: test_standin.py."""

import sys

import pytest
import standin
import torch
from moekit_deepgemm import gemms, kernels, library, mega, moekit_experts
from moekit_deepgemm.plan import make_plan

import moekit
from moekit.contract import Dispatched, PackedWeights
from moekit.errors import BackendBroken, InvalidInput
from moekit.problem import quant
from moekit.problem.quantize import quantize
from moekit.runtime.workspace import Workspace

FP8 = torch.float8_e4m3fn
NAN = float("nan")
GROUPS = quant.scheme("fp8_block").activation


# -- the library


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A deep_gemm folder named by the environment, on a machine with nvcc."""
    path = tmp_path / "deep_gemm"
    path.mkdir()
    monkeypatch.setenv(library.PATH_VARIABLE, str(path))
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/somewhere/nvcc")
    monkeypatch.setattr("moekit.discovery.library._package_folder", lambda name: None)
    for name in [n for n in sys.modules if n.startswith(library._PRIVATE_NAME)]:
        monkeypatch.delitem(sys.modules, name)
    return path


def test_loads_what_the_environment_names(folder):
    (folder / "__init__.py").write_text("from . import inner\n__version__ = '2.8.1'\n")
    (folder / "inner.py").write_text("value = 3\n")
    assert library.candidates()[0].version() == "2.8.1" and library.unsupported() == []
    module = library.load()
    assert module.inner.value == 3 and library.load() is module


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__version__ = '2.1.0'", "deep_gemm 2.1.0 is installed, but >=2.6,<3 is required"),
        ("__version__ = '3.0'", "deep_gemm 3.0 is installed"),
        ("import os", "does not tell its version"),
        (None, "which is not a deep_gemm folder"),
    ],
)
def test_an_unusable_library_is_a_reason(folder, text, reason):
    if text is not None:
        (folder / "__init__.py").write_text(text + "\nraise AssertionError('imported')\n")
    spec = moekit_experts()[0]
    assert "deep_gemm" not in spec.requires, "it is there, but unusable"
    (found,) = (
        r for r in spec.unsupported(standin.problem("sm90")) if "DeepGEMM" in r or reason in r
    )
    assert reason in found
    with pytest.raises(BackendBroken, match="pip install 'sgl-deep-gemm==0.1.4'"):
        library.load()


def test_a_library_that_does_not_load_is_a_clear_error(folder):
    (folder / "__init__.py").write_text(
        "__version__ = '2.8.1'\nraise OSError('undefined symbol')\n"
    )
    with pytest.raises(BackendBroken, match="does not load: OSError: undefined symbol"):
        library.load()
    assert library._PRIVATE_NAME not in sys.modules


def test_vllm_is_not_imported(tmp_path, monkeypatch):
    inside = tmp_path / "vllm" / "third_party" / "deep_gemm"
    inside.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (inside / "__init__.py").write_text("__version__ = '2.8.1'\n")
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = (c for c in library.candidates() if c.module == "vllm")
    assert found.version() == "2.8.1" and found.folder() == inside and "vllm" not in sys.modules


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Install a wheel of sglang's fork, whose module does not tell its version in a line."""

    def install(version, needs=True):
        folder = tmp_path / "deep_gemm"
        folder.mkdir()
        (folder / "__init__.py").write_text("__version__ = _read_version()\n")
        (tmp_path / f"sgl_deep_gemm-{version}.dist-info").mkdir()
        monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
        monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/somewhere/nvcc")
        monkeypatch.setattr(library, "importable", lambda name: needs)
        monkeypatch.setattr(
            "moekit.discovery.library._package_folder",
            lambda name: folder if name == "deep_gemm" else None,
        )
        return folder

    return install


@pytest.mark.parametrize("version", ["0.1.4", "0.2.5"])
def test_the_wheel_of_sglang(wheel, version):
    folder = wheel(version)
    assert library.unsupported() == []
    assert library.used() == f"sgl-deep-gemm {version} in {folder}"


def test_the_wheel_of_sglang_named_by_the_environment(wheel, monkeypatch):
    folder = wheel("0.1.4")
    monkeypatch.setenv(library.PATH_VARIABLE, str(folder))
    monkeypatch.setattr("moekit.discovery.library._package_folder", lambda name: None)
    assert library.used() == f"sgl-deep-gemm 0.1.4 in {folder}"


def test_what_the_wheel_of_sglang_needs(wheel):
    wheel("0.1.4", needs=False)
    (reason,) = library.unsupported()
    assert "needs tvm_ffi: pip install apache-tvm-ffi" in reason
    assert library.used() == ""


def test_an_unknown_wheel_of_sglang(wheel):
    wheel("0.3.0")
    (reason,) = library.unsupported()
    assert "does not tell its version" in reason


def test_a_library_is_judged_by_what_it_offers(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: standin)
    other = standin.m_grouped_fp8_gemm_nt_masked
    monkeypatch.delattr(standin, "m_grouped_fp8_gemm_nt_masked")
    monkeypatch.setattr(standin, "m_grouped_fp8_fp4_gemm_nt_masked", other, raising=False)
    assert gemms.Gemms()._masked is other
    monkeypatch.setattr(standin, "m_grouped_bf16_gemm_nt_masked", lambda a, b, d: None)
    with pytest.raises(BackendBroken, match="nt_masked cannot be called: too many.*sgl-deep-gemm"):
        gemms.Gemms()
    monkeypatch.delattr(standin, "m_grouped_bf16_gemm_nt_contiguous")
    with pytest.raises(BackendBroken, match="m_grouped_bf16_gemm_nt_contiguous is missing"):
        gemms.Gemms()


def test_a_library_without_whole_layers(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: standin)
    with pytest.raises(BackendBroken, match="sm90_mega_moe is missing; fp8_mega_moe is missing"):
        mega.Memory(None, standin.problem("sm90"))


def test_a_failing_compiler_is_a_clear_error(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("NVCC compilation failed")

    monkeypatch.setattr(library, "load", lambda: standin)
    monkeypatch.setattr(standin, "m_grouped_bf16_gemm_nt_masked", fails)
    with pytest.raises(BackendBroken, match="NVCC compilation failed.*CUDA_HOME"):
        gemms.Gemms().masked(None, None, PackedWeights("deepgemm", {"w2": None}), "w2", *[None] * 3)


def test_alignment_setting_is_given_back(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: standin)
    a, w, out = (torch.zeros(s, dtype=torch.bfloat16) for s in ((64, 64), (2, 32, 64), (64, 32)))
    ends = torch.zeros(2, dtype=torch.int32)
    packed = PackedWeights("deepgemm", {"w2": w})
    gemms.Gemms().contiguous(a, None, packed, "w2", out, ends, 64, 64)
    assert standin.get_mk_alignment_for_contiguous_layout() == 128


# -- what is declared


def reasons(**changes) -> str:
    return "; ".join(
        moekit_experts()[0].unsupported(standin.problem(**{"device": "sm90", **changes}))
    )


def test_reasons():
    whole, half = (standin.problem("sm90", intermediate_size=i) for i in (256, 192))
    assert moekit_experts()[0].unsupported(half) == moekit_experts()[0].unsupported(whole)
    spec = moekit_experts()[0]
    plain = [standin.problem("sm90", hidden_size=h, quant="none") for h in (320, 328)]
    assert [*map(spec.padding, plain)] == ["", "hidden size 328 padded to 384"]
    assert "padded to 384" in spec.padding(standin.problem("sm90", hidden_size=320))
    assert "runs on cuda==9.0" in reasons(device="sm100")
    assert "float16 is not supported" in reasons(dtype=torch.float16)
    if not library.candidates():
        assert reasons() == (
            "deep_gemm is not installed (pip install 'sgl-deep-gemm==0.1.4', for torch 2.11)"
        )


@pytest.mark.parametrize(("local", "physical"), [(8, 8), (128, 128), (32, 256), (5, 7), (1, 1)])
@pytest.mark.parametrize("block_m", [None, 16, 128])
def test_plans(local, physical, block_m):
    """Buffers for more pairs hold fewer, and there are few kinds to compile."""
    rows, kinds = 0, set()
    sizes = [*range(1, 300), *range(300, 20_000, 137), *range(20_000, 300_000, 9973)]
    for pairs in sizes:
        plan = make_plan(pairs, local, physical, block_m)
        assert plan.rows % plan.block_m == 0 and plan.rows >= rows
        worst = [pairs - min(pairs, local) + 1] + [1] * (min(pairs, local) - 1)
        assert plan.rows >= sum(-(-n // plan.block_m) * plan.block_m for n in worst)
        rows = plan.rows
        kinds.add(plan.kind)
    assert len(kinds) < 30


# -- calls


@pytest.mark.parametrize("scales", ["rows", "columns"])
@pytest.mark.parametrize("slab", [20, 128])
def test_quantized_slabs(device, monkeypatch, scales, slab):
    """Batched rows are as DeepEP's low-latency dispatch delivers them, scales in either order."""
    if device.type == "cuda":
        pytest.skip("the stand-in is for the CPU")
    monkeypatch.setattr(library, "load", lambda: standin)
    torch.manual_seed(0)
    problem = standin.problem(device, num_experts=3, has_bias=True)
    made = []
    for spec in (
        standin.registry().expert("standin_batched"),
        moekit.registry().expert("reference"),
    ):
        experts = spec.load()(spec, problem)
        torch.manual_seed(1)
        weights = moekit.ExpertWeights(
            torch.randn(3, 256, 256).mul(0.06).bfloat16(),
            torch.randn(3, 256, 128).mul(0.09).bfloat16(),
            w13_bias=torch.randn(3, 256).bfloat16(),
            w2_bias=torch.randn(3, 256).bfloat16(),
        ).quantize(problem.quant)
        made.append((experts, experts.pack(weights.canonical(problem))))
    counts = torch.tensor([7, 0, 20], dtype=torch.int32)
    x, scale = quantize(torch.randn(3, slab, 256), GROUPS)
    used = torch.arange(slab) < counts[:, None]
    scale[~used] = NAN
    if scales == "columns":
        scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
    (experts, packed), (reference, reference_packed) = made
    y = torch.full((3, slab, 256), NAN, dtype=torch.bfloat16)
    workspace = Workspace().take(experts.workspace(slab), device)
    experts.apply(y, Dispatched(x, scale, expert_num_tokens=counts), packed, workspace)

    rows = Dispatched(
        x[used], scale[used], torch.arange(3)[:, None].expand(3, slab)[used][:, None],
        torch.ones(int(used.sum()), 1),
    )  # fmt: skip
    expected = torch.empty(int(used.sum()), 1, 256, dtype=torch.bfloat16)
    reference.apply(expected, rows, reference_packed, ())
    error = (y[used].float() - expected[:, 0].float()).norm() / expected.float().norm()
    assert error < 4e-2


def test_rows_are_quantized_as_moekit_does(device):
    """To the same bits: the quotient, not the product with a reciprocal."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 512, device=device).bfloat16()
    q, scale = torch.empty_like(x, dtype=FP8), x.new_empty((2, 4, 64), dtype=torch.float32)
    counts = torch.full((2,), 64, dtype=torch.int32, device=device)
    kernels.stage_slabs(x, None, counts, q, scale)
    right, right_scale = quantize(x, GROUPS)
    assert torch.equal(scale.transpose(1, 2), right_scale)
    assert torch.equal(q.view(torch.uint8), right.view(torch.uint8))


def test_capturing_an_unknown_size_is_refused(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: standin)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    spec = standin.registry().expert("standin")
    experts = spec.load()(spec, standin.problem(torch.device("cpu")))
    with pytest.raises(InvalidInput, match="warmup"):
        experts._begin((1 << 20,), torch.device("cuda", 0))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (256, 8)])
def test_a_warm_up_has_a_call_of_each_kind(monkeypatch, experts, top_k):
    monkeypatch.setattr(library, "load", lambda: standin)
    spec = standin.registry().expert("standin")
    problem = standin.problem(torch.device("cpu"), num_experts=experts, top_k=top_k)
    made = spec.load()(spec, problem)

    def kinds(sizes):
        return {made._plan(tokens * top_k).kind for tokens in sizes}

    assert kinds(made.largest_calls(20_000)) == kinds(range(1, 20_001))
