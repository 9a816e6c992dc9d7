"""Padded sizes: moekit's zeros for backends whose kernels need multiples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_catches import suite
from right_experts import Batched, Plain, Unreduced
from torch import Tensor

import moekit
from moekit import ExpertsSpec, MoEProblem, ParallelConfig, Registry, Workspace, registry
from moekit.backends import adapters, padding
from moekit.backends.adapters import PaddedExperts
from moekit.backends.padding import pad_weights
from moekit.errors import Unsupported
from moekit.problem import ActivationFormat
from moekit.problem.codes import Codes
from moekit.problem.quant import SCHEMES
from moekit.testing import assert_close
from moekit.testing.calls import check_call
from moekit.testing.cases import Case, make_case, random_weights

OF = (64, 32)  # the multiples of H and I


def of_both(problem: MoEProblem) -> tuple[int, int]:
    """Return the multiples. The kit draws the cases of an equal spec once."""
    return OF


class _OnlyMultiples:
    """Refuses other sizes, as kernels without edges do."""

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        sizes = problem.hidden_size, problem.local_intermediate_size
        of = spec.multiples(problem)
        assert all(size % n == 0 for size, n in zip(sizes, of, strict=True)), (sizes, of)
        super().__init__(spec, problem)


class Picky(_OnlyMultiples, Plain):
    pass


class PickyUnreduced(_OnlyMultiples, Unreduced):
    pass


class PickyBatched(_OnlyMultiples, Batched):
    pass


def backends(made: type = Picky, of: Any = of_both, **changes: Any) -> Registry:
    origin = registry().expert(getattr(made, "BASE", "torch"))
    spec = replace(
        origin, name="picky", target=f"{__name__}:{made.__name__}", multiples=of, describe=None,
        **changes,
    )  # fmt: skip
    found = Registry(plugins=registry().plugins)
    found.register(spec)
    return found


def problem(H: int = 100, I: int = 72, **changes: Any) -> MoEProblem:
    changes.setdefault("dtype", torch.float32)
    return MoEProblem(
        num_experts=4, top_k=2, hidden_size=H, intermediate_size=I, device="cpu", **changes
    )


def made_sizes(p: MoEProblem, of: tuple[int, int] = OF) -> MoEProblem:
    return backends(of=lambda problem: of).expert("picky").padded(p)


# -- weights -------------------------------------------------------------------------------------


def grown(matrix: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(matrix, (0, columns - matrix.shape[2], 0, rows - matrix.shape[1]))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("H", "I"), [(100, 128), (128, 40), (150, 256)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_padded_weights_are_zeros_around_the_same_numbers(
    scheme: str, H: int, I: int, gated: bool
) -> None:
    name = "silu" if gated else "silu_no_mul"
    p = problem(H, I, quant=scheme, activation=name, has_bias=True)
    spec = backends(of=lambda problem: (64, 48)).expert("picky")
    made = spec.padded(p)
    weights = random_weights(p).canonical(p)
    bigger = pad_weights(weights, p, made)
    bigger.check(made)
    was, now = weights.dequantize(p.quant), bigger.dequantize(made.quant)
    Hp, Ip = made.hidden_size, made.local_intermediate_size
    assert (Hp, Ip % 48) == (-(-H // 64) * 64, 0) and Ip >= I
    halves = [grown(half, Ip, Hp) for half in was.w13.chunk(1 + gated, dim=1)]
    assert torch.equal(now.w13, torch.cat(halves, dim=1))
    assert torch.equal(now.w2, grown(was.w2, Hp, Ip))
    biases = [F.pad(half, (0, Ip - half.shape[1])) for half in was.w13_bias.chunk(1 + gated, dim=1)]
    assert torch.equal(now.w13_bias, torch.cat(biases, dim=1))
    assert torch.equal(now.w2_bias, F.pad(was.w2_bias, (0, Hp - H)))


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_tensor", "int4_w4a16_g32_zp"])
def test_weights_are_padded_under_autocast(scheme: str) -> None:
    """torch.cat has no fp8 there."""
    p = problem(100, 128, quant=scheme, has_bias=True)
    made = made_sizes(p, (64, 384))
    weights = random_weights(p).canonical(p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pad_weights(weights, p, made).tensors()
    for name, wanted in pad_weights(weights, p, made).tensors().items():
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name].view(torch.uint8), wanted.view(torch.uint8)), name


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [Picky, PickyUnreduced, PickyBatched])
@pytest.mark.parametrize("dispatcher", ["local", "batched_reference"])
@pytest.mark.parametrize(("H", "I"), [(100, 64), (128, 72), (100, 72)])
@pytest.mark.parametrize("scheme", ["none", "fp8_channel_token", "int4_w4a16_g32_zp", "nvfp4"])
def test_results(made: type, dispatcher: str, H: int, I: int, scheme: str) -> None:
    """Under poison: memory that nobody wrote, and rows beyond an expert's, hold NaN."""
    p = problem(H, I, quant=scheme, has_bias=True)
    batched = made is PickyBatched
    changes: dict[str, Any] = {"takes_unquantized": scheme not in ("fp8_channel_token", "nvfp4")}
    if batched:
        changes |= dict(format=ActivationFormat.BATCHED, reduces=False)
    kernel = moekit.compose(
        p, dispatcher, "picky", backends=backends(made, **changes), workspace=Workspace()
    )
    case = make_case(p, 17, "masked")
    assert_close(check_call(kernel, case), case.reference(), p)


