"""Choose the default cases of the stand-ins' kits, which are slow in Triton's interpreter."""

from __future__ import annotations

import pytest

_QUICK = {
    "TestHighThroughput": ("test_two_calls_in_flight[2", "test_bad_input_on_one_rank[2ranks-ids"),
    "TestHighThroughputPush": ("test_slices_and_shared_tokens[ep1-tp2-dp2",),
    "TestLowLatency": ("test_two_calls_in_flight[2", "test_failure_after_dispatch[2"),
    "TestLowLatencyPush": ("test_groups_at_once", "test_tokens_per_rank[2ranks-uneven"),
}


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_nvlink_standin.py" and isinstance(item, pytest.Function):
            quick = _QUICK.get(item.cls.__name__, ()) if item.cls else item.name
            if not item.name.startswith(quick):
                item.add_marker("full")
