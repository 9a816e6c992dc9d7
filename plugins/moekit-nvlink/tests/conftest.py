"""Choose the default cases of the stand-ins' kits, which are slow in Triton's interpreter."""

from __future__ import annotations

import pytest

_QUICK = {
    "TestHighThroughput": (
        "test_two_calls_in_flight[2",
        "test_slices_and_shared_tokens[ep1-tp2-dp2",
    ),
    "TestGradients": (
        "test_gradients[2ranks-last_first",
        "test_gradients[2ranks-ids_of_-1",
        "test_gradients_of_slices_and_shared_tokens[ep1-tp2-dp2",
    ),
    "TestLowLatency": (
        "test_two_calls_in_flight[2",
        "test_failure_after_dispatch[2",
        "test_tokens_per_rank[2ranks-uneven",
    ),
}
# Tests that the stand-ins cannot do.
_NEVER = {
    "test_long_run_of_one_shape": "260 calls take the interpreter longer than the kit waits",
    "test_groups_in_threads": "the interpreter runs one kernel of a process at a time",
}


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_nvlink_standin.py" and isinstance(item, pytest.Function):
            quick = _QUICK.get(item.cls.__name__, ()) if item.cls else item.name
            if not item.name.startswith(quick):
                item.add_marker("full")
            if reason := _NEVER.get(getattr(item, "originalname", item.name)):
                item.add_marker(pytest.mark.skip(reason=reason))
