"""`python -m moekit bench` on the CPU, with tiny sizes."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import types
from pathlib import Path

import moekit_bench as bench
import pytest
import torch
from moekit_bench import Case, Ceilings, Prepared, Timer, Work, cases, implementations, take_turns
from moekit_bench.cases import oracle_rows, relative_error, sampled_rows
from moekit_bench.limits import arithmetic, bytes_per_expert
from moekit_bench.training import Step, TrainingCase

import moekit
from moekit.backends.reference import oracle
from moekit.cli.main import main

CPU = torch.device("cpu")
SIZES = "4:2:32:48"
FAST = ["--device", "cpu", "--tokens", "2,5", "--shapes", SIZES, "--replays", "2", "--inputs", "2"]
ROOT = Path(__file__).parents[3]
BASELINES = ROOT / "benchmarks" / "baselines"


def problem(**changes) -> moekit.MoEProblem:
    return bench.shape(SIZES).problem(**{"device": "cpu", **changes})


def checked(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that are checked, and the oracle's output for them."""
    rows = sampled_rows(case.tokens, 32, CPU)
    return rows, oracle_rows(case.problem, case.weights, *case.inputs[0], rows)


def adapter(folder: Path, name: str, body: str) -> Path:
    """Write an adapter whose make() runs ``body``, where `right` is a correct call."""
    file = folder / f"{name}.py"
    start = f"""
        from moekit_bench import Unavailable
        from moekit.backends.reference import oracle
        name = {name!r}
        def version():
            return "acme 1.2"
        def make(problem, weights, device):
            def right(x, routing):
                return oracle(x, weights, routing, problem).to(x.dtype)
    """
    file.write_text(textwrap.dedent(start) + textwrap.indent(textwrap.dedent(body), "    "))
    return file


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["bench", *FAST, *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- limits -------------------------------------------------------------------------------------


def test_limits_by_hand():
    """Mixtral with all experts in use: 912 us by FLOP at T = 1024, 628 by bytes at 64."""
    h200 = bench.known_ceilings("NVIDIA H200")
    p = bench.SHAPES["mixtral"].problem(device="sm90")
    expert = 3 * 4096 * 14336 * 2

    def limit(tokens: int) -> float:
        io = 2 * tokens * 4096 * 2
        flop = 2 * (tokens * 2) * 3 * 4096 * 14336
        done = Work(flop=flop, bytes=8 * expert + io, active_experts=8, rows=2 * tokens)
        return bench.limit_us(done, p, h200)

    assert round(limit(1024)) == 912
    assert round(limit(64)) == 628
    assert bench.limit_us(Work(1, 1, 1, 1), p, None) is None
    assert bench.limit_us(Work(1, 1, 1, 1), p.replace(dtype=torch.float32), h200) is None


def test_work_counts_what_is_routed():
    p = problem()
    weights = bench.random_weights(p, CPU)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    first = moekit.Routing(torch.ones(3, 2), torch.tensor([[0, 1], [1, 0], [0, 1]]))
    second = moekit.Routing(torch.ones(3, 2), torch.tensor([[0, 1], [2, 3], [-1, -1]]))
    done = bench.work(p, weights, [(x, first), (x, second)])
    assert (done.active_experts, done.rows) == (3.0, 5.0)
    assert done.flop == 2 * 5 * 3 * 32 * 48
    assert done.bytes == 3 * (3 * 32 * 48 * 2) + 2 * 3 * 32 * 2


def test_scales_count_and_arithmetic_follows_the_activations():
    p = problem(quant="fp8_block")
    done = bench.work(
        p, bench.random_weights(p, CPU), bench.inputs("uniform", 64, 1, p, CPU)
    )  # every expert gets a token
    # Gate, up and down have whole blocks of 128 neurons, with one scale each.
    assert done.bytes == 4 * (3 * 32 * 128 + 4 * 3) + 2 * 64 * 32 * 2
    names = [arithmetic(problem(quant=q)) for q in ("fp8_block", "int8_w8a16", "none")]
    assert names == ["fp8", "bf16", "bf16"]


# -- routings and weights -----------------------------------------------------------------------


def test_inputs_differ_and_repeat():
    p = problem()
    first, again = (bench.inputs("zipf", 9, 2, p, CPU, seed=3) for _ in range(2))
    assert not torch.equal(first[0][0], first[1][0])
    assert torch.equal(first[1][0], again[1][0])
    assert torch.equal(first[1][1].topk_ids, again[1][1].topk_ids)


@pytest.mark.parametrize(("count", "drawn"), [(3, 8), (9, 9), (20, 20)])
def test_inputs_are_added_where_the_cache_would_hold_their_weights(monkeypatch, count, drawn):
    """At most eight are drawn for that, and none that was asked for is left out."""
    p = problem()
    weights = bench.random_weights(p, CPU)
    read = Case.make(p, weights, 40).work.active_experts * bytes_per_expert(weights)
    monkeypatch.setattr(cases, "_cache_bytes", lambda device: 10 * read)
    assert len(Case.make(p, weights, 40, count=count).inputs) == drawn


@pytest.mark.parametrize("scheme", moekit.SCHEMES)
def test_random_weights_fit_every_scheme(scheme):
    p = problem(quant=scheme, has_bias=True)
    weights = bench.random_weights(p, CPU)
    weights.check(p)
    case = Case.make(p, weights, 40)
    rows, want = checked(case)
    assert len(rows) == 32
    torch.testing.assert_close(want, oracle(case.inputs[0][0], weights, case.inputs[0][1], p)[rows])


# -- timing -------------------------------------------------------------------------------------


def test_one_call_is_timed():
    p = problem()
    calls = []

    def call(x, routing):
        calls.append(len(x))
        return x

    call.warmup = calls.append
    timing = Prepared(call, bench.inputs("uniform", 7, 2, p, CPU), CPU).time(3)
    assert set(calls) == {7}
    assert timing.us == timing.eager_us and timing.graph_us is None and timing.host_us is None
    assert 0 < timing.spread_us[0] <= timing.us <= timing.spread_us[1]


def test_turns_continue_without_a_call_that_fails():
    class Fake(Timer):
        times = 0

        def eager_us(self, function, times=1) -> tuple[float, float]:
            self.times += times
            function()
            return float(self.times), 0.0

    def fail(x) -> None:
        if bad.times == 2:
            raise RuntimeError("on purpose")

    good, bad = Fake(CPU), Fake(CPU)
    calls = {"good": Prepared(abs, [(1,)], CPU, timer=good),
             "bad": Prepared(fail, [(1,)], CPU, timer=bad)}  # fmt: skip
    results = take_turns(calls, replays=5)
    assert results["good"].us == 3.0 and (good.times, bad.times) == (5, 2)
    assert results["bad"].us is None and "on purpose" in results["bad"].reason


def test_relative_error_sees_zeros_and_nan():
    p = problem()
    rows, want = checked(Case.make(p, bench.random_weights(p, CPU), 6))
    assert relative_error(want, rows, want) == 0
    assert relative_error(torch.zeros_like(want), rows, want) == pytest.approx(1)
    assert relative_error(want.index_fill(0, rows[:1], torch.nan), rows, want) == math.inf
    assert relative_error(want[:, 1:], rows, want) == math.inf
    nothing = torch.zeros_like(want)  # other ranks' experts alone
    assert relative_error(nothing, rows, nothing) == 0
    assert relative_error(want, rows, nothing) == math.inf


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def baselines(tmp_path: Path) -> Path:
    folder = tmp_path / "baselines"
    folder.mkdir()
    adapter(folder, "good", "return right")
    adapter(folder, "doubled", "return lambda x, routing: 2 * right(x, routing)")
    adapter(folder, "absent", "raise Unavailable('acme is not installed')")
    adapter(folder, "broken", "return lambda x, routing: x[99]")
    (folder / "unloadable.py").write_text("import no_such_library")
    (folder / "_helper.py").write_text("1 / 0")
    return folder


def test_json_has_the_documented_keys(capsys, tmp_path, baselines, monkeypatch):
    ceilings = Ceilings({"bf16": 2e12}, 10e9)
    monkeypatch.setattr("moekit_bench.bench.known_ceilings", lambda name: ceilings)
    file, text = tmp_path / "out" / "run.json", tmp_path / "run.md"
    code, out, err = run(
        capsys, "--experts", "torch", "--baselines", str(baselines), "--json", str(file),
        "--markdown", str(text), "--routing", "uniform,hot",
    )  # fmt: skip
    assert code == 0 and out == "" and "4/4" in err
    data = json.loads(file.read_text())
    documented = (ROOT / "docs" / "bench.md").read_text()
    for record in (data, data["device"], data["ceilings"], data["settings"], data["refused"][0],
                   data["cells"][0], data["cells"][0]["results"][0]):  # fmt: skip
        assert record
        assert [key for key in record if f"`{key}`" not in documented] == []
    assert data["format"] == 1 and "--experts torch" in data["command"]
    assert data["versions"]["moekit"] == moekit.__version__
    assert data["versions"]["torch"] == str(torch.__version__)
    assert data["versions"]["acme"] == "1.2"
    assert len(data["cells"]) == 4

    # A baseline that fails or is wrong has its reason, and the others are measured.
    for cell in data["cells"]:
        rows = {row["name"]: row for row in cell["results"]}
        assert set(rows) == {"torch", "good", "doubled", "broken"}
        assert rows["torch"]["kind"] == "moekit" and rows["good"]["kind"] == "baseline"
        assert rows["torch"]["right"] and rows["good"]["right"]
        assert rows["good"]["error"] < 5e-3 and rows["good"]["reason"] == ""
        assert rows["doubled"]["error"] == pytest.approx(1, abs=0.01)
        assert not rows["doubled"]["right"] and "wrong" in rows["doubled"]["reason"]
        assert "us" not in rows["broken"] and "IndexError" in rows["broken"]["reason"]
        for row in (rows["torch"], rows["good"]):
            assert row["fraction"] == pytest.approx(cell["limit_us"] / row["us"])
    refused = {r["name"]: r["reason"] for r in data["refused"]}
    assert "acme is not installed" in refused["absent"]
    assert "no_such_library" in refused["unloadable"]
    assert "_helper" not in refused

    # Only right results of baselines count against moekit's.
    written = text.read_text()
    assert "~~" in written and "acme is not installed" in written
    summary = written.split("## Against baselines")[1].splitlines()
    speeds = [c["good"]["us"] / c["torch"]["us"] for c in
              ({r["name"]: r for r in cell["results"]} for cell in data["cells"])]  # fmt: skip
    mean = math.prod(speeds) ** (1 / len(speeds))
    assert f"| none | good | 4 | {mean:.3f} | {min(speeds):.3f} |" in summary
    assert not any("doubled" in line for line in summary if line.startswith("|"))


def test_by_default_every_backend_that_can_is_measured(capsys, tmp_path):
    file = tmp_path / "run.json"
    code, out, _ = run(capsys, "--tokens", "3", "--quant", "int8_w8a16", "--json", str(file))
    data = json.loads(file.read_text())
    assert code == 0 and "| torch | **" in out and "No ceilings are known" in out
    for cell in data["cells"]:
        assert "torch" in [row["name"] for row in cell["results"]]
        assert "reference" not in [row["name"] for row in cell["results"]]


def test_batch_invariant_mode_is_timed_beside_the_default(capsys, tmp_path):
    file = tmp_path / "run.json"
    argv = ["--experts", "torch,torch:3|torch", "--batch-invariant", "--json", str(file)]
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    recorded = json.loads(file.read_text())
    kinds = {r["name"]: r["kind"] for cell in recorded["cells"] for r in cell["results"]}
    assert kinds == {
        "torch": "moekit", "torch (batch-invariant)": "batch-invariant", "torch:3|torch": "moekit"
    }  # fmt: skip
    assert all(r["right"] for cell in recorded["cells"] for r in cell["results"])
    us = {r["name"]: r["us"] for r in recorded["cells"][0]["results"]}
    ratio = us["torch (batch-invariant)"] / us["torch"]
    lines = out.split("Time over that without what is in brackets:")[1].splitlines()
    row = f"| torch (batch-invariant) | {ratio:.2f} |"
    assert lines[2] == "|  | T=2 | T=5 |" and lines[4].startswith(row)
    assert "torch:3|torch (batch-invariant): is not batch-invariant: its members" in out


def test_outputs_that_are_partial_sums_have_no_batch_invariant_mode(capsys):
    code, out, _ = run(capsys, "--experts", "torch", "--batch-invariant", "--ep", "2")
    assert code == 0 and "batch_invariant=True needs ranks that exchange tokens" in out


def test_one_rank_of_several(capsys, tmp_path, baselines):
    """The experts are the first rank's, and most choices of the tokens are other ranks'."""
    file = tmp_path / "run.json"
    options = ["--ep", "4", "--tokens", "400", "--baselines", str(baselines / "good.py")]
    code, out, _ = run(capsys, "--experts", "torch", *options, "--json", str(file))
    data = json.loads(file.read_text())
    (cell,) = data["cells"]
    assert code == 0 and "E 4 (those of one of 4 ranks)" in out and data["settings"]["ep"] == 4
    assert [row["name"] for row in cell["results"]] == ["torch"]
    assert 0 < cell["results"][0]["error"] < 2e-2
    assert (
        "which experts are other ranks'"
        in {r["name"]: r["reason"] for r in data["refused"]}["good"]
    )


def test_a_cell_without_a_right_result_is_exit_code_1(capsys, baselines):
    code, _, err = run(capsys, "--experts", "", "--baselines", str(baselines / "doubled.py"))
    assert code == 1 and "wrong" in err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--shapes", "nothing"], "nothing"),
        (["--tokens", "0"], "0"),
        (["--ep", "5"], "5"),
        (["--routing", "warm"], "warm"),
        (["--experts", "nobody"], "nobody"),
        (["--experts", ""], ""),
        (["--baselines", "/no/such/folder"], "/no/such/folder"),
        (["--device", "warp"], "warp"),
        (["--tokens", "²"], ""),
        (["--shapes", "²:2:32:48"], ""),
        (["--markdown", "/dev/null/x.md"], "/dev/null/x.md"),
        (["--baselines", str(BASELINES / "quack.py"), "--only-baselines", "quark"], "quark"),
        (["--device", "meta"], "device 'meta' was asked for, but torch sees none here"),
        (["--device", "sm90"], "--device must be a device of torch on this machine (got 'sm90': "),
        (["--experts", "torch,torch"], "torch is named twice: name it once in --experts"),
        (["--adapters", "8"], "--adapters"),
        (["--quant", "fp9"], "--quant 'fp9': fp9 is unknown; choose from none, fp8_tensor"),
        (["--json", str(ROOT)], f"{ROOT} cannot be written (Is a directory): name a file in"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(capsys, wrong, said):
    code, out, err = run(capsys, *wrong)
    assert code == 2 and out == "" and err.startswith("error: ")
    assert said in err and "[1/" not in err
    assert not list(ROOT.parent.glob(f".{ROOT.name}.*")), "a partial file is left"


def test_shapes_are_listed(capsys):
    assert main(["bench", "--list-shapes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in bench.SHAPES) and "openai/gpt-oss-20b" in out


def test_the_shipped_baselines_load(capsys, tmp_path):
    """On a machine without GPU torch runs, and the others say why they cannot."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPU")
    file = tmp_path / "run.json"
    options = ["--experts", "", "--baselines", str(BASELINES), "--tokens", "5"]
    code, _, _ = run(capsys, *options, "--json", str(file))
    assert code == 0
    data = json.loads(file.read_text())
    (row,) = data["cells"][0]["results"]
    assert row["name"] == "torch_grouped_mm" and row["right"]
    refused = {r["name"]: r["reason"] for r in data["refused"]}
    assert set(refused) == {
        "vllm_triton", "deepgemm_bare", "quack", "marlin_bare", "liger", "sonic", "peft"
    }  # fmt: skip
    assert not any("does not load" in reason for reason in refused.values())


def test_adapters_are_timed_beside_the_base(capsys, tmp_path):
    file, folder = tmp_path / "run.json", tmp_path / "baselines"
    folder.mkdir()
    for name, held in (("with_them", "adapters"), ("without", "None")):
        (folder / f"{name}.py").write_text(
            "from moekit.backends.reference import oracle\n"
            f"name, adapts = {name!r}, True\n"
            "def make(problem, weights, device, adapters=None):\n"
            f"    return lambda x, r: oracle(x, weights, r, problem, {held}).to(x.dtype)"
        )
    options = ["--experts", "torch", "--adapters", "1:4,3:8", "--baselines", str(folder)]
    code, out, _ = run(capsys, *options, "--quant", "none,int4_w4a16_g32", "--json", str(file))
    assert code == 0
    for cell in json.loads(file.read_text())["cells"]:
        rows = {row["name"]: row for row in cell["results"]}
        modes = ("", " (adapters 1:4)", " (adapters 3:8)")
        names = ("torch", "with_them", "without")
        assert set(rows) == {name + mode for name in names for mode in modes}
        assert {rows["torch" + mode]["kind"] for mode in modes[1:]} == {"adapters"}
        wrong = {name for name, row in rows.items() if not row["right"]}
        assert wrong == {"without" + mode for mode in modes[1:]}
    assert "| torch (adapters 3:8) | " in out.split("Time over that without")[1]
    assert "| none | with_them (adapters 3:8) | 2 |" in out.split("## Against baselines")[1]


# -- training -----------------------------------------------------------------------------------


def test_a_wrong_gradient_is_seen_where_the_output_is_right(capsys, tmp_path):
    bodies = {
        "autograd": "return right",
        "twice_x": "return lambda x, routing: right(2 * x - x.detach(), routing)",
        "twice_w2": "return lambda x, routing: oracle(x, weights.__class__(weights.w13, 2 * "
        "weights.w2 - weights.w2.detach()), routing, problem)",
        "frozen": "weights = weights._map(lambda t: t.detach()); return right",
        "untrained": "return right",
    }
    for name, body in bodies.items():
        file = adapter(tmp_path, name, body)
        if name != "untrained":
            file.write_text(file.read_text() + "\ntrains = True\n")
    file = tmp_path / "run.json"
    code, out, _ = run(
        capsys, "--train", "--experts", "torch", "--baselines", str(tmp_path), "--json", str(file),
        "--dtype", "float32",
    )  # fmt: skip
    data = json.loads(file.read_text())
    assert code == 0 and data["mode"] == "train" and "of forward and backward" in out
    for cell in data["cells"]:
        found = {result["name"]: result for result in cell["results"]}
        right = {name for name, result in found.items() if result["right"]}
        assert right == {"torch", "autograd"}, found
        assert "not have been used" in found["frozen"]["reason"]
    assert [r["name"] for r in data["refused"]] == ["untrained"]


def test_gradients_of_adapters_are_checked_over_a_frozen_base(capsys, tmp_path):
    """A gradient of one matrix that is twice too large is seen, and so is one expert without."""
    body = """
        from dataclasses import replace
        from moekit.backends.reference import oracle
        name, trains, adapts = "{name}", True, True
        def make(problem, weights, device, adapters=None):
            def call(x, routing):
                if adapters is None:
                    return oracle(x, weights, routing, problem).to(x.dtype)
                b = adapters.w13_b
                held = replace(adapters, w13_b={b})
                return oracle(x, weights, routing, problem, held).to(x.dtype)
            return call
    """
    first = "b.index_copy(1, b.new_tensor([0]).long(), b[:, :1].detach())"
    matrices = {"right": "b", "twice": "2 * b - b.detach()", "frozen_expert": first}
    for name, b in matrices.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body).format(name=name, b=b))
    file = tmp_path / "run.json"
    code, _, _ = run(
        capsys, "--train", "--experts", "torch", "--baselines", str(tmp_path), "--json", str(file),
        "--dtype", "float32", "--adapters", "2:4", "--quant", "none,int8_w8a16", "--tokens", "9",
    )  # fmt: skip
    assert code == 0
    for cell in json.loads(file.read_text())["cells"]:
        rows = {row["name"]: row for row in cell["results"]}
        assert all(rows[name]["right"] for name in ("torch", "torch (adapters 2:4)", "right"))
        found = {name for name in matrices if rows[f"{name} (adapters 2:4)"]["right"]}
        assert found == {"right"}, rows


# -- baselines of training ----------------------------------------------------------------------


def trained(name: str, adapters: str = "") -> bench.Result:
    """Return the result of a shipped baseline for a step, on the CPU in float32."""
    p = problem(training=True, dtype=torch.float32)
    weights = bench.random_weights(p, CPU)._map(torch.Tensor.requires_grad_)
    modes = [f"adapters {adapters}"] if adapters else []
    made = implementations.baselines([str(BASELINES / f"{name}.py")], modes=modes)[-1]
    step = Step(made.make(p, weights, CPU), weights)
    case = TrainingCase.of(Case.make(p, weights, 9, count=1))
    return bench.run_cell(case, {name: step}, replays=1)[name]


def test_sonic_gets_what_its_signature_asks_for(monkeypatch):
    """A stand-in with the signature of sonic-moe 0.1.2.post1 computes in fp32."""

    def moe_general_routing_inputs(
        x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id,
        activation_type, is_inference_mode_enabled=False, concat_layout=False,
    ):  # fmt: skip
        assert (w1.shape, w2.shape, E) == ((2 * 48, 32, 4), (32, 48, 4), 4)
        assert w1.stride(1) == w2.stride(1) == 1 and b1 is b2 is None and concat_layout
        assert token_indices.dtype == expert_indices.dtype == torch.int32
        assert token_indices.equal(token_indices.sort().values) and router_scores.dim() == 1
        assert activation_type == "swiglu" and not is_inference_mode_enabled
        h = torch.einsum("rh,nhr->rn", x[token_indices], w1[:, :, expert_indices])
        gate, up = h.chunk(2, dim=1)
        a = torch.nn.functional.silu(gate) * up
        y = torch.einsum("ri,hir->rh", a, w2[:, :, expert_indices]) * router_scores[:, None]
        return torch.zeros_like(x).index_add(0, token_indices, y), None

    functional = types.SimpleNamespace(
        forward=None, backward=None, moe_general_routing_inputs=moe_general_routing_inputs
    )
    enums = types.SimpleNamespace(ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    for name, module in {"": types.ModuleType("sonicmoe"), ".enums": enums,
                         ".functional": functional}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, f"sonicmoe{name}", module)
    result = trained("sonic")
    assert result.right and result.error < 1e-5, result


def test_peft_baseline_computes_what_peft_does():
    """The layer of PEFT itself, with the same matrices in its own layout, has the same output."""
    peft = pytest.importorskip("peft")
    assert trained("peft", "1:4").right

    class Experts(torch.nn.Module):
        def __init__(self, weights: moekit.ExpertWeights) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(weights.w13)
            self.down_proj = torch.nn.Parameter(weights.w2)

        def forward(self, x, routing):
            merged = moekit.ExpertWeights(self.gate_up_proj, self.down_proj)
            return oracle(x, merged, routing, p)

    p = problem(dtype=torch.float32, training=True)
    weights = bench.random_weights(p, CPU)
    made = implementations.baselines([str(BASELINES / "peft.py")], modes=["adapters 1:4"])[-1]
    call = made.make(p, weights, CPU)
    model = torch.nn.ModuleDict({"experts": Experts(weights)})
    alpha = 4 * float(call.adapters.scaling[0])
    config = peft.LoraConfig(
        r=4, lora_alpha=alpha, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    layer = peft.inject_adapter_in_model(config, model)["experts"]
    for name, a, b in (
        ("gate_up_proj", call.adapters.w13_a[0, :, 0], call.adapters.w13_b[0]),
        ("down_proj", call.adapters.w2_a[0], call.adapters.w2_b[0]),
    ):
        wrapper = layer if layer.parameter_name == name else layer.base_layer
        wrapper.lora_A["default"].weight.data = a.flatten(0, 1)
        wrapper.lora_B["default"].weight.data = b.permute(1, 2, 0).flatten(1)
    ((x, routing),) = bench.inputs("uniform", 9, 1, p, CPU)
    with torch.no_grad():
        torch.testing.assert_close(call(x, routing), layer(x, routing))
