"""The doctor's checks of plugins' backends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import partial

import torch

from moekit.contract.specs import CHECK_FAILED, BackendSpec, DispatcherSpec, ExpertsSpec
from moekit.discovery import entry_points as discovery
from moekit.discovery.registry import Registry
from moekit.errors import MoekitError
from moekit.problem import DTYPES, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.quant import SCHEMES, Schemes
from moekit.untrusted import process as isolate
from moekit.untrusted.code import message

_Found = Iterator[tuple[str, str, str]]  # name, state and text of each finding


def examine(environ: Mapping[str, str], seconds: float) -> _Found:
    """Yield the findings of each plugin, made in a separate process, and the names that clash."""
    device, fault = _device(seconds)
    if fault:
        yield "device", "bad", f"torch did not say what this machine's device is: {fault}"
    found, unknown = discovery.sources(environ)
    offers: list[tuple[str, list[discovery.Offer]]] = []
    for source, blocked in found:
        owner = f"{source.distribution} {source.version}"
        offers.append((owner, []))
        if blocked:
            yield source.name, "no", f"blocked: {blocked}"
            continue
        answers, fault = isolate.run(partial(_examine_plugin, source, device), seconds)
        step = "it was loaded"
        for kind, *texts in answers:
            if kind == "step":
                step = texts[0]
            elif kind == "broken":
                yield source.name, "bad", f"broken: {texts[0]}"
            elif kind == "offer":
                offers[-1][1].append((texts[0], texts[1]))
            else:
                yield texts[0], texts[1], f"{texts[2]} ({owner})"
        if fault:
            yield source.name, "bad", f"while {step}: {fault} ({owner})"
    for (source, _), (reason, _) in zip(found, discovery.clashes(offers), strict=True):
        if reason:
            yield source.name, "bad", f"clash: {reason}"
    for state in unknown:
        yield state.name, "bad", f"{state.state}: {state.reason}"


def _examine_plugin(source: discovery.Source, device: DeviceSpec, tell: isolate.Report) -> None:
    """Tell what `examine` reads, in the plugin's process."""
    state = discovery.probe(source)
    Schemes.installed = staticmethod(
        lambda _: Registry((state,))
    )  # this process loads no other plugin
    if state.state != "ok":
        tell("broken", state.reason)
    for kind, name in state.offers:
        tell("offer", kind, name)
    for spec in state.backends:
        tell("step", f"{spec.kind} {spec.name!r} was tried")
        tell("finding", spec.name, *_try_backend(spec, device))


def _device(seconds: float) -> tuple[DeviceSpec, str]:
    """Return this machine's device, and a fault or "".

    Another process detects it, as this one is forked again, which CUDA does not allow.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return DeviceSpec.detect(), ""
    answers, fault = isolate.run(
        lambda tell: tell(json.dumps(astuple(DeviceSpec.detect()))), seconds
    )
    if not answers:
        return DeviceSpec("cpu"), fault
    kind, capability, name, arch = json.loads(answers[0][0])
    return DeviceSpec(kind, capability and tuple(capability), name, arch), fault


def _try_backend(spec: BackendSpec, device: DeviceSpec) -> tuple[str, str]:
    """Load a backend if it could do some problem here.

    Returns its state, the schemes that it serves or the reasons why not, and which library it uses
    for them, if its description is the same for all.
    """
    served, reasons, described = [], dict[str, None](), set[str]()
    for problem in _problems(spec, device):
        why_not = spec.unsupported(problem)
        reasons.update(dict.fromkeys(why_not))
        if not why_not:
            served.append(problem.quant.name)
            described.add(spec.description(problem))
    if failed := [reason for reason in reasons if reason.startswith(CHECK_FAILED)]:
        return "bad", "; ".join(failed)
    if not served:
        return "no", "; ".join(reasons)
    try:
        spec.load()
    except MoekitError as error:
        return "bad", message(error)
    detail = "loads" if isinstance(spec, DispatcherSpec) else f"serves schemes: {', '.join(served)}"
    if len(served) == len(SCHEMES):
        detail = "serves every scheme"
    elif refused := ", ".join(sorted(spec.schemes - set(served))):
        detail += f"; refuses {refused}"
    return "ok", "; ".join(filter(None, [detail, described.pop() if len(described) == 1 else ""]))


def _problems(spec: BackendSpec, device: DeviceSpec) -> Iterator[MoEProblem]:
    """Yield a problem for each scheme (for a dispatcher: one), of sizes that suit all tiles."""
    moves = isinstance(spec, DispatcherSpec) and spec.moves_tokens
    parallel = ParallelConfig(ep_size=2) if moves else ParallelConfig()
    dtype = next(d for name, d in DTYPES.items() if name in spec.dtypes)
    for scheme in sorted(spec.schemes & SCHEMES) if isinstance(spec, ExpertsSpec) else ["none"]:
        yield MoEProblem(
            num_experts=8, top_k=2, hidden_size=2048, intermediate_size=1024, dtype=dtype,
            quant=scheme, max_num_tokens=64, parallel=parallel, device=device,
        )  # fmt: skip
