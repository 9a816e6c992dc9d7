"""Two data parallel engines generate what one engine does. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import vllm_collectives  # noqa: E402
from vllm_engine import PROMPTS  # noqa: E402
from vllm_engines import Engines, assert_same  # noqa: E402

RANKS = 2


@pytest.mark.parametrize(
    ("name", "experts", "dispatcher"),
    [("qwen3_moe", "sliced", ""), ("gpt_oss", "whole", ""), ("qwen3_moe", "whole", "naive")],
)
def test_ranks_with_their_own_tokens(saved, engines, tmp_path, name, experts, dispatcher) -> None:
    """vLLM gathers the tokens of all ranks for each layer and scatters the sums, or moekit does.

    The first rank has two prompts and the second one, so their numbers of tokens differ, and the
    second is done first. Without vLLM's collectives only a dispatcher can move tokens.
    """
    if dispatcher:
        pytest.importorskip("moekit_naive")
    plugins = [] if dispatcher else [vllm_collectives]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = dict(VLLM_DP_SIZE=RANKS, VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=port)
    common |= dict(VLLM_ENABLE_V1_MULTIPROCESSING=1, OMP_NUM_THREADS=1)
    common |= dict(MOEKIT_DISPATCHER=dispatcher)
    spread = {"enable_expert_parallel": experts == "whole", "distributed_executor_backend": None}

    def engine(rank: int) -> dict:
        folder = tmp_path / str(rank)
        folder.mkdir()
        own = dict(VLLM_DP_RANK=rank, VLLM_DP_RANK_LOCAL=rank)
        with Engines(folder, *plugins, **common, **own) as alone:
            return alone(saved(name), "require", engine=spread, prompts=PROMPTS[rank::RANKS])

    saved(name)
    with ThreadPoolExecutor(RANKS) as pool:
        ours = list(pool.map(engine, range(RANKS)))
    more = {"reload": saved(name, 1)} if name == "gpt_oss" else {}
    stock = engines(saved(name), "off", **more)["first"]
    for rank, found in enumerate(ours):
        assert_same(stock[rank::RANKS], found["first"])
        ranks = f", ep {RANKS}" if experts == "whole" else ""
        ranks += f", dp {RANKS}" if dispatcher else ""
        assert f"{ranks} on cpu: {dispatcher or 'local'} + torch" in found["text"]
