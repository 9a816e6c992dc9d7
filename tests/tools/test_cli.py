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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_plugins import Fakes, offers, only_named

import moekit
from moekit.cli import commands, explain
from moekit.cli.main import main
from moekit.discovery import packages
from moekit.discovery.registry import registry

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
SIZES = "--num-experts 256 --top-k 8 --hidden-size 7168 --intermediate-size 2048".split()
VENDORS = ("triton", "deep_ep", "deep_gemm", "flashinfer", "pplx_kernels", "vllm", "transformers")
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


def documented(heading: str) -> set[str]:
    """Return the keys in the tables under a heading of docs/cli.md that hold values."""
    section = DOCS.read_text().partition(f"### `{heading}`\n")[2].partition("\n##")[0]
    table, _, each = section.partition("Each dispatcher and experts backend:")
    keys = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    for key in re.findall(r"^\| `([^`]+)` \|", each, re.M):
        keys += [f"plugins[].{kind}[].{key}" for kind in ("dispatchers", "experts")]
    return {k for k in keys if not any(o.startswith((f"{k}.", f"{k}[]")) for o in keys if o != k)}


def actual(value: Any, path: str = "") -> set[str]:
    """Return the keys of real output in the same notation."""
    if isinstance(value, dict):
        named = path.rpartition(".")[2] in (
            "environment",
            "requires",
            "rejected_dispatchers",
            "rejected_experts",
        )
        found = (actual(v, f"{path}.{'NAME' if named else k}") for k, v in value.items())
        return set().union(*found)
    if isinstance(value, list):
        return set().union(*(actual(v, f"{path}[]") for v in value))
    return {path.removeprefix(".")}


