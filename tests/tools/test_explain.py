"""`python -m moekit explain`: what it prints, and which problems it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_plugins import offers, only_named
from json_keys import actual, documented

import moekit
from moekit.cli import explain
from moekit.cli.main import main
from moekit.discovery import packages
from moekit.discovery.registry import registry
from moekit.runtime.rows import quantized_by

SIZES = "--num-experts 256 --top-k 8 --hidden-size 7168 --intermediate-size 2048".split()
NEEDY = ", requires=('json', 'no_such_lib'), install_hint='pip install no-such-lib'"

only = pytest.fixture(only_named)


def explained(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> str:
    """Return what `explain` prints for SIZES on the CPU; ``code``: its expected exit code."""
    assert main(["explain", *SIZES, "--device", "cpu", *more]) == code
    return capsys.readouterr().out


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
    out = explained(capsys)
    assert out.count("then: ") == 2 and "not experts" not in out and "pip install" not in out
    assert "\n  3 others cannot run it: pass --all for the reasons\n" in out
    out = " ".join(explained(capsys, "--all").split())
    assert out.count("then: ") > 4 and out.count("not experts") == 3 and "others" not in out
    assert (
        "not experts a: nor_this and no_such_lib are not installed (pip install no-such-lib)" in out
    )
    out = explained(capsys, "--experts", "b", code=1)
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
    assert "ACME_MODE" not in explained(capsys)
    monkeypatch.setenv("ACME_MODE", "fats")
    out = explained(capsys)
    assert "\n  not experts a, experts b: ACME_MODE='fats': expected 'fast'\n" in out
    assert "too slow" not in out and "\n  2 others cannot run it" in out


def test_explain_says_what_moves_tokens(only, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint appears if moekit-naive is not installed, as after `pip install .`."""
    monkeypatch.setattr(packages, "importable", lambda name: False)
    said = "moekit-naive has a dispatcher for this problem and is not installed: pip install"
    assert said in " ".join(explained(capsys, "--ep", "2", code=1).split())
    parallel = moekit.ParallelConfig(ep_size=2, dp_size=1)
    problem = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, device="cpu")
    assert not moekit.explain(moekit.MoEProblem(**problem, parallel=parallel)).not_installed
    parallel = moekit.ParallelConfig(ep_size=2)
    with pytest.raises(moekit.errors.NoBackend, match=said):
        moekit.compose(moekit.MoEProblem(**problem, parallel=parallel))


def test_explain_names_a_check_that_fails(only, capsys) -> None:
    fakes = only("weak")
    fakes.install("weak", offers("a", more=", check=lambda problem: 1 / 0"))
    out = explained(capsys)
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


def test_training_quantizes_no_activations(only) -> None:
    sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, device="cpu")
    problem = moekit.MoEProblem(**sizes, quant="fp8_channel_token", training=True)
    assert moekit.explain(problem).note.startswith(
        "activations stay exact (bfloat16), because gradients are wanted;"
    )
    specs = registry()
    sends = {"wire_schemes": frozenset({problem.quant.name})}
    dispatcher, experts = replace(specs.dispatcher("local"), **sends), specs.expert("torch")
    assert quantized_by(problem, dispatcher, experts) == "nobody"
    assert quantized_by(problem.replace(training=False), dispatcher, experts) == "sender"


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
    assert "--max-num-tokens 16 exceeds 8 with --tp" in explained(
        capsys, "--experts", "picky", "--max-num-tokens", "16", code=1
    )


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
            "fused": False,
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
        ("--ep 1099511627776", "--ep 1099511627776: it must be an integer"),
        ("--activation-limit nan", "limit=nan"),
        ("--max-num-tokens 0", "--max-num-tokens 0: it must be"),
        ("--batch-invariant --tp 2", "--batch-invariant needs --tp 1 (got --tp 2)"),
        ("--experts tritn", "no experts backend named 'tritn'; there are: reference, torch"),
        ("--dispatcher torch", "'torch' is known as: experts backend"),
    ],
)
def test_bad_problems(only, capsys: pytest.CaptureFixture[str], more: str, said: str) -> None:
    assert main(["explain", *SIZES, "--device", "cpu", *more.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ") and said in err and "Traceback" not in err


def test_explain_notes_broken_plugins(only, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("bad")
    fakes.install("bad", "raise RuntimeError('CUDA_HOME is not set')")
    fakes.install("other", offers("other"))
    out = explained(capsys)
    assert "plugin bad (broken): RuntimeError: CUDA_HOME" in out and "blocked" not in out
    assert "plugin other (blocked): not named in MOEKIT_PLUGINS" in explained(capsys, "--all")


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


def test_explain_asks_for_several_hosts(capsys) -> None:
    text = explained(capsys, "--ep", "4", "--nodes", "2", "--experts", "torch")
    assert "ep 4, dp 4, 2 hosts" in text and "chosen: naive + torch" in text
    assert main(["explain", *SIZES, "--ep", "4", "--nodes", "3"]) == 2
    assert "nodes must divide the number of ranks" in capsys.readouterr().err


def test_limits_of_experts_say_that_adapters_count(capsys) -> None:
    text = " ".join(explained(capsys, "--ep", "8", "--adapters", "8:32", "--all").split())
    assert "288 experts per rank exceed 128 (each expert counts 9 times, for tokens with" in text


def test_explain_says_who_takes_adapters(only, capsys) -> None:
    text = " ".join(explained(capsys, "--adapters", "8:32", "--all").split())
    assert "8 adapters of rank 32" in text and "chosen: local + torch" in text
    assert "batched tokens have no room for the ids of adapters" in text
    for given, says in (("8", "as 8:32"), ("0:8", "at least 1"), ("8:300", "at most 256")):
        with pytest.raises(SystemExit):
            main(["explain", *SIZES, "--adapters", given])
        assert says in capsys.readouterr().err
