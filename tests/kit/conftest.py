"""Mark the kit's longest tests of this folder as full, where others show the same on the CPU."""

from __future__ import annotations

import re

import pytest

_REPEATS = re.compile(
    "|".join(
        (
            # `torch` also computes these, and `reference` computes each row by itself.
            r"TestReference::test_batch_invariant_tokens\[(bfloat16|float16)\]",
            r"TestReference::test_batch_invariant_scheme\[\w*(g64|g128|act_order|channel)",
            # It computes as the oracle does: two schemes show its path.
            r"TestReference::test_cases\[(none|fp8_(tensor|channel|w8)|int|mxfp|nvfp4_w4a16)",
            # TestLocal runs as many calls.
            r"TestBatchedReference::test_long_run_of_one_shape",
            # The path of another scheme's tokens.
            r"Test(Local|BatchedReference)::test_quantized_tokens\[\w+-"
            r"(fp8_tensor_static|int8_channel_token|int4_w4a8_g128|mxfp4_w4a8|nvfp4)\]",
            # Other limits that `test_many_assignments` exceeds.
            r"\[(AssignmentsUnsigned16Bit|TokensUnsigned16Bit|Assignments16Bit|CapacityFactor)-",
        )
    )  # fmt: skip
)


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/kit/" in item.nodeid and _REPEATS.search(item.nodeid):
            item.add_marker("full")
