"""Finding the library, and what is said when it is missing, old, or other than expected."""

import subprocess
import sys
import textwrap

import marlin_stand_in as stand_in
import pytest
from moekit_marlin import library

import moekit


def reasons() -> list[str]:
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=256, quant="int8_w8a16",
        device="sm90",
    )  # fmt: skip
    return moekit.Registry.discover({}).expert("marlin").unsupported(problem)


@pytest.mark.parametrize(
    ("version", "file", "said"),
    [
        ("0.33.0", library.VLLM.file, ""),
        ("0.41.2", library.VLLM.file, "vllm 0.41.2 is installed"),
        ("0.33.0", "other.so", f"holds no {library.VLLM.file}: install a build for CUDA"),
    ],
)
def test_a_named_folder(tmp_path, monkeypatch, version, file, said):
    (tmp_path / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (tmp_path / file).touch()
    monkeypatch.setenv("MOEKIT_VLLM_PATH", str(tmp_path))
    found = reasons()
    assert len(found) == bool(said) and said in "".join(found)


def test_no_folder(monkeypatch):
    monkeypatch.setenv("MOEKIT_VLLM_PATH", "/nowhere")
    (reason,) = reasons()
    assert reason.startswith("MOEKIT_VLLM_PATH=/nowhere is not a folder")


def test_the_stand_in_takes_the_same_arguments():
    given = stand_in.gemm.__code__.co_varnames[: len(library.ARGUMENTS.split())]
    names = {"c": "c_or_none", "b_bias": "b_bias_or_none", "b_zeros": "b_zeros_or_none"}
    assert [names.get(name, name) for name in given] == library.ARGUMENTS.split()


def test_listing_imports_nothing():
    code = """
        import sys
        import moekit
        found = moekit.Registry.discover({"MOEKIT_PLUGINS": "marlin"})
        assert [s.name for p in found.plugins for s in p.experts if p.name == "marlin"] == [
            "marlin", "marlin_batched"]
        problem = moekit.MoEProblem(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256,
                                    quant="int8_w8a16", device="sm90")
        reasons = found.expert("marlin").unsupported(problem)
        assert not {"vllm", "triton", "moekit_kernels", "moekit_marlin.experts"} & set(sys.modules)
        import torch
        assert not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")
        print("; ".join(reasons))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )
    if library.VLLM.folder() is None:
        assert run.stdout.strip() == "vllm is not installed (pip install 'vllm>=0.33,<0.34')"