def test_plugins_json_is_as_documented(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("needy")
    both = offers("needy", more=NEEDY) + (
        "\n@moekit.hookimpl\ndef moekit_dispatchers():\n"
        "    return [moekit.DispatcherSpec(\n"
        "        name='needy', target='moekit.backends.local:LocalDispatcher',\n"
        "        format=moekit.ActivationFormat.STANDARD, moves_tokens=False,\n"
        "        requires=('json',))]\n"
    )
    fakes.install("needy", both)
    assert main(["plugins", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert actual(listing) == documented("plugins --json")
    assert listing["moekit"] == moekit.__version__
    (needy,) = (p for p in listing["plugins"] if p["name"] == "needy")
    (experts,), (dispatcher,) = needy["experts"], needy["dispatchers"]
    assert experts["requires"] == {"json": True, "no_such_lib": False}
    assert (experts["usable"], dispatcher["usable"]) == (False, True)


# -- explain ---------------------------------------------------------------------------------------


def test_explain_for_a_device_elsewhere(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("the device was touched")

    for module, name in (
        (torch.accelerator, "current_accelerator"),
        (torch.cuda, "is_available"),
        (torch.cuda, "get_device_capability"),
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "device_count"),
    ):
        monkeypatch.setattr(module, name, touched)
    args = ["explain", *SIZES, "--quant", "fp8_block", "--device", "sm90"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert out.startswith("256 experts, top 8, hidden 7168, intermediate 2048, bfloat16, quant fp8")
    assert "cuda sm90" in out and "chosen: local + torch (by priority)" in out
    assert main([*args, "--ep", "8"]) == 1
    out = capsys.readouterr().out
    assert "chosen: nothing" in out
    assert "not dispatcher local: tokens must move between 8 ranks" in out


def test_explain_is_short_unless_asked_for_all(only, capsys) -> None:
    """It prints two runners-up, the reasons only of named backends, and each hint once."""
    fakes = only("many")
    needy = NEEDY.replace("'json', ", "'json', 'nor_this', ")
    fakes.install(
        "many",
        offers("a", "b", "c").replace(
            "for name in", "for name in ('d', 'e', 'f')] + [spec(name" + needy + ") for name in"
        ),
    )
    args = ["explain", *SIZES, "--device", "cpu"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert out.count("then: ") == 2 and "not experts" not in out and "pip install" not in out
    assert "\n  3 others cannot run it: pass --all for the reasons\n" in out
    assert main([*args, "--all"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("then: ") > 4 and out.count("not experts") == 3 and "others" not in out
    assert (
        "not experts a: nor_this and no_such_lib are not installed (pip install no-such-lib)" in out
    )
    assert main([*args, "--experts", "b"]) == 1
    out = capsys.readouterr().out
    assert "not experts b: nor_this and no_such_lib are not installed (pip" in " ".join(out.split())
    assert "others" not in out


def test_explain_names_a_wrong_variable(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that takes backends out of the choice is named once, with these backends."""
    fakes = only("picky")
    check = """
def check(problem):
    import os
    value = os.environ.get("ACME_MODE", "fast")
    return [] if value == "fast" else [f"ACME_MODE={value!r}: expected 'fast'", "is too slow"]
"""
    fakes.install("picky", check + offers("a", "b", more=", check=check"))
    args = ["explain", *SIZES, "--device", "cpu"]
    assert main(args) == 0
    assert "ACME_MODE" not in capsys.readouterr().out
    monkeypatch.setenv("ACME_MODE", "fats")
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "\n  not experts a, experts b: ACME_MODE='fats': expected 'fast'\n" in out
    assert "too slow" not in out and "\n  2 others cannot run it" in out


def test_explain_says_what_moves_tokens(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint appears if moekit-naive is not installed, as after `pip install .`."""
    monkeypatch.setattr(packages, "importable", lambda name: False)
    said = "moekit-naive has a dispatcher for this problem and is not installed: pip install"
    assert main(["explain", *SIZES, "--device", "cpu", "--ep", "2"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    parallel = moekit.ParallelConfig(ep_size=2, dp_size=1)
    problem = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, device="cpu")
    assert not moekit.explain(moekit.MoEProblem(**problem, parallel=parallel)).not_installed
    parallel = moekit.ParallelConfig(ep_size=2)
    with pytest.raises(moekit.errors.NoBackend, match=said):
        moekit.compose(moekit.MoEProblem(**problem, parallel=parallel))


def test_explain_names_a_check_that_fails(only, capsys) -> None:
    fakes = only("weak")
    fakes.install("weak", offers("a", more=", check=lambda problem: 1 / 0"))
    assert main(["explain", *SIZES, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "\n  not experts a: its check failed: ZeroDivisionError: division by zero" in out
    assert "cannot run it" not in out


@pytest.mark.parametrize(
    "quant", ["none", "int8_w8a16", "nvfp4_w4a16", "fp8_tensor_static", "nvfp4"]
)
def test_explain_names_emulated_schemes(only, quant: str) -> None:
    sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, device="cpu")
    note = moekit.explain(moekit.MoEProblem(**sizes, quant=quant)).note
    quantized = quant in ("fp8_tensor_static", "nvfp4")
    exact = f"activations stay exact (bfloat16) in torch, which emulates {quant}; "
    assert note.startswith(exact) == quantized
    assert ("emulates" in note) == quantized


@pytest.mark.parametrize(
    ("combination", "facts", "said"),
    [
        (("naive", "torch"), {}, "activations are quantized to fp8_block for the transfer"),
        (("naive", "good"), {"takes_quantized": False}, "good quantizes activations to fp8_block"),
        (("local", "good"), {}, "good quantizes activations to fp8_block"),
        (("local", "good"), {"takes_unquantized": False}, "to fp8_block when they arrive"),
    ],
)
def test_explain_says_which_arithmetic_runs(
    combination: tuple[str, str], facts: dict[str, bool], said: str
) -> None:
    backends = registry().copy()
    backends.register(replace(backends.expert("torch"), name="good", emulates=False, **facts))
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=256, device="cpu",
        quant="fp8_block", parallel=moekit.ParallelConfig(ep_size=1 + (combination[0] == "naive")),
    )  # fmt: skip
    note = moekit.explain(problem, *combination, backends=backends).note
    assert said in note and note.count("activations") == 1


def test_an_explanation_is_current_after_weights_are_packed() -> None:
    """Some backends know only then how they will run."""
    backends, how = registry().copy(), ["not timed yet"]
    backends.register(replace(backends.expert("torch"), name="good", describe=lambda p: how[0]))
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, device="cpu"
    )
    explanation = moekit.explain(problem, experts="good", backends=backends)
    assert explanation.note == "good: not timed yet"
    how[0] = "by method 3"
    assert explanation.note == "good: by method 3" and "by method 3" in str(explanation)
    assert explanation.as_dict()["note"] == "good: by method 3"


def test_explain_batch_invariant_problems(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("plain")
    fakes.install("plain", offers("plain"))
    args = ["explain", *SIZES, "--device", "cpu", "--batch-invariant"]
    assert main([*args, "--all"]) == 0
    out = capsys.readouterr().out
    assert "silu, batch-invariant on" in out and "chosen: local + torch (by priority)" in out
    assert "not experts plain: is not batch-invariant: the bits of a token's result" in out
    assert main([*args, "--tp", "2"]) != 0
    assert "--batch-invariant needs --tp 1" in capsys.readouterr().err


def test_explain_json_is_as_documented(
    only, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "importable", lambda name: False)
    fakes = only("needy")
    fakes.install("needy", offers("needy", more=NEEDY))
    args = ["explain", *SIZES, "--device", "cpu", "--json"]
    assert main(args) == 0
    found = actual(json.loads(capsys.readouterr().out))
    assert main([*args, "--ep", "2"]) == 1
    nothing = json.loads(capsys.readouterr().out)
    assert nothing["chosen"] is None and nothing["runners_up"] == []
    assert (found | actual(nothing)) - {"chosen"} == documented("explain --json")


def test_explain_names_options_and_no_python(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("picky")
    check = "\ndef check(p): return [f'max_num_tokens={p.max_num_tokens} exceeds 8 with tp_size']\n"
    fakes.install("picky", check + offers("picky", more=", check=check"))
    args = ["explain", *SIZES, "--device", "cpu"]
    assert main([*args, "--experts", "picky", "--max-num-tokens", "16"]) == 1
    assert "--max-num-tokens 16 exceeds 8 with --tp" in capsys.readouterr().out
    assert main([*args, "--top-k", "999"]) == 2
    assert "--top-k 999 exceeds --num-experts 256" in capsys.readouterr().err
    assert main([*args, "--batch-invariant", "--tp", "2"]) == 2
    assert "--batch-invariant needs --tp 1 (got --tp 2)" in capsys.readouterr().err


def test_every_option_reaches_the_problem(only, capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "explain --num-experts 8 --top-k 1 --hidden-size 64 --intermediate-size 32 "
        "--dtype float16 --quant int8_w8a16 --activation silu --activation-limit 7 --has-bias "
        "--weight-on-input --redundant-experts 2 --max-num-tokens 9 --ep 5 --tp 2 --dp 1 "
        "--device sm100 --dispatcher local --experts reference --json"
    )
    assert main(args.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["why"] == "by name"
    assert answer["chosen"] == {
        "dispatcher": "local", "experts": "reference", "bridged": False, "sums": "moekit",
    }  # fmt: skip
    assert eval(answer["problem"], {**vars(moekit), "torch": torch}) == moekit.MoEProblem(
        num_experts=8,
        top_k=1,
        hidden_size=64,
        intermediate_size=32,
        dtype=torch.float16,
        quant="int8_w8a16",
        activation=moekit.Activation("silu", limit=7.0),
        has_bias=True,
        apply_router_weight_on_input=True,
        num_redundant_experts=2,
        max_num_tokens=9,
        parallel=moekit.ParallelConfig(ep_size=5, tp_size=2, dp_size=1),
        device="sm100",
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--top-k 300", "--top-k 300 exceeds --num-experts 256"),
        ("--hidden-size 0", "--hidden-size 0: it must be an integer of at least 1"),
        ("--quant fp3", "'fp3'"),
        ("--activation tanh", "activation 'tanh' is unknown; choose one of"),
        ("--activation gelu --activation-limit 7", "has no clamp"),
        ("--device nvidia!", "device 'nvidia!' is not understood; expected"),
        ("--device H200", "'sm90' for H100 and H200"),
        ("--device gpu", "device 'gpu' is not understood; expected a torch device ('cpu', 'cuda')"),
        ("--tp 3", "--tp 3 must divide --intermediate-size 2048"),
        ("--ep 0", "--ep 0: it must be"),
        ("--experts tritn", "no experts backend named 'tritn'; there are: reference, torch"),
        ("--dispatcher torch", "'torch' is known as: experts backend"),
    ],
)
def test_bad_problems(only, capsys: pytest.CaptureFixture[str], more: str, said: str) -> None:
    assert main(["explain", *SIZES, "--device", "cpu", *more.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ") and said in err and "Traceback" not in err


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


def test_explain_notes_broken_plugins(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("bad")
    fakes.install("bad", "raise RuntimeError('CUDA_HOME is not set')")
    fakes.install("other", offers("other"))
    assert main(["explain", *SIZES, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "plugin bad is broken: RuntimeError: CUDA_HOME" in out and "blocked" not in out
    assert main(["explain", *SIZES, "--device", "cpu", "--all"]) == 0
    assert "plugin other is blocked: not named in MOEKIT_PLUGINS" in capsys.readouterr().out


# -- commands of other packages --------------------------------------------------------------------

HELLO = """\"\"\"`python -m moekit hello`: greet whoever asks.\"\"\"

import builtins

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
    assert re.search(r"^ +hello +greet whoever asks$", capsys.readouterr().out, re.M)
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


# -- check, demo, version --------------------------------------------------------------------------


def test_check(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(name: str, extra_args: list[str]) -> int:
        calls.append((name, extra_args))
        return 5

    monkeypatch.setattr("moekit.testing.run", run)
    assert main(["check", "torch", "-k", "scheme", "-x"]) == 5
    assert main(["check", "local"]) == 5
    assert calls == [("torch", ["-k", "scheme", "-x"]), ("local", [])]
    assert main(["check", "tritn", "-x"]) == 2
    err = capsys.readouterr().err
    assert "no dispatcher named 'tritn'" in err and "no experts backend named 'tritn'" in err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pytest" else find_spec(name)
    )
    assert main(["check", "torch"]) == 2
    assert "pip install 'moekit[testing]'" in capsys.readouterr().err


def test_demo_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = SimpleNamespace(run=lambda folder: folder == "x")
    monkeypatch.setitem(sys.modules, "moekit.cli.demo", demo)
    assert main(["demo", "--model-dir", "x"]) == 1


def test_demo_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before it prints its first step."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert not out and "the demo needs transformers: pip install 'moekit[hf]'" in err


def test_the_demo_takes_no_nan_for_a_small_error() -> None:
    demo = importlib.import_module("moekit.cli.demo")
    wrong = torch.tensor([1.0, float("nan")])
    assert max(0.0, demo._relative_rms(wrong, torch.ones(2))) == float("inf")
    assert demo._relative_rms(torch.ones(2), torch.ones(2)) == 0.0


def test_demo_in_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Model:
        to = eval = lambda self, *_: self

        def save_pretrained(self, folder: Path) -> None:
            raise PermissionError(13, "Permission denied", str(folder))

    fake = SimpleNamespace(
        Qwen3MoeConfig=SimpleNamespace, Qwen3MoeForCausalLM=lambda config: Model()
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    assert main(["demo", "--model-dir", "/no"]) == 2
    assert "--model-dir /no cannot be written (Permission denied)" in capsys.readouterr().err


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
    """No vendor library is imported, and few modules besides torch: the CLI starts at once."""
    for vendor in VENDORS:
        (tmp_path / f"{vendor}.py").touch()
    code = f"""
import sys, torch
before = set(sys.modules)
from moekit.cli.main import main
main(["plugins"])
main(["explain", *{SIZES}, "--quant", "fp8_block", "--device", "sm90"])
new = [name for name in sys.modules if name not in before]
slow = [name for name in ("transformers", "triton", "torch._dynamo") if name in new]
print(len(new), slow + [v for v in {VENDORS} if v in sys.modules], file=sys.stderr)
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    count, imported = done.stderr.strip().splitlines()[-1].split(" ", 1)
    assert imported == "[]"
    assert int(count) < 400, f"{count} modules besides torch's"


# -- problems of models ----------------------------------------------------------------------------


def _model(folder: Path) -> str:
    """Save the smallest Mixtral-like checkpoint: 4 experts, hidden 64, intermediate 32."""
    from safetensors.torch import save_file

    shapes = {"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}
    prefix = "model.layers.0.block_sparse_moe.experts"
    tensors = {
        f"{prefix}.{e}.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        for e in range(4)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = dict(
        model_type="mixtral", hidden_size=64, intermediate_size=32, torch_dtype="bfloat16"
    )
    config |= dict(num_local_experts=4, num_experts_per_tok=2, torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_explain_reads_a_model(tmp_path, capsys) -> None:
    assert main(["explain", "--model", _model(tmp_path), "--device", "cpu", "--top-k", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "4 experts, top 3, hidden 64, intermediate 32, bfloat16, quant none, silu"
    )


def test_explain_asks_for_what_is_missing(capsys) -> None:
    assert main(["explain", "--num-experts", "4"]) == 2
    err = capsys.readouterr().err
    assert "needs --top-k, --hidden-size, --intermediate-size" in err and "--model DIR" in err


DESCRIBES = """
import moekit


def problems(folder, parallel, **fields):
    sizes = dict(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    return moekit.MoEProblem(**sizes | fields, parallel=parallel), [f"described from {folder}"]
"""


def test_packages_describe_models(only, capsys, monkeypatch) -> None:
    monkeypatch.setattr(explain, "_sources", explain._sources.__wrapped__)
    fakes = only()
    for name, source in (("engine", DESCRIBES), ("broken", "raise RuntimeError('no engine')")):
        entries = f"[moekit.problems]\n{name} = fake_{name}_dist:problems\n"
        fakes.install(name, source, entries=entries)
    assert main(["explain", "--engine", "DIR", "--device", "cpu", "--top-k", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 experts, top 1,") and "\n  described from DIR\n" in out
    assert main(["explain", "--broken", "DIR"]) == 2
    assert "--broken of broken-dist 1.0 cannot be loaded" in capsys.readouterr().err
