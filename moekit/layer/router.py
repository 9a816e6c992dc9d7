"""The router of a layer: `moekit.route` with the layer's options, and identity experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moekit.contract import Routing
from moekit.errors import InvalidProblem
from moekit.layer.route import check_hash_table, route
from moekit.layer.routes import LayerLog

RoutingFunction = Callable[[Tensor, Tensor, int, bool], "tuple[Tensor, Tensor]"]
"""(hidden_states (T, H), logits (T, E) fp32, top_k, renormalize) -> weights and ids (T, K)"""

# The options that each way of choosing all experts would ignore.
_IGNORED = {
    "hash_table": ("e_score_correction_bias", "num_expert_group", "topk_group"),
    "custom_routing_function": (
        "scoring_func", "e_score_correction_bias", "num_expert_group", "topk_group",
        "routed_scaling_factor", "hash_table",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingConfig:
    """The way a `FusedMoE` layer chooses experts from router logits; see `moekit.route`.

    Args:
        renormalize: Scale each token's weights to a sum of one.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus".
        e_score_correction_bias: (E + zero experts,), added to the scores for the choice only. It
            is read at every call, so it may be filled later, in place. A tensor on another device
            is copied once, and ``module.to`` replaces buffers: pass a Parameter in these cases.
        num_expert_group: Number of expert groups for grouped top-k; given with ``topk_group``.
        topk_group: Number of groups that a token's experts may come from.
        routed_scaling_factor: Multiplies the weights.
        custom_routing_function: ``(hidden_states, router_logits, top_k, renormalize) -> (weights,
            ids)``, in place of all options above except ``renormalize``.
        zero_expert_num: Number of identity experts. Their ids and logits follow the
            ``num_experts`` real experts'.
        hash_table: (V, K) ids of each vocabulary token's experts, as in `moekit.route`. Calls then
            need ``token_ids``. A Parameter may be filled later.

    Raises:
        InvalidProblem: A value would be ignored.
    """

    renormalize: bool = True
    scoring_func: str = "softmax"
    e_score_correction_bias: Tensor | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    custom_routing_function: RoutingFunction | None = None
    zero_expert_num: int = 0
    hash_table: Tensor | None = None

    def __post_init__(self) -> None:
        given = {field.name for field in fields(self) if self._is_given(field.name, field.default)}
        for way in given & _IGNORED.keys():
            if ignored := [name for name in _IGNORED[way] if name in given]:
                raise InvalidProblem(
                    f"{way} chooses all experts and would ignore {', '.join(ignored)}: "
                    "leave one out"
                )

    def _is_given(self, name: str, default: object) -> bool:
        value = getattr(self, name)
        return value is not default and (isinstance(value, Tensor) or value != default)

    def on(self, device: torch.device) -> RoutingConfig:
        """Return the same with its tensors on ``device``. Parameters stay with their owners."""
        moved: dict[str, Any] = {}
        for name in ("e_score_correction_bias", "hash_table"):
            tensor = getattr(self, name)
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                moved[name] = tensor.to(device)
        return replace(self, **moved) if moved else self

    def __str__(self) -> str:
        custom = self.custom_routing_function
        name = "" if custom is None else getattr(custom, "__name__", "custom function")
        words = [name or self.scoring_func]
        words += ["hash table"] * (self.hash_table is not None)
        if self.num_expert_group is not None:
            words.append(f"best {self.topk_group} of {self.num_expert_group} groups")
        words += ["correction bias"] * (self.e_score_correction_bias is not None)
        words += ["renormalized"] * self.renormalize
        if self.routed_scaling_factor != 1.0:
            words.append(f"scaled by {self.routed_scaling_factor:g}")
        words += [f"{self.zero_expert_num} zero experts"] * bool(self.zero_expert_num)
        return ", ".join(words)


class Router:
    """Turn the logits of ``num_experts`` real experts, then identity experts, into a `Routing`.

    Raises:
        InvalidProblem: The options do not fit the number of experts or ``top_k``.
        InvalidInput: The correction bias or the hash table has the wrong shape or dtype.
    """

    def __init__(
        self, config: RoutingConfig, num_experts: int, top_k: int, batch_invariant: bool = False
    ) -> None:
        self.config, self.num_experts, self.top_k = config, num_experts, top_k
        self.log: LayerLog | None = None
        self._options: dict[str, Any] = {}
        bias, table = config.e_score_correction_bias, config.hash_table
        if table is not None:  # the values of a Parameter may come later
            values = table.to("meta") if isinstance(table, nn.Parameter) else table
            check_hash_table(values, num_experts, top_k)
        if config.custom_routing_function is not None:
            return
        self._options = {
            "scoring": config.scoring_func,
            "renormalize": config.renormalize,
            "num_expert_group": config.num_expert_group,
            "topk_group": config.topk_group,
            "routed_scaling_factor": config.routed_scaling_factor,
            "batch_invariant": batch_invariant,
        }
        on_meta = partial(torch.empty, device="meta")
        route(  # checks the options on a meta token
            on_meta((1, self.width)),
            top_k,
            correction_bias=None if bias is None else bias.to("meta"),
            hash_table=None if table is None else table.to("meta"),
            token_ids=None if table is None else on_meta(1, dtype=torch.int64),
            **self._options,
        )

    @property
    def width(self) -> int:
        """The number of logits of each token; ids are below it."""
        return self.num_experts + self.config.zero_expert_num

    def __call__(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        is_padding: Tensor | None,
        checked: bool,
        token_ids: Tensor | None = None,
    ) -> Routing:
        """Choose ``top_k`` experts for each token."""
        config = self.config
        custom = config.custom_routing_function

        def of_this_call(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
            assert custom is not None
            return custom(x_TH, logits, top_k, config.renormalize)

        return route(
            logits_TE,
            self.top_k,
            correction_bias=config.e_score_correction_bias,
            custom=None if custom is None else of_this_call,
            hash_table=config.hash_table,
            token_ids=token_ids,
            is_padding=is_padding,
            checked=checked,
            log=self.log,
            **self._options,
        )

    def take_zero_experts(self, routing: Routing) -> tuple[Routing, Tensor | None]:
        """Split off the identity experts.

        Returns:
            The routing with ids of real experts only, -1 elsewhere, and the sum of each token's
            weights for identity experts, (T, 1), or None if the layer has none.
        """
        if not self.config.zero_expert_num:
            return routing, None
        zero = routing.topk_ids >= self.num_experts
        weights_T1 = torch.where(zero, routing.topk_weights, 0.0).sum(dim=1, keepdim=True)
        return replace(routing, topk_ids=routing.topk_ids.masked_fill(zero, -1)), weights_T1
