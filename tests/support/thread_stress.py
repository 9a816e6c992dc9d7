"""Call kernels, layers and models from many threads, and count what one thread gets otherwise.

Each thread makes calls with token counts in random order. Subjects:
kernel     one kernel that all threads share
kernels    a kernel for each thread; all share the workspace
in_flight  one kernel; each thread starts two calls before it runs either one
layer      one FusedMoE with shared experts, given router logits
model      one tiny Qwen3-MoE through transformers; the threads' first calls pack its layers
graphs     one graphed kernel (CUDA only; `model` also replays graphs there)

On CUDA each subject runs twice: all threads on the default stream, and each on another stream.
Results are compared on the device, so that calls queue up.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from graph_stand_in import graphed_kernel
from torch import Tensor

import moekit
from moekit.testing.cases import make_case, random_weights

# (E, K, H, I), of the kernels and layers
SIZES = {"cpu": (8, 2, 64, 48), "cuda": (64, 8, 2048, 1024)}
TOKENS = {"cpu": (1, 2, 3, 7, 16, 33, 64), "cuda": (1, 2, 4, 16, 17, 64, 100, 256)}
# Relative RMS error that two right results of one input may have. Some backends add atomically.
BOUND = {torch.float32: 1e-6, torch.bfloat16: 5e-3}

Call = Callable[[int], Sequence[tuple[int, Tensor]]]


@dataclass(frozen=True)
class Setting:
    """The backend to call, and by how many threads."""

    device: str = "cpu"
    experts: str = "torch"
    threads: int = 4
    quant: str = "none"


@dataclass
class Subject:
    """calls: one for each thread, from an input's number to (number, result) pairs. expected: the
    result for each number, as one thread gets it."""

    calls: list[Call]
    expected: list[Tensor]


@dataclass
class Outcome:
    """made: results that were compared. wrong: those beyond the bound. errors: what was raised."""

    made: int = 0
    wrong: int = 0
    worst: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not (self.wrong or self.errors)

    def __str__(self) -> str:
        text = f"{self.wrong} wrong of {self.made}, worst relative error {self.worst:.1e}"
        return text + "".join(f"; {error}" for error in dict.fromkeys(self.errors))


def problem_for(setting: Setting) -> moekit.MoEProblem:
    E, K, H, inner = SIZES[setting.device]
    return moekit.MoEProblem(
        num_experts=E, top_k=K, hidden_size=H, intermediate_size=inner, quant=setting.quant,
        dtype=torch.float32 if setting.device == "cpu" else torch.bfloat16, device=setting.device,
    )  # fmt: skip


def made_kernels(setting: Setting, count: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Kernels, their packed weights, and cases that fit all of them."""
    problem = problem_for(setting)
    kernels = [moekit.compose(problem, "local", setting.experts) for _ in range(count)]
    weights = random_weights(problem)
    packed = [kernel.pack(weights) for kernel in kernels]
    cases = [make_case(problem, T, key=T, weights=weights) for T in TOKENS[setting.device]]
    return kernels, packed, cases


def kernel(setting: Setting, count: int = 1) -> Subject:
    kernels, packed, cases = made_kernels(setting, count)

    def calling(which: int) -> Call:
        def call(number: int) -> Sequence[tuple[int, Tensor]]:
            case = cases[number]
            return [(number, kernels[which](case.x, packed[which], case.routing))]

        return call

    calls = [calling(thread % count) for thread in range(setting.threads)]
    return Subject(calls, [calls[0](n)[0][1] for n in range(len(cases))])


def kernels(setting: Setting) -> Subject:
    return kernel(setting, setting.threads)


def in_flight(setting: Setting) -> Subject:
    (made,), (packed,), cases = made_kernels(setting, 1)

    def call(number: int) -> Sequence[tuple[int, Tensor]]:
        numbers = number, (number + 3) % len(cases)
        started = [made.start(cases[n].x, packed, cases[n].routing) for n in numbers]
        for flight in started:
            flight.run()
        return [(n, flight.result()) for n, flight in zip(numbers, started, strict=True)]

    expected = [made(case.x, packed, case.routing) for case in cases]
    return Subject([call] * setting.threads, expected)


