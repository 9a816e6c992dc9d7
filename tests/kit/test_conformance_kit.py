"""The kit's own rules: no silent overrides, seeds, tolerances, `run`."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kit_full
import pytest
import torch
from negative_controls import check_negative_controls

import moekit
from moekit import MoEProblem
from moekit.discovery.registry import Registry, registry
from moekit.errors import Unsupported
from moekit.problem.activation import Activation
from moekit.problem.quant import SCHEMES
from moekit.testing import (
    AdapterConformance,
    DispatcherConformance,
    ExpertsConformance,
    GradientConformance,
    assert_close,
    base,
    cases,
    compare,
    memory,
    relative_error,
    run,
    runner,
    tolerance,
)
from moekit.testing.calls import same_bits
from moekit.testing.compare import complain
from moekit.testing.experts_base import one_of_each_kind

pytest_plugins = "pytester"

PROBLEM = MoEProblem(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, device="cpu")


class Mixin:
    def test_scheme(self):
        pass

    def _check(self):
        pass


@pytest.mark.parametrize(
    ("bases", "body", "says"),
    [
        ((), {"test_dtype": lambda self: None}, "redefines test_dtype.*--deselect"),
        ((), {"test_dtype": None}, "redefines test_dtype"),
        ((Mixin,), {}, "Mixin redefines _check"),
    ],
)
def test_overriding_a_kit_test_is_refused(bases, body, says):
    with pytest.raises(TypeError, match=says):
        type("TestAcme", (*bases, ExpertsConformance), {"backend": "reference", **body})


def test_a_failure_says_how_to_repeat_it():
    case = cases.make_case(PROBLEM, 9)
    with pytest.raises(AssertionError, match=f"MOEKIT_TEST_SEED={cases.seed()}"):
        assert_close(torch.zeros_like(case.x), case.reference(), PROBLEM)


def test_seed_decides_the_data(monkeypatch):
    def data():
        case = cases.make_case(PROBLEM, 9, "masked")
        return [case.x, case.weights.w13, case.routing.topk_ids]

    monkeypatch.setenv(cases.SEED_VARIABLE, "1")
    first, again = data(), data()
    monkeypatch.setenv(cases.SEED_VARIABLE, "2")
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same_bits(a, b) for a, b in zip(first, data(), strict=True))


def test_comparison_rejects_what_is_no_result():
    ref = torch.randn(9, 64)
    right = ref.to(PROBLEM.dtype)
    assert not complain(right, ref, PROBLEM)
    assert "shape" in complain(right[:-1], ref, PROBLEM)
    assert "float32" in complain(ref, ref, PROBLEM)
    assert "all zeros" in complain(torch.zeros_like(right), ref, PROBLEM)
    for value in (float("nan"), float("inf")):
        bad = right.clone()
        bad[4, 7] = value
        assert "[4, 7]" in complain(bad, ref, PROBLEM)
    idle = ref.clone()
    idle[2] = 0
    assert "exact zeros" in complain(right, idle, PROBLEM)
    assert not complain(torch.zeros_like(right), torch.zeros_like(ref), PROBLEM)


def test_comparison_sees_one_row_and_one_element_among_many():
    ref = torch.randn(16384, 64)
    for where in (2048, (2048, 5)):
        bad = ref.clone()
        bad[where] = 0.0 if isinstance(where, int) else bad[where] + 1.0
        assert relative_error(bad, ref) < 2 * tolerance(PROBLEM).rms
        assert "[2048, " in complain(bad.to(PROBLEM.dtype), ref, PROBLEM)


@pytest.mark.parametrize(("error", "found"), [(0.0104, False), (0.03, True)])
def test_an_element_far_above_its_row_rounds_as_a_part_of_itself(error, found):
    """8.1 times the row's RMS and 1 % off was seen of a right backend, one in millions."""
    ref = torch.randn(256, 512)
    ref[3, 5] = 8.1 * ref[3].square().mean().sqrt()
    out = ref.clone()
    out[3, 5] *= 1 + error
    assert ("[3, 5] got" in complain(out.to(PROBLEM.dtype), ref, PROBLEM)) is found


@pytest.mark.parametrize(("size", "accepted"), [(1.0, False), (6.0, True), (60.0, True)])
def test_errors_of_one_token_average_over_its_own_only(size, accepted):
    """A token of relu(gate)**2 * up had 70 % of the sum of squares, and an error of 1.9e-2."""
    problem = PROBLEM.replace(quant="int8_w8a16")
    ref = torch.randn(13, 512)
    ref[4] *= size
    out = ref + torch.randn(13, 512) * 0.0135 * ref.square().mean(dim=1, keepdim=True).sqrt()
    complaint = complain(out.to(problem.dtype), ref, problem)
    assert (not complaint) is accepted, complaint
    assert "RMS" in complain((out + (out - ref)).to(problem.dtype), ref, problem)


