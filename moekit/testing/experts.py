"""The experts kit: calls, memory and packing, and `ExpertsConformance`, which has all parts."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.activation import GATED
from moekit.problem.quant import SCHEMES, WIRE_SCHEMES
from moekit.testing import cases
from moekit.testing.arithmetic import ExpertsNumbers
from moekit.testing.base import over
from moekit.testing.calls import (
    ONE_COLUMN,
    QUANTIZED_WIRE,
    SUMS_ITSELF,
    THREE_COLUMNS,
    Inputs,
    call,
    check_call,
    check_graph,
    pack,
    same_bits,
)
from moekit.testing.cases import device_of, make_case, random_weights
from moekit.testing.crossings import ExpertsCases
from moekit.testing.diagnose import assert_close, assert_right
from moekit.testing.experts_base import one_of_each_kind
from moekit.testing.invariance import ExpertsInvariance, rows_of
from moekit.testing.memory import beyond_stated, measure, poison, poisoned_allocations
from moekit.testing.threads import alternately

# Counters and rings of buffers in engines and libraries wrap after up to 60 calls.
_MANY_CALLS = 70


def _printed(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what Python and libraries in C have printed since the last time."""
    ctypes.CDLL(None).fflush(None)
    return "".join(capfd.readouterr())


class ExpertsCalls(ExpertsInvariance):
    """Calls, memory and packing. See `ExpertsConformance`."""

    # -- calls ----------------------------------------------------------------------------------

    def test_repeated_calls(self) -> None:
        """Calls with more and fewer tokens: no earlier call changes a result.

        Tokens, routings and outputs have the same addresses in every call, and the memory behind
        an output is unchanged. Some calls run in inference mode, and on the CPU with another number
        of threads.
        """
        problem = self._problem()
        kernel, packed = self._packed(problem)
        inputs = Inputs(problem, self._T + 9)
        outputs = torch.empty_like(inputs.hold(make_case(problem, self._T + 9)).x)
        threads = torch.get_num_threads()
        for index, num_tokens in enumerate((self._T, 3, 0, 1, self._T + 9, 5, self._T)):
            case = make_case(problem, num_tokens, ("random", "masked")[index % 2], key=index)
            held, out = inputs.hold(case), poison(outputs)[:num_tokens]
            torch.set_num_threads(2 if index < 3 else 1)
            try:
                with torch.inference_mode(index % 3 == 0), poisoned_allocations():
                    kernel(held.x, packed, held.routing, out=out)
            finally:
                torch.set_num_threads(threads)
            what = f"call {index} with T={num_tokens}"
            assert_right(out, case, what)
            assert bool(torch.isnan(outputs[num_tokens:]).all()), f"{what} wrote behind its output"

    def test_many_calls(self) -> None:
        """Calls as a decoder makes them: one shape, one address, other contents every time.

        A warm-up, in which a backend may choose kernels, comes first. A call with more tokens than
        it had comes last.
        """
        if self._interpreted:
            self._skip("takes seconds in Triton's interpreter")
        problem = self._problem()
        kernel = self._compose(problem, self._native)
        weights = random_weights(problem)
        packed, inputs = pack(kernel, weights), Inputs(problem, 3)
        made = [make_case(problem, 3, key=key, weights=weights) for key in range(2)]
        wanted = [case.reference() for case in made]
        kernel.warmup(packed, 3)
        for index in range(_MANY_CALLS):
            held = inputs.hold(made[index % 2])
            out = kernel(held.x, packed, held.routing)
            what = f"call {index} of one shape"
            assert_close(out, wanted[index % 2], problem, what, case=made[index % 2])
        check_call(kernel, make_case(problem, self._T, weights=weights), packed)

    def test_nothing_is_kept(self) -> None:
        """Calls and packing keep neither the caller's tensors nor their own.

        A backend may keep what its largest call needed, but it must not keep more after more calls,
        of fewer tokens each.
        """
        problems = self._one_of_each_kind()
        kernels = [self._compose(problem, self._native) for problem in problems]
        made = [make_case(problem, 1 if self._interpreted else 5) for problem in problems]

        def left(times: int) -> int:
            return measure(made[0].x.device, lambda: calls(times))[1]

        def calls(times: int) -> None:
            for fewer, (kernel, case) in product(range(times), zip(kernels, made, strict=True)):
                packed = kernel.pack(case.weights._map(torch.clone))
                some = rows_of(case, slice(max(1, len(case.x) - fewer)))
                routing = Routing(some.routing.topk_weights.clone(), some.routing.topk_ids.clone())
                kernel(some.x.clone(), packed, routing)

        calls(1)
        few, many = left(1), left(4)
        assert many <= few, (
            f"{many} bytes are left of four calls, and {few} of one: the backend keeps tensors of "
            "the calls; use the workspace, and store none in `pack` or `apply`"
        )

    def test_layers_in_turn(self) -> None:
        """One kernel serves two layers, and kernels of one size share nothing that they change.

        Two kernels share weights, and one has another activation.
        """
        for problem in self._one_of_each_kind():
            kernel, other = (self._compose(problem, self._native) for _ in range(2))
            layers = [random_weights(problem, key) for key in (1, 2)]
            turns = [(layer, kernel, pack(kernel, layers[layer])) for layer in (0, 1)]
            turns.append((0, other, turns[0][2]))
            names = sorted(self._spec().activations - {problem.activation.name})
            alike = [name for name in names if (name in GATED) == problem.activation.gated]
            for changed in (problem.replace(activation=name) for name in alike[-1:]):
                if not self._spec().unsupported(changed):
                    third = self._compose(changed, self._native)
                    turns += [(1, third, pack(third, layers[1])), turns[1]]
            for turn, (layer, using, packed) in enumerate(turns):
                case = make_case(using.problem, 5, key=turn, weights=layers[layer])
                out = using(case.x, packed, case.routing)
                assert_right(out, case, f"call {turn}, weights {layer}")

    def test_repack(self) -> None:
        """`repack_` writes new weights of all experts, then of two, over the packed ones."""
        for problem in self._one_of_each_kind():
            old, new = random_weights(problem), random_weights(problem, "new")
            kernel, packed = self._packed(problem, weights=old._map(torch.clone))
            held = {name: (tensor, tensor.data_ptr()) for name, tensor in packed.tensors().items()}
            two = [problem.num_local_experts - 1, 0]
            mixed = new._map(torch.clone)
            for name, tensor in mixed.tensors().items():
                for expert in two if tensor.dim() else ():
                    tensor[expert].copy_(old.tensors()[name][expert])
            turns = [(None, new, new), (two, mixed.select(two), mixed)]
            for experts, given, whole in turns if self._spec().movable else turns[:1]:
                kernel.repack_(packed, given, experts=experts, checksum=given.checksum())
                for name, tensor in pack(kernel, whole).tensors().items():
                    now, address = held[name]
                    assert now.data_ptr() == address and same_bits(now, tensor), f"{name} differs"
                case = make_case(problem, 5, weights=whole)
                out = kernel(case.x, packed, case.routing)
                assert_right(out, case, f"new weights of {experts or 'all experts'}")

    def test_threads(self) -> None:
        """Two threads call one kernel, each with its own inputs: scratch belongs to the call."""
        problem = self._problem()
        kernel = self._compose(problem, self._native)
        if self._interpreted:
            executor = sys.modules["triton.runtime.interpreter"].GridExecutor
            if not hasattr(executor.__call__, "one_thread_at_a_time"):
                self._skip("Triton's interpreter runs kernels of one thread")
        kernel.checked = False  # checks wait for the device, which would serialize the threads
        packed = pack(kernel, random_weights(problem))
        sizes = ((self._T, 4), (3, self._T + 5))
        made = [[make_case(problem, T, key=(me, T)) for T in each] for me, each in enumerate(sizes)]
        module: Any = None if self._on_cpu else torch.get_device_module(self._device().type)
        for own in (False,) if self._on_cpu else (False, True):
            streams = [module.stream(module.Stream()) if own else nullcontext() for _ in made]
            if module is not None:
                module.synchronize()  # so that every stream sees inputs and weights
            outs: list[list[Tensor]] = [[], []]

            def calls(me: int, streams: Any = streams, outs: Any = outs) -> None:
                with streams[me]:
                    for case in made[me] * (1 if self._on_cpu else 4):
                        outs[me].append(kernel(case.x, packed, case.routing))

            alternately(lambda: calls(0), lambda: calls(1))
            if module is not None:
                module.synchronize()
            for me, mine in enumerate(made):
                for index, out in enumerate(outs[me]):
                    case = mine[index % len(mine)]
                    what = f"thread {me} of two, call {index} with T={len(case.x)}"
                    assert_right(out, case, what)

    def test_two_calls_in_flight(self) -> None:
        """Also with tokens that are quantized before the transfer, if the backend takes them.

        A third call has the first one's tokens in reverse order. Outputs are new tensors, which
        later calls do not change.
        """
        schemes = sorted(WIRE_SCHEMES & self._spec().schemes)
        forms = [(self._problem(), self._native, self._T)]
        for found in (self._find_problem(quant=name) for name in schemes[:1]):
            forms += [(found, QUANTIZED_WIRE, 5)] if isinstance(found, MoEProblem) else []
        for problem, dispatcher, most in forms:
            kernel, packed = self._packed(problem, dispatcher)
            calls = [make_case(problem, T, key=index) for index, T in enumerate((most, 4))]
            calls.append(rows_of(calls[0], torch.arange(most).flip(0)))
            pending = [kernel.start(c.x, packed, c.routing) for c in calls]
            outs = [arriving.result() for arriving in pending]
            for index, (case, out) in enumerate(zip(calls, outs, strict=True)):
                assert out.is_contiguous()
                assert_right(out, case, f"call {index}")

    def test_sums_left_to_the_dispatcher(self) -> None:
        """A dispatcher that sums over K itself gets the rows of all assignments."""
        taken, biased = 0, self._find_problem(has_bias=True)
        problems = self._one_of_each_kind()
        for problem in [*problems, *([biased] if isinstance(biased, MoEProblem) else [])]:
            kernel, packed = self._packed(problem, SUMS_ITSELF)
            for num_tokens, kind in (
                (self._T, "masked"),
                (0, "random"),
                (1, "random"),
                (self._many_tokens, "rows"),
            ):
                check_call(kernel, make_case(problem, num_tokens, kind), packed)
            taken += kernel.dispatcher.taken  # type: ignore[attr-defined]
            kernel.destroy()
        if not taken:
            self._skip("the experts sum over K themselves in every call (no apply_unreduced)")

    def test_autocast(self) -> None:
        """torch.autocast changes no number, since the problem names the dtype."""
        schemes = one_of_each_kind(self._declared_schemes())
        changes: list[dict[str, Any]] = [{}, *({"quant": scheme} for scheme in schemes)]
        if self._spec().batch_invariant:
            changes.append({"batch_invariant": True})
        for change in changes:
            problem = self._precise(change)
            kernel = self._compose(problem, self._native)
            for num_tokens in (1, self._T):
                case = make_case(problem, num_tokens)
                want = case.reference()
                with torch.autocast(case.x.device.type, dtype=torch.bfloat16):
                    out = call(kernel, pack(kernel, case.weights), case)
                what = f"output under autocast, T={num_tokens}, {change or problem.dtype}"
                assert_close(out, want, problem, what, case=case)

    def test_fewer_columns(self) -> None:
        """A dispatcher may send several rows for a token: K' is 1 or 3 where top_k is 4."""
        if self._spec().format is not ActivationFormat.STANDARD:
            self._skip("BATCHED experts get no ids")
        problem = self._problem({"num_experts": 8, "top_k": 4}, {})
        for kind, dispatcher in (("random", ONE_COLUMN), ("masked", THREE_COLUMNS)):
            self._check(problem, 5, kind, dispatcher)

    def test_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Packing and calls print nothing, except for the first ones of a process."""
        problem = self._problem()
        kernel = self._compose(problem, self._native)
        many, one = (make_case(problem, T) for T in (3 if self._interpreted else self._T, 1))
        kernel(many.x, kernel.pack(many.weights), many.routing)
        _printed(capfd)
        packed = kernel.pack(many.weights)
        for case in (many, one):
            kernel(case.x, packed, case.routing)
        text = _printed(capfd)
        assert not text, f"printed {text[:200]!r}; log it with the logging module at level DEBUG"

    @pytest.mark.parametrize("dispatcher", ["local", "batched_reference"])
    def test_memory_is_stated(self, dispatcher: str) -> None:
        """The peak of a call is at most kernel.memory(), including the workspace."""
        schemes = one_of_each_kind(self._declared_schemes())
        for scheme in schemes[: 1 if self._interpreted else None]:
            self._check_memory(dispatcher, quant=scheme)
        if self._spec().batch_invariant:
            self._check_memory(dispatcher, batch_invariant=True)

    def _check_memory(self, dispatcher: str, **changes: Any) -> None:
        problem = self._problem({"num_experts": 8, "top_k": 4}, {}, **changes)
        kernel, weights = self._compose(problem, dispatcher), random_weights(problem)
        packed = pack(kernel, weights)
        for num_tokens in (64 if self._on_cpu else 1000, 1):  # one token may have another kernel
            case = make_case(problem, num_tokens, "hot", weights=weights)
            call_it = partial(kernel, case.x, packed, case.routing, out=torch.empty_like(case.x))
            if not self._on_cpu:  # libraries allocate at their first call
                call_it()
            said = beyond_stated(kernel, num_tokens, call_it)
            assert not said, f"{said}; state the rest in workspace() or transient_bytes()"

    def test_deterministic(self) -> None:
        self._needs("deterministic")
        twice = ((1, 2), (self._T, 2))
        often = ((1, 4), (self._T, 4), (self._many_tokens, 2))
        for index, problem in enumerate(self._one_of_each_kind()):
            kernel, packed = self._packed(problem)
            for num_tokens, times in twice if index or self._interpreted else often:
                case = make_case(problem, num_tokens, "hot")
                outs = [call(kernel, packed, case) for _ in range(times)]
                assert all(same_bits(outs[0], out) for out in outs), "equal calls, different bits"

    def test_graph_capture(self) -> None:
        """A graph is captured once, and replayed with other tokens and routings of the same T."""
        self._needs("graph_safe")
        if self._device().type != "cuda":
            self._skip("CUDA graphs need a CUDA device")
        problem = self._problem()
        kernel = self._compose(problem, "local")
        kinds = ("random", "masked", "rows", "hot")
        made = [make_case(problem, self._T, kind) for kind in kinds]
        packed = pack(kernel, made[0].weights)
        kernel.checked = False
        check_graph(
            lambda x, routing, out: kernel(x, packed, routing, out=out),
            [(case, case.reference()) for case in made],
        )

    # -- packing --------------------------------------------------------------------------------

    @over("scheme", SCHEMES)
    def test_pack(self, scheme: str) -> None:
        """Packing changes no weights, and gives the same bits twice and for strided weights.

        pack(permute(w)) == permute(pack(w)), so experts can move between ranks.
        """
        problem = self._problem(quant=scheme, **({"has_bias": True} if self._spec().bias else {}))
        kernel, L = self._compose(problem, self._native), problem.num_local_experts
        weights = random_weights(problem)
        once = pack(kernel, weights)
        assert once.backend == self.backend
        others = {"packed again": weights, "strided weights": cases.strided_weights(weights)}
        order = torch.arange(L).roll(1)
        order[[0, 1]] = order[[1, 0]]
        if self._spec().movable:
            assert once.experts, "no packed tensor is listed under experts"
            others["experts in another order"] = weights.select(order)
        for what, given in others.items():
            other = pack(kernel, given)
            assert other.experts.keys() == once.experts.keys()
            for name, tensor in once.experts.items():
                assert tensor.device == device_of(problem)
                if "order" in what:
                    assert tensor.shape[0] == L, f"{name} is {tuple(tensor.shape)}: dim 0 is not L"
                    tensor = tensor[order.to(tensor.device)]
                assert same_bits(tensor, other.experts[name]), f"{name} differs: {what}"
            for name, tensor in once.shared.items():
                assert same_bits(tensor, other.shared[name]), f"shared {name} differs: {what}"


class ExpertsConformance(ExpertsCalls, ExpertsCases, ExpertsNumbers):
    """Subclass it with ``backend = "name"``; see `Conformance` for the few other settings.

    Every test composes the named experts with dispatchers of the core, on this machine's
    accelerator if the backend runs there, else on the CPU.
    """
