"""The arguments of `FusedMoE`: vLLM's keyword names become records, names become objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moekit.errors import InvalidProblem
from moekit.layer.parallelism import LayerParallelism
from moekit.layer.router import RoutingConfig
from moekit.layer.shared import SharedExperts
from moekit.problem.activation import NON_GATED, Activation
from moekit.untrusted.arguments import FLAG, accept, optional, shown
from moekit.untrusted.code import first_line

Record = TypeVar("Record", RoutingConfig, LayerParallelism)
Shared = SharedExperts | Callable[[Tensor], Tensor] | None


def take_records(
    routing: RoutingConfig | None,
    parallelism: LayerParallelism | None,
    shared_experts: Shared,
    keywords: dict[str, Any],
) -> tuple[RoutingConfig, LayerParallelism, SharedExperts | None]:
    """Return the records, each as it is given or made of its fields among ``keywords``.

    Raises:
        InvalidProblem: Both a record and one of its fields are given, or values do not fit.
        TypeError: A keyword belongs to no record.
    """
    left = dict(keywords)
    grouped = left.pop("use_grouped_topk", None)
    routing = _take(RoutingConfig, "routing", routing, left)
    parallelism = _take(LayerParallelism, "parallelism", parallelism, left)
    shared = _take_shared(shared_experts, left)
    if left:
        raise TypeError(f"FusedMoE got an unexpected keyword argument {next(iter(left))!r}")
    _check_grouped(grouped, routing)
    if shared is not None and shared.partial and parallelism.is_sequence_parallel:
        raise InvalidProblem(
            "shared_experts_partial is for shared experts sliced over ranks that hold the same "
            "tokens: use it without is_sequence_parallel"
        )
    return routing, parallelism, shared


def _take(
    kind: type[Record], argument: str, given: Record | None, keywords: dict[str, Any]
) -> Record:
    names = [field.name for field in fields(kind) if field.name in keywords]
    if given is None:
        return kind(**{name: keywords.pop(name) for name in names})
    if names:
        raise _both(argument, names, kind)
    return given


def _take_shared(given: Shared, keywords: dict[str, Any]) -> SharedExperts | None:
    name = "shared_experts_partial"
    named = name in keywords
    partial = keywords.pop(name, False)
    accept({name: FLAG}, {name: partial})
    if isinstance(given, SharedExperts):
        if named:
            raise _both("shared_experts", [name], SharedExperts)
        return given
    if given is not None:
        return SharedExperts(given, partial)
    if partial:
        raise InvalidProblem("shared_experts_partial=True has no effect: give shared_experts, too")
    return None


def _check_grouped(use_grouped_topk: object, routing: RoutingConfig) -> None:
    accept({"use_grouped_topk": optional(FLAG)}, {"use_grouped_topk": use_grouped_topk})
    groups = routing.num_expert_group
    if use_grouped_topk and groups is None:
        raise InvalidProblem(
            "use_grouped_topk=True needs num_expert_group and topk_group (got neither)"
        )
    if use_grouped_topk is False and groups is not None:
        raise InvalidProblem(
            f"use_grouped_topk=False contradicts num_expert_group={groups} and "
            f"topk_group={routing.topk_group}: leave both out, or set use_grouped_topk=True"
        )


def _both(argument: str, keywords: list[str], kind: type) -> InvalidProblem:
    return InvalidProblem(
        f"{argument} and {', '.join(keywords)} are both given: set them in the {kind.__name__}, "
        f"or leave {argument} out"
    )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; None means this machine's accelerator, else the CPU.

    Raises:
        InvalidProblem: There is no such device here.
    """
    default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device is None:
        device = default
    try:
        if not isinstance(device, (str, torch.device)):
            raise RuntimeError("this is neither a name nor a torch.device")
        try:
            found = torch.device(device)
        except RuntimeError:  # its text lists every type that torch was ever built for
            raise RuntimeError("torch knows no such device") from None
        if found.type != "cpu":
            module = torch.get_device_module(found)
            if not module.is_available():
                raise RuntimeError(f"torch sees no {found.type} device here")
            if found.index is None:
                found = torch.device(found.type, module.current_device())
    except Exception as error:  # each device type raises its own
        raise InvalidProblem(
            f"device={shown(device)}: {first_line(error)}; name a device of this machine, or leave "
            f"device out for {default}"
        ) from error
    return found


def resolve_activation(activation: Activation | str, is_act_and_mul: bool | None) -> Activation:
    """Return the activation, without its gate if ``is_act_and_mul`` is False.

    Raises:
        InvalidProblem: The activation has no such variant.
    """
    found = Activation(activation) if isinstance(activation, str) else activation
    # MoEProblem refuses values of other types.
    if is_act_and_mul is None or not isinstance(found, Activation):
        return found
    if is_act_and_mul == found.gated:
        return found
    if not is_act_and_mul and f"{found.name}_no_mul" in NON_GATED:
        return replace(found, name=f"{found.name}_no_mul")
    raise InvalidProblem(
        f"is_act_and_mul={is_act_and_mul} does not fit activation {found.name!r}, which "
        f"{'has a gate in it' if found.gated else 'has no gate'}: choose another activation, or "
        "leave is_act_and_mul out"
    )
