"""Run real vLLM engines on the CPU, and print what they generate as JSON.

    python vllm_engine.py '[{"model": DIR, "modes": ["off", "require"], "engine": {...}}, ...]'

Each mode is one value of MOEKIT_VLLM, with a new engine in this process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

PROMPTS = [list(range(3, 14)), [17, 250, 31], [5] * 40]
TOKENS = 12
_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**26,
    "skip_tokenizer_init": True,
    "seed": 0,
}


def main() -> None:
    asked = json.loads(sys.argv[1])
    # One process, where vLLM has a choice: the other ones would import everything again.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    answers = [{mode: generate(mode, each) for mode in each["modes"]} for each in asked]
    print("ANSWERS " + json.dumps(answers), flush=True)


def generate(mode: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens and their log probabilities for every prompt, before and after an update.

    asked: "reload" names a checkpoint for vLLM's ``reload_weights``, and "load" one whose experts
        are written into the model while it serves. "again" asks for the same completions once more.
    """
    os.environ["MOEKIT_VLLM"] = mode
    import moekit_vllm.hooks
    from moekit_vllm import settings
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings._said.clear()
    moekit_vllm.hooks.uninstall()
    moekit_vllm.register()  # vLLM registers plugins once a process
    try:
        llm = LLM(asked["model"], **(_DEFAULTS | asked.get("engine", {})))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {"first": complete(llm, asked.get("prompts", PROMPTS))}
    if reload := asked.get("reload"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
        found["reloaded"] = complete(llm, asked.get("prompts", PROMPTS))
    if path := asked.get("load"):
        llm.collective_rpc(load_experts, args=(path,))
        found["loaded"] = complete(llm, asked.get("prompts", PROMPTS))
    if asked.get("again"):
        found["again"] = complete(llm, asked.get("prompts", PROMPTS))
    found["log"] = sorted(settings._said)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def load_experts(worker: Any, folder: str) -> None:
    """Write a checkpoint's experts into a worker's model, as frameworks for RL do."""
    from safetensors.torch import load_file

    tensors = load_file(f"{folder}/model.safetensors").items()
    worker.model_runner.model.load_weights((n, t) for n, t in tensors if ".experts." in n)


def complete(llm: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the greedy completion of every prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [r.outputs[0] for r in llm.generate(asked, sampling, use_tqdm=False)]
    return [
        {
            "tokens": list(o.token_ids),
            "logprobs": [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)],
        }
        for o in outputs
    ]


if __name__ == "__main__":
    main()