def test_bounds_of_many_elements():
    """Errors that right backends have shown on an H200 pass at that size, not at a smaller one."""
    large = MoEProblem(num_experts=8, top_k=8, hidden_size=7168, intermediate_size=256)
    weight_only = large.replace(quant="fp8_w8a16_tensor")
    right = {"RMS": 4e-3, "worst row": 5e-3, "worst element": 0.0, "scale": 0.0, "mean": 0.0}

    def beyond(problem, tokens, element=0.0, scale=(0.0, 0.0)):
        found = {name: (value, 0.0) for name, value in right.items()}
        found |= {"worst element": (element, 0.0), "scale": scale}
        said = compare.beyond(found, tolerance(problem, tokens))
        return {name for name in found if name in said}

    assert not beyond(large, 37500, scale=(-6.79e-5, 5e-6))
    assert beyond(large, 37500, scale=(-5e-3, 5e-5)) == {"scale"}
    assert not beyond(weight_only, 1030, element=0.106)
    assert beyond(weight_only, 64, element=0.106) == {"worst element"}
    assert beyond(weight_only, 1030, element=0.2) == {"worst element"}


def test_peak_memory_of_a_function():
    def function():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        kept.append(b[:10])
        return torch.zeros(700, dtype=torch.uint8).view(70, 10).add_(1)

    kept: list[torch.Tensor] = []
    assert memory.measure(torch.device("cpu"), function) == (1500, 500)


@pytest.mark.parametrize("counts", ["requested", "allocated"])
def test_peak_memory_on_an_accelerator(monkeypatch, counts):
    """Requested bytes count, not blocks; an allocator that knows blocks only is asked for them."""

    class Accelerator:
        used = peak = 1000
        synchronize = staticmethod(lambda: None)

        def reset_peak_memory_stats(self):
            self.peak = self.used

        def allocate(self, nbytes):
            self.used += nbytes
            self.peak = max(self.peak, self.used)

        def memory_stats(self):
            stats = {"allocated_bytes.all.peak": 2**21, "allocated_bytes.all.current": 2**20}
            mine = {"all.peak": self.peak, "all.current": self.used}
            return stats | {f"{counts}_bytes.{name}": n for name, n in mine.items()}

    def function():
        device.allocate(500)
        device.allocate(-300)

    device = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    assert memory.measure(torch.device("cuda"), function) == (500, 200)


def test_poisoned_allocations():
    with memory.poisoned_allocations():
        made = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(3).new_empty(3)]
        assert all(bool(t.isnan().all()) for t in made)
        assert bool((torch.zeros(3) == 0).all())


def test_what_is_undeclared_is_one_line(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(moekit.__file__).parents[1]))
    pytester.makepyfile(
        test_acme="""
        from dataclasses import replace
        from moekit import Registry, registry
        from moekit.testing import ExpertsConformance

        backends = Registry(plugins=registry().plugins)
        few = {"none": "plain", "fp8_block": "scaled"}
        acme = replace(registry().expert("reference"), name="acme", schemes=frozenset(few))
        backends.register(replace(acme, describe=lambda problem: few[problem.quant.name]))

        class TestAcme(ExpertsConformance):
            backend, backends, device = "acme", backends, "cpu"
        """
    )
    result = pytester.runpytest_subprocess(
        "-k", "scheme or undeclared or test_pack or any_device", "-rs"
    )
    result.assert_outcomes(passed=9, skipped=1)
    lines = [line for line in result.outlines if "scheme int8_w8a16" in line]
    assert len(lines) == 1 and "not declared, so refused: scheme fp8_tensor" in lines[0]


@pytest.mark.parametrize("scheme", one_of_each_kind(SCHEMES))
def test_negative_controls(scheme):
    """With biases, and with a clamp."""
    problem = PROBLEM.replace(
        num_experts=4, hidden_size=160, intermediate_size=144, has_bias=True, quant=scheme
    )
    limit = Activation("silu", limit=cases.GATE_STD / 2)
    for p in (problem, problem.replace(activation=limit)):
        check_negative_controls(p)


@pytest.mark.parametrize(
    "seed", [1034, 0, *(pytest.param(n, marks=pytest.mark.full) for n in range(30, 300, 30))]
)
def test_negative_controls_of_the_coarsest_scheme(seed, monkeypatch):
    """Seed 1034 let "clamp dropped" pass when the bounds had no mean and the limit was 3."""
    monkeypatch.setenv(cases.SEED_VARIABLE, str(seed))
    problem = PROBLEM.replace(
        num_experts=6, hidden_size=96, intermediate_size=80, has_bias=True, quant="nvfp4"
    )
    limit = Activation("silu", limit=cases.GATE_STD / 2)
    for p in (problem, problem.replace(activation=limit)):
        check_negative_controls(p)


