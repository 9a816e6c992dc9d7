"""Launch plans that can be seen in `explain` and the log, and pinned by MOEKIT_TRITON_PLAN."""

from __future__ import annotations

import logging

import pytest
import torch
from moekit_triton import tables
from moekit_triton.plans import KINDS, Gathered, plan_from_text
from triton_checks import check_block, choose_plan
from triton_checks import compiled as choose_as_compiled

import moekit
from moekit import DeviceSpec, MoEProblem
from moekit.errors import InvalidInput

H200 = DeviceSpec("cuda", (9, 0), "NVIDIA H200")
GATHERED = "gathered: 16x32x64 w4 s3 | 16x64x64 w4 s3, fused"
DOTS = "dot_products: 2 rows w4 | 4 rows w8"
SPECIALIZED = "copied: specialized halves | specialized"
SORTED = "copied: 128x128x64 w8 s4 halves | 128x256x64 w8 s4"


def problem(**changes) -> MoEProblem:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
    return MoEProblem(**{**sizes, "device": H200, **changes})


@pytest.fixture
def compiled(monkeypatch) -> None:
    choose_as_compiled(monkeypatch, triton_version="3.6.0")


def pinned(monkeypatch, text: str, p: MoEProblem, *, batched: bool = False):
    monkeypatch.setenv("MOEKIT_TRITON_PLAN", text)
    return choose_plan(p, 64, p.top_k, batched=batched)


def test_a_plan_is_read_from_its_own_words(compiled) -> None:
    plans = [plan for file in sorted(tables.FILES.shipped.glob("*.json"))
             for entry in tables.FILES.read(file) for _, plan in entry.plans]  # fmt: skip
    plans += [
        choose_plan(problem(quant=quant), rows, 2, batched=batched)
        for quant in ("none", "fp8_block", "int4_w4a16_g128") for rows in (1, 8, 64, 4096)
        for batched in (False, True)
    ]  # fmt: skip
    assert {plan.kind for plan in plans} == set(KINDS) and len(plans) > 200
    for plan in plans:
        assert plan_from_text(plan.describe()) == plan


@pytest.mark.parametrize(
    "text",
    ["fast", "gathered", "gathered: 16x32x64", "gathered: 16x32 | 16x32", GATHERED + ", quick",
     GATHERED.replace("tma", "tna").replace("s3", "x3"), GATHERED.replace("32x64", "33x64"),
     GATHERED.replace("16x64x64", "32x64x64"), "dot_products: 3 rows w4 | 4 rows w8",
     "dot_products: 2 | 4 rows w8", GATHERED.replace("s3,", "s3 persistent,"),
     SORTED.replace("copied", "ahead"), SPECIALIZED + ", fused"],
)  # fmt: skip
def test_a_wrong_text_is_refused_with_the_kinds(monkeypatch, text) -> None:
    with pytest.raises(InvalidInput) as raised:
        pinned(monkeypatch, text, problem())
    said = str(raised.value)
    assert said.startswith(f"MOEKIT_TRITON_PLAN={text!r}: ") and ", ".join(KINDS) in said


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (DOTS, {"quant": "int4_w4a16_g128"}, "do not read 4-bit weights"),
        (DOTS, {"batch_invariant": True}, "plans of kind gathered or batched"),
        (GATHERED.replace("gathered", "batched"), {}, "triton takes the other kinds"),
        (GATHERED.replace("gathered", "direct").replace("16x", "32x"), {}, "8 or 16 rows"),
        (GATHERED, {"quant": "int8_channel_token"}, "cannot be quantized in tiles of 32 columns"),
        (GATHERED, {"quant": "int4_w4a16_g128"}, "128 columns of K"),
        (GATHERED.replace("x64 w4", "x256 w4"), {"quant": "fp8_block"}, "a step of K (256)"),
        (GATHERED.replace("16x", "8x"), {}, "8 with 4-bit weights alone"),
        (GATHERED.replace("s3 |", "s3 tma |"), {"device": "sm80"}, "tma needs Hopper"),
        (GATHERED.replace("s3 |", "s3 halves |"), {}, "halves need tiles of 128 rows"),
        (GATHERED + ", k2", {}, "programs share K"),
        (SPECIALIZED, {"has_bias": True}, "specialized tiles need Hopper, Gluon"),
        ("copied: tokens 128 | tokens 128", {"quant": "fp8_block"}, "with specialized tiles"),
        (SORTED, {"quant": "fp8_block"}, "with specialized tiles"),
        (SORTED.replace("halves", "persistent halves"), {}, "have no halves"),
        (SPECIALIZED, {"dtype": torch.float32}, "16-bit activations"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(
    compiled, monkeypatch, text, changes, reason
) -> None:
    with pytest.raises(InvalidInput, match="does not fit this problem") as raised:
        pinned(monkeypatch, text, problem(**changes))
    assert reason in str(raised.value)


def test_plans_that_fit_serve_all_calls(compiled, monkeypatch) -> None:
    for text in (DOTS, GATHERED, SPECIALIZED):
        plan = pinned(monkeypatch, text, problem())
        assert plan.describe() == text
        assert choose_plan(problem(), 100000, 2) == choose_plan(problem(), 1, 2) == plan
    batched = pinned(monkeypatch, GATHERED.replace("gathered", "batched"), problem(), batched=True)
    assert batched.kind == "batched"
    assert type(pinned(monkeypatch, GATHERED, problem(batch_invariant=True))) is Gathered


@pytest.mark.parametrize(
    "text",
    ["dot_products: 16 rows w4 | 64 rows w8", GATHERED, GATHERED.replace("gathered", "direct")],
)
def test_calls_run_the_pinned_plan_and_log_it_once(device, monkeypatch, caplog, text) -> None:
    monkeypatch.setenv("MOEKIT_TRITON_PLAN", text)
    p = problem(hidden_size=80, intermediate_size=48, device=device)
    with caplog.at_level(logging.DEBUG, "moekit"):
        check_block(p, 3)
    said = [message for message in caplog.messages if message.startswith("moekit: triton, ")]
    assert said == [
        "moekit: triton, 8 experts, H=80, I=48, bfloat16 none, 3 rows of 2 ids: "
        f"{text} (plan of MOEKIT_TRITON_PLAN)"
    ]


def test_explain_says_which_plans_run(monkeypatch) -> None:
    p = problem(max_num_tokens=4096)
    spec = moekit.registry().expert("triton")
    said = spec.description(p)
    assert said.startswith("rules") and "from T = 1 dot_products: " in said
    assert said.index("dot_products") < said.index("gathered")
    assert "from C = 1 batched: " in moekit.registry().expert("triton_batched").description(p)
    monkeypatch.setenv("MOEKIT_TRITON_PLAN", GATHERED)
    assert spec.description(p) == f"plan of MOEKIT_TRITON_PLAN: from T = 1 {GATHERED}"
    monkeypatch.setenv("MOEKIT_TRITON_PLAN", "fast")
    assert "MOEKIT_TRITON_PLAN='fast'" in spec.description(p)
