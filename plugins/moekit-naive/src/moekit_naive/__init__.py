"""moekit's dispatcher over torch.distributed: all-gather tokens, then add up partial outputs."""

from __future__ import annotations

from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, hookimpl


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="naive",
            target="moekit_naive.dispatcher:NaiveDispatcher",
            training="moekit_naive.training:TrainableNaive",
            format=ActivationFormat.STANDARD,
            devices=("cpu", "cuda"),
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            ids_dtype="any",
            spans_hosts=True,
            aborts=True,
            deterministic=True,
            batch_invariant=True,
            weights_in_fp32=True,
            graph_safe=True,
        )
    ]
