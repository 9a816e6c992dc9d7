"""Finding the library, and what is said when it is missing, old, or other than expected."""

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


def test_the_stand_in_takes_the_same_arguments():
    given = stand_in.gemm.__code__.co_varnames[: len(library.ARGUMENTS.split())]
    names = {"c": "c_or_none", "b_bias": "b_bias_or_none", "b_zeros": "b_zeros_or_none"}
    assert [names.get(name, name) for name in given] == library.ARGUMENTS.split()
