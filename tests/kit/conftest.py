"""Mark tests of this folder as full where others show the same on the CPU."""

from __future__ import annotations

import re

import pytest

_REPEATS = re.compile(
    "|".join(
        (
            # `torch` also computes these, and `reference` computes each row by itself.
            r"TestReference::test_(batch_invariant_(tokens|scheme|neighbours)|num_tokens|input_form)",
            # It computes as the oracle does: two schemes show its path.
            r"TestReference::test_cases\[(none|fp8_(tensor|channel|w8)|int|mxfp|nvfp4_w4a16)",
            # `torch` dequantizes all weights in one place, and quantizes all tokens in another:
            # one scheme for each number of bits, group and kind of activation shows both.
            r"TestTorch::test_cases\[(fp8_tensor|fp8_channel|fp8_w8a16|int8_w8a16|int4_w4a16_(channel|g32_)"
            r"|int4_w4a8|mxfp4_w4a8|mxfp8|nvfp4_w)",
            r"TestTorch::test_batch_invariant_scheme\[\w+_(g\d+|act_order|channel|static|tensor|token|zp)",
            r"TestTorch::test_batch_invariant_tokens\[float16",
            # TestLocal runs as many calls.
            r"TestBatchedReference::test_long_run_of_one_shape",
            # The path of another scheme's tokens.
            r"Test(Local|BatchedReference)::test_quantized_tokens\[\w+-"
            r"(fp8_tensor_static|int8_channel_token|int4_w4a8_g128|mxfp4_w4a8|nvfp4)\]",
        )
    )  # fmt: skip
)

_LONG = ("test_layers_in_turn", "test_long_run_of_one_shape", "test_memory_is_stated")


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Also mark all but one of the mutants that one test of the kit kills."""
    seen = set()
    for item in items:
        mutant = getattr(item, "callspec", None) and item.callspec.params.get("mutant")
        if hasattr(mutant, "kit_test"):
            repeats = mutant.test in seen or mutant.test in _LONG
            seen.add(mutant.test)
        else:
            repeats = "/kit/" in item.nodeid and _REPEATS.search(item.nodeid)
        if repeats:
            item.add_marker("full")
