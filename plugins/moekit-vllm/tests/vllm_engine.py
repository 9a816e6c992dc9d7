"""Run a real vLLM engine on the CPU for each line of JSON on stdin; print what it generates.

    {"model": DIR, "mode": "off", "engine": {...}}

The mode is a value of MOEKIT_VLLM. `vllm_engines.Engines` writes the lines, and says what else a
line may ask for.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

PROMPTS = [list(range(3, 14)), [17, 250, 31], [5] * 40]
TOKENS = 12
ANSWER = "ANSWER "
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
    # vLLM 0.32's operator for CPUs is wrong for queries (T, heads, D) of more than one head, as MLA
    # without YaRN passes them: its numbers then depend on the ranks and on the batch.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


def main() -> None:
    # One process, where vLLM has a choice: the other ones would import everything again.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # its kernels are Triton's
        _interpret()
    for line in sys.stdin:
        try:
            answer = generate(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


def _interpret() -> None:
    """Let vLLM use Triton's kernels, as its builds for CPUs do if Triton has a backend for CPUs."""
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=driver)


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens and their log probabilities for every prompt, before and after updates."""
    os.environ["MOEKIT_VLLM"] = asked["mode"]
    import moekit_vllm.hooks
    from moekit_vllm import settings
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings.VLLM.said.clear()
    moekit_vllm.hooks.uninstall()
    moekit_vllm.register()  # vLLM registers plugins once a process
    prompts = asked.get("prompts", PROMPTS)
    llm = LLM(asked["model"], **(_DEFAULTS | asked["engine"]))
    found: dict[str, Any] = {"first": complete(llm, prompts)}
    if adapters := asked.get("adapters"):
        found["adapted"] = complete(llm, prompts, adapters)
    if path := asked.get("load"):
        llm.collective_rpc(load_experts, args=(path,))
        found["loaded"] = complete(llm, prompts)
    if path := asked.get("reload"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        found["reloaded"] = complete(llm, prompts)
    found["log"] = sorted(settings.VLLM.said)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def load_experts(worker: Any, folder: str) -> None:
    """Write a checkpoint's experts into a worker's model, as frameworks for RL do."""
    from safetensors.torch import load_file

    tensors = load_file(f"{folder}/model.safetensors").items()
    worker.model_runner.model.load_weights((n, t) for n, t in tensors if ".experts." in n)


def complete(
    llm: Any, prompts: list[list[int]], adapters: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the greedy completion of every prompt, and the experts of its tokens if the engine
    returns them. adapters: folders, "" for none."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    used = [LoRARequest(path, 1, path) if path else None for path in adapters or ()] or None
    results = llm.generate(asked, sampling, use_tqdm=False, lora_request=used)
    outputs = [r.outputs[0] for r in results]
    return [
        {
            "tokens": list(o.token_ids),
            "logprobs": [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)],
            "experts": None if o.routed_experts is None else o.routed_experts.tolist(),
        }
        for o in outputs
    ]


if __name__ == "__main__":
    main()
