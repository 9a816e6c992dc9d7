"""4-bit weights: layout, products, packings of checkpoints, and unsupported problems."""

import pytest
import torch
from moekit_triton import heuristics, packing
from moekit_triton.kernels import packed
from moekit_triton.kernels.tiles import CHUNK, GemmTile
from moekit_triton.plans import Batched, Direct, Gathered
from triton_checks import choose_plan, use_plan

import moekit
from moekit.errors import Unsupported
from moekit.problem import quant
from moekit.runtime.workspace import Workspace
from moekit.testing import assert_close
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case

FORMATS = [("local", "triton"), ("batched_reference", "triton_batched")]


def problem_of(device: torch.device, scheme: str, **changes) -> moekit.MoEProblem:
    # no multiple of a chunk or a tile; one group of 128 and a part of another
    sizes = dict(num_experts=3, top_k=2, hidden_size=168, intermediate_size=42)
    return moekit.MoEProblem(**{**sizes, "quant": scheme, "device": device, **changes})


def run(problem, dispatcher, experts, weights=None, tokens=7, kind="rows"):
    """Return (output, oracle's output) of a random call."""
    case = make_case(problem, tokens, kind, weights=weights)
    kernel = moekit.compose(problem, dispatcher, experts)
    return kernel(case.x, kernel.pack(case.weights), case.routing), case.reference()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scheme", ["int4_w4a16_g64_zp", "mxfp4_w4a16"])
def test_narrow_sizes(device, scheme, format):
    problem = problem_of(device, scheme, hidden_size=6, intermediate_size=2)
    assert_close(*run(problem, *format), problem)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g64_zp", "int4_w4a16_channel"])
def test_programs_share_k(device, scheme, monkeypatch):
    """Four programs share three chunks, so the last has none. Biases are added once."""
    sizes = dict(hidden_size=40, intermediate_size=300, num_experts=4)
    problem = problem_of(device, scheme, has_bias=True, **sizes)
    alone, want = run(problem, *FORMATS[0], tokens=2, kind="random")
    monkeypatch.setattr(heuristics, "_splits", lambda problem, count: 4)
    shared, _ = run(problem, *FORMATS[0], tokens=2, kind="random")
    assert_close(shared, want, problem)
    assert not torch.equal(alone, shared)


def test_few_assignments_share_k(monkeypatch):
    monkeypatch.setattr(heuristics, "INTERPRETED", False)
    sizes = dict(num_experts=8, hidden_size=4096, intermediate_size=14336)
    problem = problem_of("sm90", "int4_w4a16_g128", **sizes)
    plan = choose_plan(problem, 1, 2)
    assert type(plan) is Direct and plan.block_m == 8 and plan.splits > 1
    assert choose_plan(problem, 64, 2).splits == 1
    assert choose_plan(problem, 1, 2, batched=True).splits == 1
    for rows in range(1, 40):  # workspace for more rows serves fewer
        splits = choose_plan(problem, rows, 2).splits
        assert 2 * rows * splits <= max(2 * rows, heuristics._most_addends(problem, 2 * rows))
        assert heuristics._most_addends(problem, 2 * rows) <= heuristics._most_addends(problem, 80)


def execute(ptx: str, dtype: torch.dtype, inputs: dict[str, int]) -> dict[str, int]:
    """Execute the PTX instructions that `packed` uses, on 32-bit registers."""
    registers = dict(inputs)

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 16 if "x" in text else 10)

    def pair(bits: int) -> torch.Tensor:
        signed = bits - (bits >> 31 << 32)
        return torch.tensor([signed], dtype=torch.int32).view(dtype).double()

    for line in ptx[ptx.index("\n") : ptx.rindex("}")].split(";")[:-1]:
        name, *operands = line.replace(",", " ").split()
        target, values = operands[0], [value(o) for o in operands[1:]]
        if name == "mov.b32":
            result = values[0]
        elif name in ("shr.u32", "shl.b32"):
            result = values[0] >> values[1] if name == "shr.u32" else values[0] << values[1]
        elif name == "and.b32":
            result = values[0] & values[1]
        elif name == "lop3.b32":
            assert values[3] == 0xEA  # the table of (a & b) | c
            result = values[0] & values[1] | values[2]
        else:
            assert name == f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}"
            a, b, c = map(pair, values)
            result = int((a * b + c).to(dtype).view(torch.int32)) & 0xFFFFFFFF
        registers[target] = result & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_instructions(dtype):
    """Check the PTX, which only a GPU runs: every code in every position, with every zero."""
    bf16 = dtype == torch.bfloat16
    int4 = packed._INT4_BF16 if bf16 else packed._INT4_FP16
    e2m1 = packed._E2M1_BF16 if bf16 else packed._E2M1_FP16
    table = [*quant.E2M1, *(-v for v in quant.E2M1)]
    offset = packing._BIAS[dtype]
    for seed in range(16):
        columns = (
            [(5 * i + seed) % 16 for i in range(4)],
            [(3 * i + 7 * seed) % 16 for i in range(4)],
        )
        word = sum(v << 4 * i + 16 * half for half in (0, 1) for i, v in enumerate(columns[half]))
        zeros = [(seed + 3 * q) % 16 for q in range(4)]
        twice = [(offset + z) * 0x10001 for z in zeros for _ in (0, 1)]
        inputs = {"$4": word, **{f"${5 + i}": bits for i, bits in enumerate(twice)}}
        for ptx, wanted in (
            (int4.value, lambda v, q, zeros=zeros: v - zeros[q]),
            (e2m1.value, lambda v, q: table[v]),
        ):
            registers = execute(ptx, dtype, inputs)
            for q in range(4):
                bits = registers[f"${q}"]
                got = torch.tensor([bits - (bits >> 31 << 32)], dtype=torch.int32).view(dtype)
                assert got.tolist() == [wanted(half[q], q) for half in columns]


def test_act_order_is_refused_before_packing():
    problem = problem_of("sm90", "int4_w4a16_g64_zp_act_order")
    explanation = moekit.explain(problem)
    assert "triton" not in {each.experts for each in explanation.combinations}
    said = "quant scheme int4_w4a16_g64_zp_act_order is not supported"
    for dispatcher, experts in FORMATS:
        (reason,) = explanation.rejected_experts[experts]
        assert said in reason
        with pytest.raises(Unsupported, match=said):
            moekit.compose(problem, dispatcher, experts)


def test_odd_sizes_and_fp32_are_refused():
    spec = moekit.registry().expert("triton")
    problem = problem_of("sm90", "mxfp4_w4a16", hidden_size=33, intermediate_size=31)
    reasons = spec.unsupported(problem)
    assert len(reasons) == 2 and "hidden_size=33 is odd" in reasons[0]
    (reason,) = spec.unsupported(problem_of("sm90", "int4_w4a16_g64", dtype=torch.float32))
    assert "not float32" in reason
    assert spec.unsupported(problem_of("sm80", "int4_w4a16_g32_zp")) == []


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_zp", "int4_w4a16_channel", "mxfp4_w4a16"])
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("kind", [Gathered, Direct, Batched])
def test_tiles(device, monkeypatch, scheme, block_n, kind):
    """Whole calls are right with every tile, also with the narrowest."""
    problem = problem_of(device, scheme)
    tile = GemmTile(16, block_n, CHUNK, group_m=2, num_warps=block_n // 16)
    use_plan(monkeypatch, kind(tile, tile, fused=True))
    kernel = moekit.compose(problem, *FORMATS[kind is Batched], workspace=Workspace())
    check_call(kernel, make_case(problem, 7, "masked"))
