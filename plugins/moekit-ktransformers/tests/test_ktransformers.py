"""Finding the library, what is said when it cannot run, threads, and weights that change."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from kt_standin import REAL
from moekit_ktransformers import kinds, library
from moekit_ktransformers import pool as pools

import moekit
from moekit.testing import assert_close
from moekit.testing.calls import pack
from moekit.testing.cases import make_case, random_weights


def problem(**changes) -> moekit.MoEProblem:
    sizes = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128, device="cpu")
    return moekit.MoEProblem(**{**sizes, "dtype": torch.bfloat16, **changes})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of kt_kernel 0.7.2 with a build for this Python, on a CPU with AVX2 alone."""
    suffix = library.importlib.machinery.EXTENSION_SUFFIXES[0]
    folder = tmp_path / "kt_kernel"
    folder.mkdir()
    (folder / f"_kt_kernel_ext_avx2{suffix}").touch()
    (tmp_path / "kt_kernel-0.7.2.dist-info").mkdir()
    monkeypatch.setenv("KT_KERNEL_FOLDER", str(folder))
    named = dataclasses.replace(library.KT_KERNEL, path_variable="KT_KERNEL_FOLDER")
    monkeypatch.setattr(library, "KT_KERNEL", named)
    monkeypatch.setattr(library, "cpu_flags", lambda: library.VARIANTS["avx2"])
    for name in (library.VARIANT_VARIABLE, library.THREADS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_a_library_that_fits(installed):
    assert library.unsupported() == [] and library.variant() == "avx2"


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0"])
def test_another_version(installed, version):
    (metadata,) = installed.parent.glob("*.dist-info")
    metadata.rename(installed.parent / f"kt_kernel-{version}.dist-info")
    (reason,) = library.unsupported()
    assert f"kt-kernel {version} is installed, but >=0.7.2,<0.8 is required" in reason
    assert "pip install --no-deps" in reason


def test_a_build_for_another_python(installed):
    (build,) = installed.iterdir()
    build.rename(installed / "_kt_kernel_ext_avx2.cpython-299-x86_64-linux-gnu.so")
    (reason,) = library.unsupported()
    assert "no avx2 build for Python" in reason and "cpython-299" in reason


def test_a_cpu_without_avx2(installed, monkeypatch):
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"sse2", "avx2"}))
    (reason,) = library.unsupported()
    assert "lacks bmi2, f16c, fma" in reason
    monkeypatch.setattr(library, "_extension", None)
    with pytest.raises(ImportError, match="lacks bmi2"):
        library.load()


def test_arm_is_a_reason_before_installation(installed, monkeypatch):
    """pip finds no wheel there, so its command alone is no advice."""
    monkeypatch.setattr(library, "KT_KERNEL", SimpleNamespace(folder=lambda: None))
    assert library.unsupported() == []
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    (reason,) = library.unsupported()
    assert "needs an x86 CPU with AVX2" in reason


def test_a_build_that_the_cpu_cannot_run(installed, monkeypatch):
    monkeypatch.setenv(library.VARIANT_VARIABLE, "avx512_base")
    (reason,) = library.unsupported()
    assert "this CPU lacks avx512bw" in reason
    monkeypatch.setenv(library.VARIANT_VARIABLE, "sse")
    (reason,) = library.unsupported()
    assert "'sse' is unknown" in reason


@pytest.mark.parametrize("flags, best", [(n, n) for n in library.VARIANTS if n != "amx"])
def test_the_best_build_that_runs(installed, monkeypatch, flags, best):
    monkeypatch.setattr(library, "cpu_flags", lambda: library.VARIANTS[flags])
    assert library.variant() == best


def test_amx_is_loaded_on_request_only(installed, monkeypatch):
    monkeypatch.setattr(library, "cpu_flags", lambda: library.VARIANTS["amx"])
    assert library.variant() == "avx512_bf16"
    monkeypatch.setenv(library.VARIANT_VARIABLE, "amx")
    assert library.variant() == "amx"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_settings_are_reasons(installed, monkeypatch, text):
    monkeypatch.setenv(library.THREADS_VARIABLE, text)
    (reason,) = library.unsupported()
    assert library.THREADS_VARIABLE in reason and text in reason


