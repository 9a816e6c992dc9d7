"""Two data parallel engines generate what one engine does. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import vllm_collectives  # noqa: E402
import vllm_models as models  # noqa: E402
import vllm_plugins  # noqa: E402
from test_vllm_engine import ONE_PROCESS, assert_same, run  # noqa: E402
from vllm_engine import PROMPTS  # noqa: E402

RANKS = 2


@pytest.mark.parametrize(
    ("name", "experts", "dispatcher"),
    [("qwen3_moe", "sliced", ""), ("gpt_oss", "whole", ""), ("qwen3_moe", "whole", "naive")],
)
def test_ranks_with_their_own_tokens(tmp_path, name, experts, dispatcher) -> None:
    """vLLM gathers the tokens of all ranks for each layer and scatters the sums, or moekit does.

    The first rank has two prompts and the second one, so their numbers of tokens differ, and the
    second is done first. Without vLLM's collectives only a dispatcher can move tokens.
    """
    if dispatcher:
        pytest.importorskip("moekit_naive")
    else:
        vllm_plugins.install(vllm_collectives, tmp_path)
    model = str(models.save(name, tmp_path / "model"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = dict(VLLM_DP_SIZE=RANKS, VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=port)
    common |= dict(VLLM_ENABLE_V1_MULTIPROCESSING=1, OMP_NUM_THREADS=1)
    common |= dict(MOEKIT_DISPATCHER=dispatcher)
    common |= dict(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def engine(rank: int) -> dict:
        env = common | dict(VLLM_DP_RANK=rank, VLLM_DP_RANK_LOCAL=rank)
        return run(
            model, {"enable_expert_parallel": experts == "whole"}, ("require",),
            env={key: str(value) for key, value in env.items()}, prompts=PROMPTS[rank::RANKS],
        )["require"]  # fmt: skip

    with ThreadPoolExecutor(RANKS) as pool:
        ours = list(pool.map(engine, range(RANKS)))
    stock = run(model, ONE_PROCESS, ("off",))["off"]["first"]
    for rank, found in enumerate(ours):
        assert_same(stock[rank::RANKS], found["first"], "float32")
        spread = f", ep {RANKS}" if experts == "whole" else ""
        spread += f", dp {RANKS}" if dispatcher else ""
        assert f"{spread} on cpu: {dispatcher or 'local'} + torch" in found["text"]
