"""Two data parallel engines generate what one engine does. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from vllm_engine import PROMPTS  # noqa: E402
from vllm_engines import Engines, assert_same  # noqa: E402

RANKS = 2


def test_ranks_with_their_own_tokens(saved, engines, tmp_path) -> None:
    """A dispatcher of moekit moves the tokens of two ranks that hold whole experts.

    The first rank has two prompts and the second one, so their numbers of tokens differ, and the
    second is done first. vLLM's build for CPUs has no collectives that gather tokens.
    """
    pytest.importorskip("moekit_naive")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = dict(VLLM_DP_SIZE=RANKS, VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=port)
    common |= dict(VLLM_ENABLE_V1_MULTIPROCESSING=1, OMP_NUM_THREADS=1)
    common |= dict(MOEKIT_DISPATCHER="naive")
    spread = {"enable_expert_parallel": True, "distributed_executor_backend": None}
    model = saved("qwen3_moe")

    def engine(rank: int) -> dict:
        folder = tmp_path / str(rank)
        folder.mkdir()
        own = dict(VLLM_DP_RANK=rank, VLLM_DP_RANK_LOCAL=rank)
        with Engines(folder, **common, **own) as alone:
            return alone(model, "require", engine=spread, prompts=PROMPTS[rank::RANKS])

    with ThreadPoolExecutor(RANKS) as pool:
        ours = list(pool.map(engine, range(RANKS)))
    stock = engines(model, "off")["first"]
    for rank, found in enumerate(ours):
        assert_same(stock[rank::RANKS], found["first"])
        assert f", ep {RANKS}, dp {RANKS} on cpu: naive + torch" in found["text"]
