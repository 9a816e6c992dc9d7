"""Custom operators, which are all that torch.compile sees of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moekit.errors import Unsupported

_DENSE = torch.contiguous_format


class Operators(NamedTuple):
    """Two operators of one function; torch.compile captures no CUDA graph of the second one."""

    plain: Callable[..., Tensor]
    without_graphs: Callable[..., Tensor]

    @classmethod
    def of(
        cls, name: str, run: Callable[..., Tensor], advice: str, schema: str | None = None
    ) -> Operators:
        """Make ``moekit::<name>`` and ``moekit::<name>_without_graphs``.

        Args:
            run: its first argument is x; the result has the shape and dtype of x, contiguous.
            advice: what to do where a gradient is asked for.
            schema: of the arguments; default: by the annotations of ``run``.
        """
        return cls(
            _made(name, run, advice, schema, ()),
            _made(f"{name}_without_graphs", run, advice, schema, (torch.Tag.cudagraph_unsafe,)),
        )


def _made(
    name: str,
    run: Callable[..., Tensor],
    advice: str,
    schema: str | None,
    tags: tuple[torch.Tag, ...],
) -> Callable[..., Tensor]:
    def no_backward(ctx: Any, grad: Tensor) -> Any:
        reason = "this call has no backward"
        raise Unsupported(f"{reason}: {advice}", [reason])

    operator = torch.library.custom_op(
        f"moekit::{name}", run, mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(lambda x, *_: torch.empty_like(x, memory_format=_DENSE))
    operator.register_autograd(no_backward)
    return operator
