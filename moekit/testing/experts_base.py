"""The base of the experts kit's parts: sizes of problems, capabilities, and a checked call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moekit.contract import PackedWeights, PermuteExpertsUnpermute
from moekit.contract.specs import ExpertsSpec
from moekit.kernel import ModularKernel
from moekit.problem import DTYPES, ActivationFormat, DeviceSpec, MoEProblem
from moekit.problem.activation import ACTIVATIONS, Activation
from moekit.problem.quant import SCHEMES, QuantScheme
from moekit.problem.weights import ExpertWeights
from moekit.testing.base import Capability, Conformance, Sizes, sizes_of
from moekit.testing.calls import check_call, pack
from moekit.testing.cases import make_case, random_weights


def grouped(schemes: Iterable[str], key: Callable[[QuantScheme], object]) -> list[list[str]]:
    """Return lists of the schemes with equal keys, in their order."""
    kinds: dict[object, list[str]] = {}
    for name in schemes:
        kinds.setdefault(key(SCHEMES[name]), []).append(name)
    return list(kinds.values())


def one_of_each_kind(schemes: Iterable[str]) -> list[str]:
    """Return the first of the schemes that have the same tolerance and the same mistakes."""

    def kind(scheme: QuantScheme) -> object:
        weight, activation = scheme.weight, scheme.activation
        return weight and weight.act_order, weight is None, activation and activation.dtype

    return [names[0] for names in grouped(schemes, kind)]


class ExpertsBase(Conformance):
    """The experts under test. See `ExpertsConformance`."""

    _interface = PermuteExpertsUnpermute

    def _spec(self) -> ExpertsSpec:
        return self._registry().expert(self.backend)

    def _names(self) -> dict[str, str]:
        return {"experts": self.backend}

    def _capabilities(self) -> list[Capability]:
        spec = self._spec()
        activations = [
            Capability(f"activation {name}", {"activation": name}, name in spec.activations)
            for name in sorted(ACTIVATIONS)
        ]
        schemes = [
            Capability(f"scheme {name}", {"quant": name}, name in spec.schemes) for name in SCHEMES
        ]
        clamped = {"activation": Activation("silu", limit=2.0)}
        clamp = Capability("silu_clamp", clamped, spec.silu_clamp and "silu" in spec.activations)
        bias = Capability("bias", {"has_bias": True}, spec.bias)
        return [*super()._capabilities(), *schemes, *activations, clamp, bias]

    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        """Return no multiples of any tile first; then rounder ones, for backends that need those.

        In act-order always several groups: one group has no order.
        """
        weight = SCHEMES[scheme].weight
        ordered = weight is not None and weight.act_order
        grouped = ordered or (weight is not None and weight.group[0] > 1)
        if device.type == "cpu":
            few = 4 if "triton" in self._spec().requires else 6  # interpreted
            odd = sizes_of(4, 2, 160, 144) if grouped else sizes_of(few, 2, 96, 80)
            rounder = [sizes_of(4, 2, n, n) for n in ((256, 512) if ordered else (128, 256, 512))]
            return [odd, *rounder]
        rounder = [sizes_of(8, 2, 512, 256), sizes_of(8, 2, 1024, 512), sizes_of(8, 2, 2048, 1024)]
        return [sizes_of(8, 2, 320, 272), *rounder, sizes_of(8, 2, 4096, 2048)]

    def _declared_schemes(self) -> list[str]:
        return [name for name in SCHEMES if name in self._spec().schemes]

    def _one_of_each_kind(self) -> list[MoEProblem]:
        """Return the main problem, and one for each other kind of declared schemes.

        In Triton's interpreter the main problem only.
        """
        main = self._problem()
        others = [] if self._interpreted else one_of_each_kind(self._declared_schemes())[1:]
        found = [main, *(self._find_problem(quant=scheme) for scheme in others)]
        return [problem for problem in found if isinstance(problem, MoEProblem)]

    @property
    def _native(self) -> str:
        """The core's dispatcher of the backend's own format."""
        standard = self._spec().format is ActivationFormat.STANDARD
        return "local" if standard else "batched_reference"

    @property
    def _bridged(self) -> str:
        """The core's dispatcher of the other format."""
        return "local" if self._native != "local" else "batched_reference"

    @property
    def _on_cpu(self) -> bool:
        return self._device().type == "cpu"

    @property
    def _interpreted(self) -> bool:
        return self._on_cpu and "triton" in self._spec().requires

    def _declares(self, name: str, value: Any) -> bool:
        spec = self._spec()
        if name == "name":
            return value in spec.activations
        return value in {"scheme": spec.schemes, "dtype": spec.dtypes}[name]

    @property
    def _T(self) -> int:
        """A number of tokens that is no multiple of any tile."""
        return 17 if self._on_cpu else 133

    @property
    def _many_tokens(self) -> int:
        """More tokens than a tile has rows; in Triton's interpreter a few."""
        return (8 if self._interpreted else 150) if self._on_cpu else 1100

    def _packed(
        self,
        problem: MoEProblem,
        dispatcher: str | None = None,
        weights: ExpertWeights | None = None,
    ) -> tuple[ModularKernel, PackedWeights]:
        """Compose a kernel, behind the dispatcher of the native format by default, and pack."""
        kernel = self._compose(problem, dispatcher or self._native)
        return kernel, pack(kernel, weights or random_weights(problem))

    def _check(
        self,
        problem: MoEProblem,
        num_tokens: int | None = None,
        kind: str = "random",
        dispatcher: str | None = None,
    ) -> None:
        """Compose, pack, call under poison, and compare with the oracle."""
        case = make_case(problem, self._T if num_tokens is None else num_tokens, kind)
        check_call(self._compose(problem, dispatcher or self._native), case)

    def _check_counts(
        self, problem: MoEProblem, kind: str = "random", *, invariant: bool = True
    ) -> None:
        """Check calls of some tokens, one and many, for which backends have other kernels.

        Triton's interpreter runs the first call only.

        Args:
            kind: of the first call.
            invariant: also check the batch-invariant problem, if the backend does it.
        """
        weights = random_weights(problem)
        kernel, packed = self._packed(problem, weights=weights)
        calls = ((self._T, kind), (1, "random"), (self._many_tokens, "rows"))
        for num_tokens, each in calls[: 1 if self._interpreted else None]:
            check_call(kernel, make_case(problem, num_tokens, each, weights=weights), packed)
        batch_invariant = problem.replace(batch_invariant=True)
        if invariant and not self._interpreted and not self._spec().unsupported(batch_invariant):
            self._check(batch_invariant)

    def _precise(self, *choices: Mapping[str, Any], **changes: Any) -> MoEProblem:
        """Do as `_problem`, in the most precise dtype in which the backend does each choice."""
        names = [n for n in ("float32", "float16", "bfloat16") if n in self._spec().dtypes]
        dtypes = [{"dtype": DTYPES[name]} for name in names]
        return self._problem(
            *({**each, **dtype} for each in choices for dtype in dtypes), **changes
        )

    def test_constructor_keeps_spec_and_problem(self) -> None:
        problem = self._problem()
        made = self._spec().load()(self._spec(), problem)
        assert made.problem == problem and made.spec == self._spec()
        for _ in range(2):  # a warm-up may happen twice
            with made.tuning():
                pass
        for rows in (0, 1, self._T):
            assert made.transient_bytes(rows) >= 0
            named = made.largest_calls(rows)
            assert all(0 <= n <= rows for n in named), f"a warm-up for {rows} tokens calls {named}"
            for buffer in made.workspace(rows):
                assert buffer.nbytes >= 0