RUNS = """
import os
import moekit.testing

def run(name, *arguments, ranks=""):
    os.environ["MOEKIT_TEST_WORLD_SIZES"] = ranks
    print("exit", moekit.testing.run(name, ["-q", *arguments]), "-- next --")

run("reference", "-k", "test_dtype")
run("local", "-k", "graph")
run("local", "--collect-only", "-k", "memory", ranks="3,8")
run("local", "-k", "slices_and_shared_tokens", ranks="8")
"""


def test_run():
    """One process makes all runs, because its start takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    checked, none, ranks, eight, _ = done.stdout.split("-- next --")
    assert "3 passed" in checked and "exit 0" in checked
    assert "no test called 'local'" in none and "exit 5" in none
    assert "[3ranks]" in ranks and "[8ranks]" in ranks and "[2ranks]" not in ranks
    assert " passed" in eight and "failed" not in eight


def test_run_refuses_a_backend_whose_package_is_missing(monkeypatch):
    found = Registry(plugins=registry().plugins)
    needs = {"requires": ("no_such_package",), "install_hint": "pip install no-such-package"}
    found.register(replace(registry().expert("torch"), name="needy", **needs))
    monkeypatch.setattr(runner, "registry", lambda: found)
    with pytest.raises(Unsupported, match="'needy' cannot be checked: no_such_package is not"):
        runner.run("needy")


def test_run_of_an_unknown_name():
    with pytest.raises(ValueError, match="no experts backend named 'nonesuch'"):
        run("nonesuch")


def test_pytest_is_optional():
    code = """
import sys, moekit
assert "pytest" not in sys.modules and "_pytest" not in sys.modules
sys.modules["pytest"] = None
try:
    import moekit.testing
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'moekit[testing]'" in done.stdout, done.stdout + done.stderr


COLLECTED = """
from dataclasses import replace
from moekit import Registry, registry
from moekit.testing import ExpertsConformance

spec = registry().expert("reference")
backends = Registry(plugins=registry().plugins)
backends.register(replace(spec, name="on_gpu", devices=("cuda==9.0",)))
backends.register(replace(spec, name="interpreted", requires=("triton",)))

class TestOnGpu(ExpertsConformance):
    backend, backends, device = "on_gpu", backends, "cpu"

    def test_of_its_own(self):
        pass

class TestInterpreted(ExpertsConformance):
    backend, backends, device = "interpreted", backends, "cpu"
"""


def test_what_is_collected(pytester):
    """One skip where the device is missing, and a mark where an interpreter repeats a path."""
    pytester.makepyfile(test_acme=COLLECTED)
    items = []

    class Seen:
        def pytest_collection_finish(self, session):
            kit_full.mark(session.items)
            items.extend(session.items)

    arguments = ("--collect-only", "-qq", "--strict-markers", "-o", "markers=full")
    pytester.inline_run(*arguments, plugins=[Seen()])

    def functions(tests):
        return {name.partition("[")[0] for name in tests}

    on_gpu = [item for item in items if item.cls.__name__ == "TestOnGpu"]
    assert {item.name for item in on_gpu} == {*base.WITHOUT_DEVICE, "test_of_its_own"}
    with pytest.raises(pytest.skip.Exception, match="on_gpu runs on cuda==9.0, not on cpu"):
        on_gpu[0].cls().test_backend_runs_here()
    interpreted = [item for item in items if item not in on_gpu]
    full = {item.name for item in interpreted if item.get_closest_marker("full")}
    rest = {item.name for item in interpreted} - full
    assert {"test_scheme[int4_w4a16_g64]", "test_routing[hot]"} <= full
    assert {"test_scheme[int4_w4a16_g32]", "test_routing[masked]", "test_threads"} <= rest
    # The first class of a folder has those that need no device.
    for_first = base.WITHOUT_DEVICE - set(kit_full._OF_EACH_CLASS)
    assert functions(full) - functions(rest) == {"test_many_experts", *for_first}


@pytest.mark.parametrize("kit", ["ExpertsConformance", "DispatcherConformance"])
def test_a_backend_that_is_not_installed_is_named_in_one_line(pytester, kit):
    pytester.makepyfile(
        f"from moekit.testing import {kit}\nclass TestAcme({kit}):\n    backend = 'acme'"
    )
    result = pytester.runpytest_inprocess("-q")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["TestAcme: no * named 'acme'; there are: *install the package*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_known_paths_name_tests_of_the_kit():
    """A renamed test or parameter must not leave its cases unmarked."""
    kits = ExpertsConformance, DispatcherConformance, GradientConformance, AdapterConformance
    assert all(any(hasattr(kit, name) for kit in kits) for name in kit_full._OF_ADAPTERS)
    for name, kind in (*kit_full._KIND_OF_CASE.items(), *kit_full._KIND_INTERPRETED.items()):
        wanted = inspect.signature(kind).parameters.values()
        named = {p.name for p in wanted if p.kind is not p.VAR_KEYWORD}
        tests = [getattr(kit, name) for kit in kits if hasattr(kit, name)]
        assert any(named <= set(inspect.signature(test).parameters) for test in tests), name