def test_nothing_is_padded_where_sizes_fit() -> None:
    kernel = moekit.compose(problem(128, 64), None, "picky", backends=backends())
    assert type(kernel.experts).__name__ == "Picky"


def test_only_padded_tokens_are_copied() -> None:
    """Padding of I alone needs no scratch."""
    for H, copies in ((128, 0), (100, 3)):
        kernel = moekit.compose(problem(H, 72), None, "picky", backends=backends())
        assert isinstance(kernel.experts, PaddedExperts)
        inner = kernel.experts.inner.workspace(5)
        assert len(kernel.experts.workspace(5)) == len(inner) + copies


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_tensor_parallel_shares_are_padded(scheme: str) -> None:
    """I = 384 on two ranks: blocks stay whole (256 and 128 neurons), so 256 is padded to 320."""
    total = torch.zeros(())
    p = problem(100, 384, quant=scheme)
    full = make_case(p, 9)
    from moekit.testing import cases

    unquantized = cases.unquantized_weights(p)
    for rank in range(2):
        mine = p.replace(parallel=ParallelConfig(tp_size=2, tp_rank=rank))
        multiples = backends(of=lambda problem: (64, 320))
        kernel = moekit.compose(mine, "local", "picky", backends=multiples)
        weights = cases.tp_shard(unquantized, mine)
        total = total + kernel(full.x, kernel.pack(weights), full.routing)
    whole = Case(p, cases.quantized(unquantized, p), full.x, full.routing)
    assert_close(total, whole.reference(), p)


# -- selection -----------------------------------------------------------------------------------


def test_explain_says_what_is_padded() -> None:
    found = moekit.explain(
        problem(2880, 360), None, "picky", backends=backends(of=lambda p: (512, 64))
    )
    assert "picky: hidden size 2880 padded to 3072 and intermediate size 360 padded to 384" in str(
        found
    )


def test_the_check_sees_the_padded_problem() -> None:
    def check(p: MoEProblem) -> list[str]:
        return [f"H={p.hidden_size}"] if p.hidden_size != 128 else []

    spec = backends(check=check).expert("picky")
    assert spec.unsupported(problem(100)) == [] and spec.unsupported(problem(130)) == ["H=192"]