def layer(setting: Setting) -> Subject:
    E, K, H, inner = SIZES[setting.device]
    problem = problem_for(setting)
    made = moekit.FusedMoE(
        E, K, H, inner, params_dtype=problem.dtype, quant=setting.quant, experts=setting.experts,
        device=setting.device, shared_experts=lambda x: torch.tanh(x) * 0.5,
    )  # fmt: skip
    made.load_weights(random_weights(problem))
    xs = [make_case(problem, T, key=T).x for T in TOKENS[setting.device]]
    logits = [torch.randn(len(x), E, device=x.device) for x in xs]

    def call(number: int) -> Sequence[tuple[int, Tensor]]:
        return [(number, made(xs[number], logits[number]))]

    return Subject([call] * setting.threads, [call(n)[0][1] for n in range(len(xs))])


def tiny_model(device: str) -> Any:
    """A Qwen3-MoE of two layers with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, inner = (64, 48) if device == "cpu" else (512, 256)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=hidden, intermediate_size=inner, moe_intermediate_size=inner,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_(std=0.2)
    made = made.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    made.set_experts_implementation("moekit")
    return made


def model(setting: Setting) -> Subject:
    import moekit.integrations.transformers as integration

    device = setting.device
    integration.install(experts=setting.experts, quant=setting.quant)
    made = tiny_model(device)
    ids = [
        torch.randint(96, (1, T), device=device, generator=torch.Generator(device).manual_seed(T))
        for T in TOKENS[device]
    ]

    def logits(which: Any, number: int) -> Tensor:
        found: Tensor = which(ids[number], use_cache=False).logits
        return found

    twin = copy.deepcopy(made)  # it packs for itself, so that `made` is not packed yet
    expected = [logits(twin, n).clone() for n in range(len(ids))]
    return Subject([lambda n: [(n, logits(made, n))]] * setting.threads, expected)


def graphs(setting: Setting) -> Subject:
    (made,), (packed,), cases = made_kernels(setting, 1)
    graphed = graphed_kernel(made, packed)
    expected = [made(case.x, packed, case.routing) for case in cases]

    def call(number: int) -> Sequence[tuple[int, Tensor]]:
        return [(number, graphed(cases[number].x, cases[number].routing))]

    return Subject([call] * setting.threads, expected)


SUBJECTS = (kernel, kernels, in_flight, layer, model, graphs)


def stress(subject: Subject, calls: int, *, own_streams: bool = False, seed: int = 0) -> Outcome:
    """Runs the subject's calls, ``calls`` in each thread."""
    outcome, lock = Outcome(), threading.Lock()
    begin = threading.Barrier(len(subject.calls))
    device = subject.expected[0].device
    if device.type == "cuda":
        torch.cuda.synchronize()  # inputs are there for every stream

    def run(thread: int, call: Call) -> None:
        draw, errors = random.Random(f"{seed} {thread}"), []
        stream: Any = torch.cuda.stream(torch.cuda.Stream()) if own_streams else nullcontext()
        try:
            with torch.inference_mode(), stream:
                begin.wait()
                for _ in range(calls):
                    for number, out in call(draw.randrange(len(subject.expected))):
                        want = subject.expected[number].float()
                        errors.append((out.float() - want).norm() / want.norm())
                        del out  # else a graph finds it in use
                found = torch.stack(errors).cpu()
        except Exception as error:
            begin.abort()
            with lock:
                outcome.errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        wrong = ~(found <= BOUND[subject.expected[0].dtype])  # NaN is also wrong
        with lock:
            outcome.made += len(found)
            outcome.wrong += int(wrong.sum())
            outcome.worst = max(outcome.worst, float(found.nan_to_num(nan=float("inf")).max()))

    threads = [threading.Thread(target=run, args=each) for each in enumerate(subject.calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome
