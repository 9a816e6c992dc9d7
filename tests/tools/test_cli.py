"""`python -m moekit`: exit codes, output, and what it must not import."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_plugins import Fakes, offers, only_named
from json_keys import actual, documented
from tuned_tables import PROBLEM, make_table, write_table

import moekit
from moekit.cli import commands
from moekit.cli.main import main

SIZES = "--num-experts 256 --top-k 8 --hidden-size 7168 --intermediate-size 2048".split()
VENDORS = (
    "cutlass", "deep_ep", "deep_gemm", "flashinfer", "kt_kernel", "kt_kernel_ext", "nccl",
    "pplx_kernels", "quack", "transformers", "triton", "tvm_ffi", "vllm",
)  # fmt: skip
NEEDY = ", requires=('json', 'no_such_lib'), install_hint='pip install no-such-lib'"


only = pytest.fixture(only_named)


# -- plugins ---------------------------------------------------------------------------------------


def test_plugins_table(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("good", "needy")
    fakes.install("good", offers("good", *(f"good_number_{n}" for n in range(12))))
    fakes.install("needy", offers("needy", more=NEEDY))
    fakes.install("other", offers("other"))
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(r"^core +ok +moekit \S+ +dispatchers: local, batched_reference$", out, re.M)
    assert re.search(r"^needy +ok +needy-dist 1.0 +experts: needy$", out, re.M)
    assert "requires json: found" in out
    assert "requires no_such_lib: missing (pip install no-such-lib)" in " ".join(out.split())
    assert re.search(r"^other +blocked +other-dist 1.0 +not named in MOEKIT_PLUGINS$", out, re.M)
    assert "environment: MOEKIT_PLUGINS=good,needy" in out


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"bad": "raise RuntimeError('CUDA_HOME is not set')"}, "RuntimeError: CUDA_HOME"),
        ({"a": offers("x"), "b": offers("x")}, "'x' is also offered by"),
        ({}, "but no such plugin is installed"),
    ],
)
def test_plugins_reports_faults(only, capsys, sources: dict[str, str], said: str) -> None:
    fakes = only(*(sources or ["trition"]))
    for name, source in sources.items():
        fakes.install(name, source)
    assert main(["plugins"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["plugins", "--json"]) == 1
    states = {p["name"]: p["state"] for p in json.loads(capsys.readouterr().out)["plugins"]}
    assert set(states.values()) >= {"clash" if "a" in sources else "broken"}


def test_plugins_json_is_as_documented(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("needy")
    both = offers("needy", more=NEEDY) + (
        "\n@moekit.hookimpl\ndef moekit_dispatchers():\n"
        "    return [moekit.DispatcherSpec(\n"
        "        name='needy', target='moekit.backends.local:LocalDispatcher',\n"
        "        format=moekit.ActivationFormat.STANDARD, moves_tokens=False,\n"
        "        requires=('json',))]\n"
        "\n@moekit.hookimpl\ndef moekit_fused():\n"
        "    return [moekit.plugin.FusedSpec(name='one', target='a:B', requires=('json',))]\n"
    )
    fakes.install("needy", f"import moekit.plugin\n{both}")
    assert main(["plugins", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert actual(listing) == documented("plugins --json")
    assert listing["moekit"] == moekit.__version__
    (needy,) = (p for p in listing["plugins"] if p["name"] == "needy")
    (experts,), (dispatcher,) = needy["experts"], needy["dispatchers"]
    assert experts["requires"] == {"json": True, "no_such_lib": False}
    assert (experts["usable"], dispatcher["usable"]) == (False, True)


# -- commands of other packages --------------------------------------------------------------------

HELLO = """import builtins

builtins.moekit_hello_was_loaded = True


def main(argv):
    print("hello", *argv)
    return len(argv)
"""


def add_command(
    fakes: Fakes, name: str, source: str, target: str = "main", owner: str = ""
) -> None:
    owner = owner or f"{name}-dist"
    package = f"fake_{owner.replace('-', '_')}"
    entries = f"[moekit.commands]\n{name} = {package}:{target}\n"
    fakes.install(name, source, distribution=owner, entries=entries)


def test_packages_add_commands(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help lists them without importing them; calling one passes every argument on."""
    add_command(only(), "hello", HELLO)
    monkeypatch.delattr("builtins.moekit_hello_was_loaded", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert re.search(r"^ +hello +a command of hello-dist$", capsys.readouterr().out, re.M)
    assert not hasattr(builtins, "moekit_hello_was_loaded")
    assert main(["hello", "--json", "--", "--help"]) == 3
    assert capsys.readouterr().out == "hello --json -- --help\n"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("raise RuntimeError('no CUDA')", "main", "RuntimeError: no CUDA"),
        ("raise SystemExit(7)", "main", "SystemExit: 7"),
        ("main = 5", "main", "is no function"),
        ("", "other", "has no attribute 'other'"),
    ],
)
def test_commands_that_do_not_load(only, capsys, source: str, target: str, said: str) -> None:
    add_command(only(), "hello", source, target)
    assert main(["hello", "there"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: the command 'hello' of hello-dist 1.0 cannot be loaded: ")
    assert said in err and not out and "Traceback" not in err


def test_a_command_that_two_packages_add(only, capsys) -> None:
    fakes = only()
    add_command(fakes, "hello", HELLO)
    add_command(fakes, "hello", HELLO, owner="rival")
    assert main(["hello"]) == 2
    assert "hello-dist and rival both add it: uninstall one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_commands_that_are_not_installed_say_what_to_install(
    only, capsys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: iter(()))
    assert main([name, "--help"]) == 2
    wanted = f"{name} is a command of moekit-bench: pip install ./plugins/moekit-bench"
    assert capsys.readouterr().err == f"error: {wanted}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"({wanted})" in " ".join(capsys.readouterr().out.split())


# -- check, version --------------------------------------------------------------------------------


def test_check(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check", "tritn", "-x"]) == 2
    err = capsys.readouterr().err
    assert "no dispatcher named 'tritn'" in err and "no experts backend named 'tritn'" in err
    calls = []

    def run(name: str, extra_args: list[str], *, gradients: bool) -> int:
        calls.append((name, extra_args, gradients))
        return 5

    monkeypatch.setattr("moekit.testing.run", run)
    assert main(["check", "torch", "-k", "scheme", "-x"]) == 5
    assert main(["check", "--gradients", "local"]) == 5
    assert calls == [("torch", ["-k", "scheme", "-x"], False), ("local", [], True)]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pytest" else find_spec(name)
    )
    assert main(["check", "torch"]) == 2
    assert "pip install 'moekit[testing]'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out == f"moekit {moekit.__version__}\n"


def test_texts_that_the_terminal_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of commands of other packages, such as the reports of `bench`."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(commands, "run", lambda *_: print("5 µs") or 0)
    assert main(["other"], owns_stdout=True) == 0
    assert raw.getvalue() == rb"5 \xb5s" + b"\n"


def test_a_reader_that_has_had_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m moekit bench | head -1` ends without a word, and is no failure."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(commands, "run", lambda *_: print("a report") or 1)
        assert main(["other"]) == 0


@pytest.mark.parametrize(
    ("options", "closed", "code", "said"),
    [
        ("-W error::ResourceWarning -m moekit plugins", (), 0, ""),
        ("-m moekit plugins", (1,), 0, ""),
        ("-O -m moekit check torch", (), 2, "so no test could fail: run `check` without"),
    ],
)
def test_python_started_otherwise(
    options: str, closed: tuple[int, ...], code: int, said: str
) -> None:
    """With warnings as errors, with stdout closed, and without assertions."""
    done = subprocess.run(
        [sys.executable, *options.split()],
        preexec_fn=lambda: [os.close(number) for number in closed],
        stdout=None if closed else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == code and said in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_few_imports_and_no_vendors(tmp_path: Path) -> None:
    """Listing, asking for reasons and choosing by a table import no vendor's library.

    They import few modules besides torch: the CLI starts at once.
    """
    for vendor in VENDORS:
        (tmp_path / f"{vendor}.py").touch()
    h200 = PROBLEM.replace(
        dtype=torch.bfloat16, device=moekit.DeviceSpec("cuda", (9, 0), "NVIDIA H200")
    )
    names = ("torch", "triton", "deepgemm", "cutlass", "marlin", "acme")
    tables = tmp_path / "tuned"
    write_table(tables / "x.json", make_table({name: (1, 1) for name in names}, h200))
    measured = "--num-experts 4 --top-k 2 --hidden-size 64 --intermediate-size 48".split()
    code = f"""
import sys, torch
before = set(sys.modules)
from moekit.cli.main import main
main(["plugins"])
for quant in ("none", "fp8_block", "fp8_tensor", "int8_w8a16", "int4_w4a8_g128"):
    main(["explain", *{SIZES}, "--quant", quant, "--device", "sm90", "--ep", "2"])
main(["explain", *{measured}, "--device", "sm90"])
new = [name for name in sys.modules if name not in before]
slow = [name for name in ("torch._dynamo", "moekit_kernels") if name in new]
slow += [name for name in new if name.startswith("moekit_") and name.endswith(".experts")]
print(len(new), slow + [v for v in {VENDORS} if v in sys.modules], file=sys.stderr)
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MOEKIT")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": path, "MOEKIT_TUNED": str(tables)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "by measurement" in done.stdout
    count, imported = done.stderr.strip().splitlines()[-1].split(" ", 1)
    assert imported == "[]"
    assert int(count) < 400, f"{count} modules besides torch's"


@pytest.mark.parametrize(
    "args",
    ["", "frobnicate", "plugins --frob", "explain --top-k two", "check"],
)
def test_bad_arguments(only, capsys: pytest.CaptureFixture[str], args: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args.split())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "usage: python -m moekit" in err
    assert args != "check" or err.endswith("arguments are required: name\n")  # pytest's are not


# -- files that the system refuses to read or write ------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "why"), [("x" * 300, "File name too long"), ("file/below", "Not a directory")]
)
def test_explain_a_model_that_cannot_be_read(folder: str, why: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["explain", "--model", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / folder}" in said and "cannot be read" in said
    assert f"({why})" in said and "download it again" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b cannot be read or written (Perm"),
        (BlockingIOError(11, "Resource temporarily unavailable"), None),
    ],
)
def test_errors_of_files_and_others(
    error: OSError, said: str | None, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no user's keeps its traceback."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "run", fail)
    if said is None:
        with pytest.raises(type(error)):
            main(["other"])
    else:
        assert main(["other"]) == 2 and said in capsys.readouterr().err
