"""Ask vLLM's engines for completions, and compare them.

Starting a process and importing vLLM takes most of the time, so the engines of one process run one
after the other, and an answer is kept for the next test that asks the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import zip_longest
from pathlib import Path
from typing import Any

import vllm_plugins
import vllm_without_amx
from vllm_engine import ANSWER

_TIMEOUT = 900  # seconds for an engine to start and answer
# The largest difference of a log probability. bf16 sums of another order differ by 2 ** -8 a term.
LIMIT = {"float32": 2e-4, "bfloat16": 0.15}
ONE_PROCESS = {"distributed_executor_backend": "uni"}


class Engines:
    """A process that runs engines.

    Args:
        folder: An empty folder, for plugins of vLLM.
        plugins: Modules that vLLM loads as plugins in all of its processes.
        amx: vLLM uses AMX if the CPU has it. By default its kernels are the same on all CPUs.
        environment: More variables.
    """

    def __init__(
        self, folder: Path, *plugins: Any, amx: bool = False, **environment: object
    ) -> None:
        for plugin in (*plugins, *([] if amx else [vllm_without_amx])):
            vllm_plugins.install(plugin, folder)
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        defaults = dict(HF_HUB_OFFLINE=1, VLLM_LOGGING_LEVEL="INFO", PYTHONPATH=path)
        more = {name: str(value) for name, value in (defaults | environment).items()}
        self._environment = {**os.environ, **more}
        self._process: subprocess.Popen[str] | None = None
        self._answers: dict[str, dict[str, Any]] = {}

    def __call__(self, model: object, mode: str, **more: Any) -> dict[str, Any]:
        """Return what an engine generates: "first", and what else is asked for.

        Args:
            model: The folder.
            mode: A value of MOEKIT_VLLM.
            more: "engine" has arguments of vLLM's LLM, and "prompts" other prompts. "again" asks
                for the same completions once more, "load" names a checkpoint whose experts are
                then written into the model while it serves ("loaded"), and "reload" a checkpoint
                for vLLM's ``reload_weights`` ("reloaded").

        Returns:
            For each of these, the tokens and log probabilities of every prompt; also moekit's
            lines of the log ("log"), and everything that was printed ("text").
        """
        asked = {"model": str(model), "mode": mode, **more}
        asked["engine"] = ONE_PROCESS | more.get("engine", {})
        line = json.dumps(asked, sort_keys=True)
        if line not in self._answers:
            self._answers[line] = self._ask(line)
        return self._answers[line]

    def _ask(self, line: str) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_engine.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        text, watch = [], threading.Timer(_TIMEOUT, self._process.kill)
        watch.start()
        try:
            for said in self._process.stdout:
                if said.startswith(ANSWER):
                    break
                text.append(said)
            else:
                raise AssertionError(f"the engine's process ended: {''.join(text)[-6000:]}")
        finally:
            watch.cancel()
        answer: dict[str, Any] = json.loads(said.removeprefix(ANSWER))
        answer["text"] = "".join(text)
        if "error" in answer:
            self.close()  # the next engine needs a clean process
            raise AssertionError(f"{answer['error']}\n{answer['text'][-6000:]}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()  # which closes stdin
            self._process = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_same(stock: list, ours: list, dtype: str = "float32", limit: float = 0.0) -> None:
    """Compare completions until the first token that two nearly equal logits decide."""
    limit, compared = limit or LIMIT[dtype], 0
    assert len(stock) == len(ours)
    for a, b in zip_longest(stock, ours):
        for token, other, logprob, found in zip(
            a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
        ):
            assert abs(logprob - found) <= limit
            compared += 1
            if token != other:
                assert dtype != "float32", "greedy tokens differ in fp32"
                break
    assert compared >= len(stock) * 3


def distance(exact: list, found: list) -> float:
    """Return the RMS difference of log probabilities up to the first token that differs."""
    squares = []
    for a, b in zip(exact, found, strict=True):
        for token, other, logprob, near in zip(
            a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
        ):
            if token != other:
                break
            squares.append((logprob - near) ** 2)
    assert len(squares) >= 3 * len(exact)
    return float((sum(squares) / len(squares)) ** 0.5)
