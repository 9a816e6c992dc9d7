"""Mark tests of this folder as full where others show the same on the CPU, and order mutants."""

from __future__ import annotations

import re

import pytest

_REPEATS = re.compile(
    "|".join(
        (
            # `torch` also computes these, and `reference` computes each row by itself.
            r"TestReference::test_batch_invariant_(tokens|scheme|neighbours)",
            # It computes as the oracle does: two schemes show its path.
            r"TestReference::test_cases\[(none|fp8_(tensor|channel|w8)|int|mxfp|nvfp4_w4a16)",
            # `torch` dequantizes all weights in one place, and quantizes all tokens in another:
            # one scheme for each number of bits, group and kind of activation shows both.
            r"TestTorch::test_cases\[(fp8_tensor_static|fp8_w8a16|int8_w8a16|int4_w4a16_(channel|g32_)"
            r"|int4_w4a8|mxfp4_w4a8|mxfp8|nvfp4_w)",
            r"TestTorch::test_batch_invariant_scheme\[\w+_(g64|g128|act_order|channel|static|zp)",
            # TestLocal runs as many calls.
            r"TestBatchedReference::test_long_run_of_one_shape",
            # The path of another scheme's tokens.
            r"Test(Local|BatchedReference)::test_quantized_tokens\[\w+-"
            r"(fp8_tensor_static|int8_channel_token|int4_w4a8_g128|mxfp4_w4a8|nvfp4)\]",
        )
    )  # fmt: skip
)


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Also mark the mutants of a right class that a test kills, but for the first.

    A process runs the right class once for all of them, so those of one test are neighbours.
    """
    mutants, places, seen = [], [], set()
    for place, item in enumerate(items):
        if "/kit/" not in item.nodeid:
            continue
        mutant = getattr(item, "callspec", None) and item.callspec.params.get("mutant")
        if hasattr(mutant, "kit_test"):
            key = mutant.right.__name__, mutant.test
            repeats = key in seen
            seen.add(key)
            mutants.append(((*key, str(mutant.args)), item))
            places.append(place)
        else:
            repeats = _REPEATS.search(item.nodeid)
        if repeats:
            item.add_marker("full")
    for place, (_, item) in zip(places, sorted(mutants, key=lambda each: each[0]), strict=True):
        items[place] = item
