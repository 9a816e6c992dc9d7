"""Finding the library, and what is said when it is missing, old, or other than expected."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch
from moekit_marlin import library

import moekit

SCHEMA = f"{library.NAME}({', '.join(library.ARGUMENTS)}) -> Tensor"


def problem() -> moekit.MoEProblem:
    return moekit.MoEProblem(
        num_experts=8,
        top_k=2,
        hidden_size=256,
        intermediate_size=256,
        quant="int8_w8a16",
        device="sm90",
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A vllm folder of the right version, whose library holds the right schema."""
    (tmp_path / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    (tmp_path / library.FILE).write_bytes(b"\0junk\0" + SCHEMA.encode() + b"\0more")
    monkeypatch.setenv("MOEKIT_VLLM_PATH", str(tmp_path))
    return tmp_path


def reasons() -> list[str]:
    found = moekit.Registry.discover({})
    return found.expert("marlin").unsupported(problem())


def test_a_library_that_fits(folder):
    assert library.VLLM.folder() == folder and library.VLLM.version() == "0.33.0"
    assert reasons() == []


def test_another_version(folder):
    (folder / "_version.py").write_text("__version__ = version = '0.41.2'\n")
    (reason,) = reasons()
    assert "vllm 0.41.2 is installed" in reason and "pip install 'vllm>=0.33,<0.34'" in reason


def test_other_arguments(folder):
    schema = SCHEMA.replace("Tensor? b_zeros_or_none", "Tensor? b_zeros_or_none, Tensor? g_idx")
    (folder / "_version.py").unlink()
    (folder / library.FILE).write_bytes(b"\0" + schema.encode() + b"\0")
    (reason,) = reasons()
    assert "with other arguments" in reason
    if hasattr(getattr(torch.ops, library.NAMESPACE), library.NAME):
        pytest.skip("the true operator is loaded in this process already")
    with pytest.raises(ImportError, match="other arguments"):
        library.load_operator()


def test_no_library(folder):
    (folder / library.FILE).unlink()
    (reason,) = reasons()
    assert "holds no" in reason


def test_no_folder(monkeypatch):
    monkeypatch.setenv("MOEKIT_VLLM_PATH", "/nowhere")
    (reason,) = reasons()
    assert reason.startswith("MOEKIT_VLLM_PATH=/nowhere is not a folder")


def test_no_operator_in_the_library(folder):
    (folder / library.FILE).write_bytes(b"\0nothing here\0")
    (reason,) = reasons()
    assert "with other arguments" in reason


def test_schemas_are_compared_without_decoration():
    # as torch prints it, and as another compiler might lay out the string
    printed = SCHEMA.replace("Tensor! ", "Tensor($0! -> ) ").replace("thread_k", "thread_k=-1")
    assert library.is_known(f"_moe_C::{printed}")
    assert library.is_known(SCHEMA.replace(", ", ",\n   "))
    assert not library.is_known(SCHEMA.replace("int top_k", "float top_k"))
    assert not library.is_known("nothing")


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


def test_a_long_first_call_says_why(monkeypatch, caplog):
    """Each pair of types has a first call, and it alone is watched, also if it fails."""
    calls, slow = [], True

    def operator(*arguments):
        calls.append(arguments)
        said, deadline = len(caplog.messages), time.monotonic() + 30
        while slow and len(caplog.messages) == said and time.monotonic() < deadline:
            time.sleep(0.01)
        if len(calls) == 1:
            raise RuntimeError("no")

    monkeypatch.setattr(library, "_PATIENCE_SECONDS", 0.05)
    call = library.Operator(operator)
    arguments: list[object] = [torch.ones(1), *map(str, range(1, len(library.ARGUMENTS)))]
    with pytest.raises(RuntimeError, match="no"):
        call(*arguments)
    call(*arguments)
    assert len(caplog.messages) == 2 and "CUDA compiles it now" in caplog.messages[0]
    slow = False
    monkeypatch.setattr(library, "_PATIENCE_SECONDS", 30.0)
    call(*arguments)
    call(torch.ones(1, dtype=torch.float16), *arguments[1:])
    assert len(caplog.messages) == 2 and len(calls) == 4
    monkeypatch.setattr(library, "_PATIENCE_SECONDS", 0.05)
    slow = True
    arguments[library.ARGUMENTS.index("int b_type_id")] = "another"
    call(*arguments)
    assert len(caplog.messages) == 3
