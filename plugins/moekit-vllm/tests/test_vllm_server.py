"""vLLM's OpenAI server with moekit answers concurrent clients. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import vllm_models as models  # noqa: E402
from vllm_engine import TOKENS  # noqa: E402
from vllm_engines import LIMIT  # noqa: E402

CLIENTS, ROUNDS = 8, 3
_STARTS, _ANSWERS = 300, 120  # seconds


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _post(port: int, prompt: list[int]) -> dict:
    body = dict(model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, logprobs=1)
    body |= dict(ignore_eos=True, return_token_ids=True)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWERS) as answer:
        (choice,) = json.load(answer)["choices"]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def _wait(port: int, server: subprocess.Popen, log) -> None:
    until = time.monotonic() + _STARTS
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    pytest.fail(f"the server did not start in {_STARTS} s: {log.read_text()[-4000:]}")


def test_eight_clients(engines, tmp_path) -> None:
    model = models.save("qwen3_moe", tmp_path / "model")
    models.save_tokenizer(model)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(256) for _ in range(draw.randrange(1, 30))] for _ in range(CLIENTS * ROUNDS)
    ]
    port, log = _port(), tmp_path / "log"
    command = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model} "
    command += f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 "
    command += "--max-model-len 64 --max-num-seqs 8 --enforce-eager --no-enable-prefix-caching "
    command += "--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 67108864"
    environment = {**os.environ, "MOEKIT_VLLM": "require", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            command.split(), stdout=out, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _wait(port, server, log)
            with ThreadPoolExecutor(CLIENTS) as clients:
                answers = list(clients.map(lambda p: _post(port, p), prompts))
        finally:
            server.terminate()
            server.wait(60)
    assert "local + torch" in log.read_text()
    stock = engines(model, "off", prompts=prompts)["first"]
    for ours, theirs in zip(answers, stock, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
        assert max(abs(a - b) for a, b in pairs) <= LIMIT["float32"]
