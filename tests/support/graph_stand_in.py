"""A stand-in for CUDA graphs, which captures and replays on the CPU, and a graphed kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from moekit import ModularKernel, PackedWeights, Routing
from moekit.runtime import graphs


class Device:
    """Captures by calling a function, replays by calling it again, and records both."""

    def __init__(self) -> None:
        self.captures: list[int] = []
        self.replays = 0
        self.capturing = False
        self.others_capture = False
        self.broken = False

    def capture(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], None], Tensor]:
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures.append(len(inputs[0]))
        function = getattr(function, "uncounted", function)
        out = function(*inputs)

        def replay() -> None:
            self.replays += 1
            function(*inputs, out=out)

        return replay, out


def graphed_kernel(
    kernel: ModularKernel, packed: PackedWeights, max_tokens: int = 16
) -> Callable[[Tensor, Routing], Tensor]:
    """Return the kernel with packed weights as `Graphed`: x (T, H), routing -> (T, H)."""

    def call(x: Tensor, w: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return kernel(x, packed, Routing(w, ids), out=out)

    graphed = graphs.Graphed(call, max_tokens)
    return lambda x, routing: graphed(x, routing.topk_weights, routing.topk_ids)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose graphs `moekit.runtime.graphs` uses."""
    made = Device()
    monkeypatch.setattr(graphs, "capture", made.capture)
    monkeypatch.setattr(graphs, "follow", lambda *_: None if made.others_capture else "stream")
    monkeypatch.setattr(graphs, "is_capturing", lambda device: made.capturing)
    monkeypatch.setattr(graphs, "unsupported", lambda kernel: [])
    return made
