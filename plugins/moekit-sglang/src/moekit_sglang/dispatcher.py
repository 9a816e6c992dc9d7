"""SGLang's side of a layer whose tokens moekit's dispatchers move."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from moekit_sglang import versions


def passing(stock: Callable[[], Any]) -> Any:
    """Return a dispatcher that passes this rank's tokens to the layer's quantization method.

    stock: Make SGLang's dispatcher, which a layer gets that stays with SGLang.
    """
    made = _passing()()
    made.stock = stock
    return made


@cache
def _passing() -> Any:
    base: Any = versions.dispatcher_class()

    class Passing(base):  # type: ignore[misc]  # SGLang declares no types here
        """A dispatcher that moves nothing: moekit's kernel moves the tokens and sums them."""

        stock: Callable[[], Any]

        def dispatch(self, hidden_states: Any, topk_output: Any) -> Any:
            """Return the rank's tokens (T, H) and their experts as they are."""
            return versions.dispatched(hidden_states, topk_output)

        def combine(self, combine_input: Any) -> Any:
            """Return the sums (T, H) that moekit's kernel has combined."""
            return combine_input.hidden_states

    return Passing