def test_experts_that_need_no_padding_are_preferred() -> None:
    made = backends(priority=40)
    made.register(replace(registry().expert("torch"), name="plain", multiples=None))
    assert moekit.explain(problem(128, 64), backends=made).chosen.experts == "picky"
    assert moekit.explain(problem(100, 64), backends=made).chosen.experts == "plain"


def test_blocks_are_whole_before_they_are_padded() -> None:
    p = problem(128, 200, quant="fp8_block")
    made = moekit.compose(p, None, "picky", backends=backends(of=lambda p: (1, 96)))
    assert (p.local_intermediate_size, made.experts.inner.problem.intermediate_size) == (256, 384)


@pytest.mark.parametrize(("H", "of"), [(2**24, (96, 1)), (64, (1, 4095))])
def test_sizes_too_large_to_be_padded_are_a_reason(H: int, of: tuple[int, int]) -> None:
    spec = backends(of=lambda p: of).expert("picky")
    (reason,) = spec.unsupported(problem(H, 2**24 if H == 64 else 64))
    assert f"must be multiples of {of[0]} and {of[1]}, and are too large to be padded" in reason


@pytest.mark.parametrize(
    "of", [lambda p: 64, lambda p: (64,), lambda p: (0, 1), lambda p: (64, 1.5), lambda p: 1 / 0]
)
def test_wrong_multiples_are_a_reason(of: Any) -> None:
    made = backends(of=of)
    with pytest.raises(Unsupported, match="its check failed: .*(multiples returned|division)"):
        moekit.compose(problem(), None, "picky", backends=made)


# -- the conformance kit -------------------------------------------------------------------------


def kit(made: type = Picky) -> Any:
    return suite(made, "torch", multiples=of_both, **made.DECLARED)


_FULL = ("none", "int4_w4a16_g32", "mxfp4_w4a16")


@pytest.mark.parametrize(
    "scheme",
    ["fp8_block", "int4_w4a16_g32_zp", *(pytest.param(s, marks=pytest.mark.full) for s in _FULL)],
)
def test_the_kit_passes(scheme: str) -> None:
    kit().test_cases(scheme)


def test_the_kit_tests_other_sizes_without_padding() -> None:
    p = kit()._problem()
    assert (p.hidden_size % OF[0], p.local_intermediate_size % OF[1]) == (0, 0)


def _not_cleared(x: Tensor, columns: int, memory: Tensor, value: float) -> Tensor:
    wide = memory.view(-1).view(x.dtype)[: x.numel() // x.shape[-1] * columns]
    wide = wide.view(*x.shape[:-1], columns)
    wide[..., : x.shape[-1]].copy_(x)
    return wide


class _FromTheEnd(PaddedExperts):
    """Cuts the padding off at the wrong end."""

    def apply(self, y: Tensor, tokens: Any, weights: Any, workspace: Any) -> None:
        wide = torch.empty(*y.shape[:-1], self._columns, dtype=y.dtype)
        whole = PaddedExperts(self.inner, self.inner.problem)
        x = F.pad(tokens.x, (0, self._columns - tokens.x.shape[-1]))
        whole.apply(wide, replace(tokens, x=x), weights, workspace[-1:])  # Plain has one
        y.copy_(wide[..., -y.shape[-1] :])


def _ones(tensor: Tensor, dim: int, size: int, value: float | None = None) -> Tensor:
    return _GROW(tensor, dim, size, 1.0 if value == 0.0 else value)


_GROW = padding._grow


@pytest.mark.parametrize(
    ("scheme", "module", "name", "wrong"),
    [
        ("none", adapters, "_wider", _not_cleared),
        ("none", adapters, "PaddedExperts", _FromTheEnd),
        ("none", padding, "_grow", _ones),
        ("int4_w4a16_g32", Codes, "zero_byte", 0),
    ],
)
def test_the_kit_catches_wrong_padding(
    scheme: str, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        kit().test_cases(scheme)
