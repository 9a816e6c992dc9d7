"""Finding the libraries: versions, folders, and the reasons that are given without them."""

import sys

import pytest
import torch
from moekit_cutlass import library, moekit_experts, providers

import moekit
from moekit.errors import BackendBroken


def test_versions(monkeypatch):
    monkeypatch.setattr(library, "importable", lambda module: True)
    versions = {"nvidia-cutlass-dsl": "4.7.1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    for version in ("0.6.5", "0.6.11+cu13"):
        versions["quack-kernels"] = version
        assert library.missing("quack") == ""
    for version in ("0.6.4", "0.7.0", "1.0"):
        versions["quack-kernels"] = version
        assert f"quack-kernels {version} is installed, but >=0.6.5,<0.7" in library.missing("quack")
    versions["quack-kernels"] = "0.6.5"
    for version, usable in (("4.7.0", False), ("4.8.0", True), ("4.9.0", False)):
        versions["nvidia-cutlass-dsl"] = version
        assert (library.missing("quack") == "") is usable


def test_packages_outside_of_site_packages(monkeypatch, tmp_path):
    """As ``pip install --target`` leaves them: quack raises TypeError when it compiles."""
    monkeypatch.setattr(library, "importable", lambda module: True)
    versions = {"nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    for folder, reason in (("libs", f"cutlass lies in {tmp_path}/libs, but quack"),
                           ("site-packages", "")):  # fmt: skip
        package = tmp_path / folder / "cutlass"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(package.parent))
            assert library.missing("quack").startswith(reason)
            assert bool(library.missing("quack")) is bool(reason)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"quant": "fp8_channel_token"}, ""),
        ({"hidden_size": 100}, ""),
        ({"device": "sm100"}, "cuda==9.0"),
        ({"quant": "fp8_block"}, "not supported"),
        ({"dtype": torch.float16}, "moekit-cutlass[quack]"),
        ({"quant": library.W4A8}, "set MOEKIT_VLLM_PATH"),
    ],
)
def test_reasons_without_libraries(monkeypatch, changes, said):
    monkeypatch.setattr(library, "importable", lambda module: False)
    monkeypatch.delenv("MOEKIT_VLLM_PATH", raising=False)
    monkeypatch.setattr("moekit.discovery.library._package_folder", lambda name: None)
    sizes = dict(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, device="sm90")
    (spec, _) = moekit_experts()
    found = spec.unsupported(moekit.MoEProblem(**{**sizes, **changes}))
    found = [reason for reason in found if "triton" not in reason]
    assert said in " ".join(found) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("forced", "scheme", "usable", "reason"),
    [
        ("vllm", "fp8_tensor", ["vllm"], "MOEKIT_CUTLASS_PROVIDER=vllm excludes torch"),
        ("cublas", "none", [], "choose one of quack, torch, vllm, or unset it"),
    ],
)
def test_forced_provider(monkeypatch, forced, scheme, usable, reason):
    monkeypatch.setenv("MOEKIT_CUTLASS_PROVIDER", forced)
    monkeypatch.setattr(library, "missing", lambda provider: "")
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, quant=scheme, device="sm90"
    )
    found, (why_not,) = library.providers_for(problem)
    assert found == usable and reason in why_not


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def gemm_act(A, B, **more): ...", ""),
        (
            "raise ImportError('libcute is missing')",
            "quack.gemm_interface does not load: ImportError",
        ),
        ("def gemm_dact(A, B): ...", "gemm_act is missing"),
        ("def gemm_act(A, B, activation): ...", "gemm_act cannot be called: got an unexpected"),
    ],
)
def test_quack_is_judged_by_what_it_offers(monkeypatch, tmp_path, text, said):
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").touch()
    (tmp_path / "quack" / "gemm_interface.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("quack", "quack.gemm_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    find = providers.quack_entry.__wrapped__
    if not said:
        assert find("quack.gemm_interface", "gemm_act").__name__ == "gemm_act"
    else:
        with pytest.raises(BackendBroken, match=f"{said}.*moekit-cutlass.quack.*PROVIDER=torch"):
            find("quack.gemm_interface", "gemm_act")
    for name in ("quack", "quack.gemm_interface"):
        sys.modules.pop(name, None)
