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

from vllm_engine import ANSWER

_TIMEOUT = 900  # seconds for an engine to start and answer
# The largest difference of a log probability. bf16 sums of another order differ by 2 ** -8 a term.
LIMIT = {"float32": 2e-4, "bfloat16": 0.15}
ONE_PROCESS = {"distributed_executor_backend": "uni"}


class Engines:
    """A process that runs engines.

    Args:
        folder: An empty folder, for a plugin of vLLM.
        environment: More variables.
    """

    def __init__(self, folder: Path, **environment: object) -> None:
        _hide_amx(folder)
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
            more: "engine" has arguments of vLLM's LLM, and "prompts" other prompts. "load" names a
                checkpoint whose experts are then written into the model while it serves
                ("loaded"), and "reload" one for vLLM's ``reload_weights`` ("reloaded").
                "adapters" names the folder of each prompt's adapter, "" for none ("adapted").

        Returns:
            For each of these, the tokens and log probabilities of every prompt, and its experts
            (T, layers, K) if the engine returns them; also moekit's lines of the log ("log"), and
            everything that was printed ("text").
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
            assert abs(logprob - found) <= limit, (logprob, found, token)
            compared += 1
            if token != other:
                assert dtype != "float32", "greedy tokens differ in fp32"
                break
    assert compared >= len(stock) * 3


def _hide_amx(folder: Path) -> None:
    """Install a plugin that hides AMX from vLLM in all of its processes; PYTHONPATH names it.

    With AMX, vLLM has other kernels: for MLA in bf16 only, and for quantized experts.
    """
    hide = "torch.cpu._is_amx_tile_supported = lambda: False"
    (folder / "without_amx.py").write_text(f"def register():\n    import torch\n    {hide}\n")
    info = folder / "without_amx-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: without_amx\nVersion: 1.0\n")
    entry = "[vllm.general_plugins]\nwithout_amx = without_amx:register\n"
    (info / "entry_points.txt").write_text(entry)
