"""`moekit.plugin.VendorLibrary`: where a library is found, and which versions are accepted."""

import sys
from dataclasses import replace

import pytest
import torch

from moekit.discovery.library import version_in_range
from moekit.errors import BackendBroken
from moekit.plugin import VendorLibrary

ACME = VendorLibrary(distribution="acme-library", versions=">=1.2,<2", path_variable="ACME_PATH")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `acme_library` that fails when it is imported."""
    folder = tmp_path / "acme_library"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.delenv("ACME_PATH", raising=False)
    return folder


@pytest.mark.parametrize("version", ["1.2", "1.2.0", "1.3.1rc2", "1.10+cu130", "1.99.dev3"])
def test_versions_in_the_range(version):
    assert version_in_range(version, ">=1.2,<2")


@pytest.mark.parametrize("version", ["1.1.9", "2", "2.0", "2.0.1", "0.33", "10.1", "unknown"])
def test_versions_outside_the_range(version):
    assert not version_in_range(version, ">=1.2,<2")


def test_other_clauses_are_refused():
    with pytest.raises(ValueError, match="must look like '>=1.2,<2'"):
        VendorLibrary(distribution="acme", versions="~=1.2")


def test_an_installed_package_is_found_without_importing_it(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    (package.parent / "acme_library-1.4.dist-info").mkdir()
    assert ACME.folder() == package and ACME.version() == "1.4" and ACME.unsupported() == []
    assert "acme_library" not in sys.modules


def test_the_environment_names_the_package_or_its_parent(package, monkeypatch):
    (package / "_version.py").write_text("__version__ = version = '2.1.0'\n")
    for named in (package, package.parent):
        monkeypatch.setenv("ACME_PATH", str(named))
        assert ACME.folder() == package and ACME.version() == "2.1.0"
    assert ACME.unsupported() == [
        "acme-library 2.1.0 is installed, but >=1.2,<2 is required "
        "(pip install 'acme-library>=1.2,<2')"
    ]


def test_a_folder_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("ACME_PATH", "/nowhere")
    (reason,) = ACME.unsupported()
    assert ACME.folder() is None and reason.startswith("ACME_PATH=/nowhere is not a folder")


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.delenv("ACME_PATH", raising=False)
    assert ACME.folder() is None and ACME.version() == "" and ACME.unsupported() == []


def test_a_library_inside_another_package(package, monkeypatch):
    inside = package / "third_party" / "gemm"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("__version__ = '3.1'\n")
    (package / "_version.py").write_text("version = '1.4'\n")
    monkeypatch.syspath_prepend(str(package.parent))
    carried = VendorLibrary(
        distribution="gemm", versions=">=3,<4", module="acme_library", inside="third_party/gemm"
    )
    assert carried.folder() == inside and carried.version() == "3.1"
    assert carried.unsupported() == []


def test_an_operator_is_checked_by_the_names_of_its_arguments():
    assert ACME.operator("aten::relu", "self") is torch.ops.aten.relu.default
    with pytest.raises(BackendBroken, match="takes the arguments self, expected x y"):
        ACME.operator("aten::relu", "x y")
    with pytest.raises(BackendBroken, match="does not load: .*pip install 'acme-library"):
        ACME.operator("acme::gemm", "x")


def test_a_file_that_the_folder_must_hold(package, monkeypatch):
    monkeypatch.setenv("ACME_PATH", str(package))
    library = replace(ACME, file="ops.so")
    (reason,) = library.unsupported()
    assert f"{package} holds no ops.so: install a build for CUDA" in reason
    (package / "ops.so").touch()
    assert library.unsupported() == []


@pytest.fixture
def offered(package, monkeypatch):
    """The module of a library that says what it is given."""
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "acme_library", raising=False)
    (package.parent / "acme_library-1.4.dist-info").mkdir()

    def write(text):
        (package / "__init__.py").write_text(text)
        return package

    yield write
    sys.modules.pop("acme_library", None)


def test_a_library_that_offers_what_is_called(offered):
    folder = offered(
        "from math import hypot\n"
        "def gemm(a, b, *, out, scale=None): ...\n"
        "class Buffer:\n    def __init__(self, group, **more): ...\n    def send(self, x): ...\n"
        "kinds = 3\n"
    )
    calls = {"gemm": "2 out", "Buffer": "1 bytes", "Buffer.send": "2", "kinds": "", "hypot": "9"}
    assert ACME.load("acme_library", calls).kinds == 3
    assert ACME.describe() == f"acme-library 1.4 in {folder}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise SystemExit('no driver')",
            "cannot be used: acme_library does not load: SystemExit: no driver",
        ),
        ("import absent_module_of_acme", "No module named 'absent_module_of_acme'"),
        ("def other(): ...", "cannot be used: gemm is missing; Buffer.send is missing"),
        ("def gemm(a): ...", "gemm cannot be called: too many positional arguments"),
        ("def gemm(a, b, out): ...", "gemm cannot be called: got an unexpected keyword argument"),
        ("def gemm(a, b, out, scale, n): ...", "missing a required argument: 'n'"),
    ],
)
def test_a_library_that_is_other_than_expected(offered, text, said):
    folder = offered(text)
    with pytest.raises(BackendBroken) as caught:
        ACME.load("acme_library", {"gemm": "2 out scale", "Buffer.send": "2"})
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"acme-library 1.4 in {folder}")
    assert str(caught.value).endswith("(pip install 'acme-library>=1.2,<2')")
