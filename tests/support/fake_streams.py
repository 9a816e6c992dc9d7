"""Streams and graphs of a device, as torch.cuda offers them, which record their calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Streams:
    """A device module. ``log`` has the calls in their order, each with the current stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.captured: list[int] = []  # streams that a graph captures
        self.current = FakeStream(self, 0)

    def Stream(self, device: Any = None, stream_id: int | None = None) -> FakeStream:
        if stream_id is None:
            self.made += 1
            stream_id = self.made
        return FakeStream(self, stream_id)

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, side: FakeStream) -> Iterator[None]:
        before, self.current = self.current, side
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current.stream_id in self.captured

    def say(self, what: str) -> None:
        self.log.append(f"{self.current.stream_id}: {what}")

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=lambda **options: self.say(f"begin {options['pool']}"),
            capture_end=lambda: self.say("end"),
            replay=lambda: self.say("replay"),
        )


class FakeStream:
    def __init__(self, streams: Streams, stream_id: int) -> None:
        self.streams, self.stream_id = streams, stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.log.append(f"{self.stream_id} waits for {other.stream_id}")