def test_one_core_is_left_to_the_caller(monkeypatch):
    monkeypatch.delenv(library.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(library, "cores", lambda: 8)
    assert [library.threads(n) for n in (1, 4, 8, 16)] == [1, 4, 7, 7]
    monkeypatch.setattr(library, "cores", lambda: 1)
    assert library.threads(1) == 1
    monkeypatch.setenv(library.THREADS_VARIABLE, "3")
    assert library.threads(1) == 3


def test_more_threads_than_cores_warn(monkeypatch, caplog):
    monkeypatch.setenv(library.THREADS_VARIABLE, str(library.cores() + 1))
    monkeypatch.setattr(pools, "_pools", {})
    monkeypatch.setattr(pools, "Pool", lambda *args: args)
    with caplog.at_level("WARNING", logger="moekit.ktransformers"):
        assert pools.pool()[1] == library.cores() + 1
    assert library.THREADS_VARIABLE in caplog.text


def test_sizes_that_crash_the_library_are_padded():
    for changes, of in (
        ({"hidden_size": 200}, 32),
        ({"quant": "fp8_block", "intermediate_size": 192}, 128),
        ({"quant": "int4_w4a16_g64", "intermediate_size": 96}, 64),
    ):
        assert kinds.multiples(problem(**changes)) == (of, of)


@pytest.mark.skipif(not REAL, reason="the library does not run here")
def test_the_library_leaves_stdout_alone():
    """Its greetings go to stderr, so that output in JSON stays JSON."""
    code = "import torch; from moekit_ktransformers import pool; pool.pool(); print('only this')"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "only this\n" and "WorkerPool" in run.stderr


@pytest.mark.parametrize("scheme", ["none", "int4_w4a16_g32"])
def test_experts_that_moved_are_loaded_again(backends, scheme):
    """EPLB copies experts within the packed tensors; the library's copy must follow."""
    p = problem(quant=scheme)
    kernel = moekit.compose(p, "local", "ktransformers", backends=backends)
    first, second = random_weights(p, 1), random_weights(p, 2)
    with torch.inference_mode():
        packed, other = kernel.pack(first), kernel.pack(second)
        for index in range(2):
            case = make_case(p, 5, weights=(first, second)[index])
            assert_close(
                kernel(case.x, packed, case.routing), case.reference(), p, f"{index}", case=case
            )
            for name, tensor in packed.experts.items():
                for expert in range(p.num_local_experts):
                    tensor[expert].copy_(other.experts[name][expert])


def test_packed_inference_tensors_count_their_changes(backends):
    p = problem()
    kernel = moekit.compose(p, "local", "ktransformers", backends=backends)
    with torch.inference_mode():
        weights = moekit.ExpertWeights(
            torch.zeros(4, 256, 128, dtype=torch.bfloat16),
            torch.zeros(4, 128, 128, dtype=torch.bfloat16),
        )
        packed = kernel.pack(weights)
    assert not any(t.is_inference() for t in packed.experts.values())


def test_objects_end_with_their_weights(backends):
    p = problem()
    kernel = moekit.compose(p, "local", "ktransformers", backends=backends)
    loaded, case = pools.pool()._loaded, make_case(p, 3)
    before = len(loaded)
    packed = pack(kernel, case.weights)
    packed = dataclasses.replace(packed, experts={n: t.clone() for n, t in packed.experts.items()})
    kernel(case.x, packed, case.routing)
    assert len(loaded) == before + 1
    del packed
    assert len(loaded) == before


def test_more_rows_than_a_call_of_the_library_takes(backends, monkeypatch):
    monkeypatch.setattr(pools, "MAX_ROWS", 8)
    p = problem()
    kernel = moekit.compose(p, "local", "ktransformers", backends=backends)
    for num_tokens in (7, 8, 9, 24, 27):
        case = make_case(p, num_tokens, "masked")
        out = kernel(case.x, pack(kernel, case.weights), case.routing)
        assert_close(out, case.reference(), p, f"T={num_tokens}", case=case)


@pytest.mark.parametrize("before", [False, True])
def test_loading_leaves_denormals_as_they_were(before) -> None:
    """kt-kernel's start-up code flushes denormals, which made mxfp4 wrong elsewhere."""
    torch.set_flush_denormal(before)
    try:
        with library._denormals_kept():
            torch.set_flush_denormal(True)
        assert bool(torch.tensor(1e-39) * 1.0 == 0) is before
    finally:
        torch.set_flush_denormal(False)
