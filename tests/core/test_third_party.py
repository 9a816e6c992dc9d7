"""A stranger's package, from `pip install` to `pip uninstall`, in a separate venv."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import moekit

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend"

COMPOSE = """
import json, torch, moekit
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case

torch.set_num_threads(1)
used = []
for names in (
    dict(experts="acme"),
    dict(dispatcher="local", experts="acme"),
    dict(dispatcher="batched_reference", experts="acme"),
    dict(dispatcher="acme_sorted", experts="acme"),
    dict(dispatcher="acme_sorted", experts="torch"),
    dict(dispatcher="acme_sorted", experts="reference"),
):
    for dtype in (torch.bfloat16, torch.float32):
        problem = moekit.MoEProblem(num_experts=6, top_k=3, hidden_size=96, intermediate_size=80,
                                    dtype=dtype, device="cpu")
        kernel = moekit.compose(problem, **names)
        for tokens in (0, 1, 33):
            check_call(kernel, make_case(problem, tokens, "masked"))
    used.append(str(kernel.explanation.chosen))
nf4 = problem.replace(quant="nf4_w4a16_g64")
for experts in ("acme", "torch", "reference"):
    check_call(moekit.compose(nf4, experts=experts), make_case(nf4, 33, "masked"))
used.append(str(moekit.explain(nf4, experts="acme").chosen))
kernel = moekit.compose(problem, experts="acme_fused")
check_call(kernel, make_case(problem, 33, "masked"))
used.append(str(kernel.explanation.chosen))
try:
    moekit.compose(problem.replace(has_bias=True), experts="acme")
except moekit.MoekitError as error:
    used.append(str(error))
for switches in ({}, {"MOEKIT_BLOCK": "acme-moe"}):
    (acme,) = (each for each in moekit.Registry.discover(switches).plugins if each.name == "acme")
    names = [spec.name for spec in (*acme.experts, *acme.dispatchers, *acme.schemes, *acme.formats)]
    used.append([acme.state, acme.distribution, acme.version, names])
print(json.dumps(used))
"""


class Stranger:
    """A venv that sees this interpreter's packages, and commands run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        venv.create(root, with_pip=False)
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        here |= {*site.getsitepackages(), *([site.getusersitepackages()] * site.ENABLE_USER_SITE)}
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.python = root / scripts / "python"
        own = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        # addsitedir, unlike a plain path, also runs the .pth files there: editable installs.
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(here)]
        Path(own, "parent.pth").write_text("\n".join(lines))

    def run(self, *args: str, code: int = 0, **environ: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MOEKIT_")}
        done = subprocess.run(
            [str(self.python), *args],
            cwd=self.root,
            env={**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == code, f"{args}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """With the example installed, from a copy: building leaves files behind."""
    root = tmp_path_factory.mktemp("stranger")
    copy = root / "custom_backend"
    shutil.copytree(
        EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    stranger = Stranger(root / "venv")
    stranger.run(*"-m pip install --no-index --no-deps --no-build-isolation".split(), str(copy))
    return stranger


def test_it_is_listed_composes_and_can_be_blocked(stranger: Stranger) -> None:
    answers = json.loads(stranger.run("-c", COMPOSE, MOEKIT_PLUGINS="acme"))
    *used, refused, listed, blocked = answers
    assert used == [
        "local + acme (bridged)",
        "local + acme (bridged)",
        "batched_reference + acme",
        "acme_sorted + acme (bridged)",
        "acme_sorted + torch",
        "acme_sorted + reference",
        "local + acme (bridged)",
        "acme_fused (fused)",
    ]
    assert "experts 'acme' cannot do this problem: has no bias support" in refused
    offered = ["acme", "acme_sorted", "acme_all_to_all", "nf4_w4a16_g64", "acme_nf4"]
    assert listed == ["ok", "acme-moe", "1.0", offered]
    assert blocked[0] == "blocked"


# Each runs other parts of the kit: numbers, ranks, packing, and memory.
SOME = "test_scheme or test_dtype or test_routing or test_tokens_per_rank or test_pack or memory"


@pytest.mark.parametrize(
    ("some", "least"), [(SOME, 20), pytest.param("test", 100, marks=pytest.mark.full)]
)
def test_its_own_tests(stranger: Stranger, some: str, least: int) -> None:
    tests = stranger.root.parent / "custom_backend" / "tests" / "test_conformance.py"
    # One thread: on products this small, more are ten times slower when the machine is busy.
    options = ("-q", "-p", "no:cacheprovider", "-k", some)
    out = stranger.run("-m", "pytest", str(tests), *options, OMP_NUM_THREADS="1")
    assert int(re.search(r"(\d+) passed", out)[1]) > least


def test_it_leaves_no_trace(stranger: Stranger) -> None:
    stranger.run("-m", "pip", "uninstall", "--yes", "acme-moe")
    listed = stranger.run("-m", "moekit", "plugins", "--json", code=1, MOEKIT_PLUGINS="acme")
    (gone,) = (each for each in json.loads(listed)["plugins"] if each["name"] == "acme")
    assert gone["reason"] == "named in MOEKIT_PLUGINS, but no such plugin is installed"
    assert "acme" not in moekit.Registry.discover({}).experts
