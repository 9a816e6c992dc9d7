"""The router of a layer: `moekit.route` with the layer's options, and identity experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moekit.contract import Routing
from moekit.errors import InvalidProblem
from moekit.layer.route import OPTIONS, route
from moekit.runtime.checks import check_ids, check_tensor
from moekit.untrusted.arguments import FUNCTION, MAX_EXPERTS, accept_fields, optional, size

RoutingFunction = Callable[[Tensor, Tensor, int, bool], "tuple[Tensor, Tensor]"]
"""(hidden_states (T, H), logits (T, E) fp32, top_k, renormalize) -> weights and ids (T, K)"""

_KINDS = {
    "renormalize": OPTIONS["renormalize"],
    "scoring_func": OPTIONS["scoring"],
    "num_expert_group": OPTIONS["num_expert_group"],
    "topk_group": OPTIONS["topk_group"],
    "routed_scaling_factor": OPTIONS["routed_scaling_factor"],
    "custom_routing_function": optional(FUNCTION),
    "zero_expert_num": size(0, MAX_EXPERTS),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingConfig:
    """How a `FusedMoE` layer chooses experts from router logits; see `moekit.route`.

    Args:
        renormalize: Scale each token's weights to a sum of one.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus".
        e_score_correction_bias: (E + zero experts,), added to the scores for the choice only. It
            is read at every call, so it may be filled later, in place.
        num_expert_group: Number of expert groups for grouped top-k; given with ``topk_group``.
        topk_group: Number of groups that a token's experts may come from.
        routed_scaling_factor: Multiplies the weights.
        custom_routing_function: ``(hidden_states, router_logits, top_k, renormalize) -> (weights,
            ids)``, in place of all options above except ``renormalize``.
        zero_expert_num: Number of identity experts. Their ids and logits follow those of the
            ``num_experts`` real ones.

    Raises:
        InvalidProblem: A value has the wrong type, or ``custom_routing_function`` would ignore it.
    """

    renormalize: bool = True
    scoring_func: str = "softmax"
    e_score_correction_bias: Tensor | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    custom_routing_function: RoutingFunction | None = None
    zero_expert_num: int = 0

    def __post_init__(self) -> None:
        accept_fields(self, _KINDS)
        if self.e_score_correction_bias is not None:
            check_tensor("e_score_correction_bias", self.e_score_correction_bias)
        ignored = {
            "scoring_func": self.scoring_func != "softmax",
            "e_score_correction_bias": self.e_score_correction_bias is not None,
            "num_expert_group": self.num_expert_group is not None,
            "topk_group": self.topk_group is not None,
            "routed_scaling_factor": self.routed_scaling_factor != 1.0,
        }
        if self.custom_routing_function is not None and any(ignored.values()):
            raise InvalidProblem(
                "custom_routing_function replaces all routing and would ignore "
                f"{', '.join(name for name, given in ignored.items() if given)}: leave one out"
            )

    def on(self, device: torch.device) -> RoutingConfig:
        """Return the same with the bias on ``device``. A parameter stays where its owner has it."""
        bias = self.e_score_correction_bias
        if bias is None or isinstance(bias, nn.Parameter):
            return self
        return replace(self, e_score_correction_bias=bias.to(device))

    def __str__(self) -> str:
        if self.custom_routing_function is not None:
            words = [getattr(self.custom_routing_function, "__name__", "custom function")]
        else:
            words = [self.scoring_func]
        if self.num_expert_group is not None:
            words.append(f"best {self.topk_group} of {self.num_expert_group} groups")
        words += ["correction bias"] * (self.e_score_correction_bias is not None)
        words += ["renormalized"] * self.renormalize
        if self.routed_scaling_factor != 1.0:
            words.append(f"scaled by {self.routed_scaling_factor:g}")
        words += [f"{self.zero_expert_num} zero experts"] * bool(self.zero_expert_num)
        return ", ".join(words)


@dataclass(frozen=True)
class Router:
    """Turn the logits of ``num_experts`` real experts, then identity experts, into a `Routing`.

    Raises:
        InvalidProblem: The options do not fit the number of experts or ``top_k``.
        InvalidInput: The correction bias has the wrong shape or dtype.
    """

    config: RoutingConfig
    num_experts: int
    top_k: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.config.custom_routing_function is None:
            # `route` checks the options on one token without values.
            bias = self.config.e_score_correction_bias
            logits = torch.empty((1, self.width), device="meta")
            self._route(logits, None if bias is None else bias.to("meta"), None, False)

    @property
    def num_zero_experts(self) -> int:
        """The number of identity experts."""
        return self.config.zero_expert_num

    @property
    def width(self) -> int:
        """The number of logits of each token; ids are below it."""
        return self.num_experts + self.num_zero_experts

    def __call__(
        self, x_TH: Tensor, logits_TE: Tensor, is_padding: Tensor | None, checked: bool
    ) -> Routing:
        """Choose ``top_k`` experts for each token."""
        config = self.config
        custom = config.custom_routing_function
        if custom is None:
            return self._route(logits_TE, config.e_score_correction_bias, is_padding, checked)
        return route(
            logits_TE,
            self.top_k,
            custom=lambda logits, top_k: custom(x_TH, logits, top_k, config.renormalize),
            is_padding=is_padding,
            checked=checked,
        )

    def _route(
        self, logits: Tensor, bias: Tensor | None, is_padding: Tensor | None, checked: bool
    ) -> Routing:
        config = self.config
        return route(
            logits,
            self.top_k,
            scoring=config.scoring_func,
            renormalize=config.renormalize,
            correction_bias=bias,
            num_expert_group=config.num_expert_group,
            topk_group=config.topk_group,
            routed_scaling_factor=config.routed_scaling_factor,
            is_padding=is_padding,
            checked=checked,
            batch_invariant=self.batch_invariant,
        )

    def check(self, routing: Routing) -> None:
        """Raise InvalidInput for ids of no expert; synchronizes with the device."""
        check_ids(routing.topk_ids, self.width)

    def take_zero_experts(self, routing: Routing) -> tuple[Routing, Tensor | None]:
        """Split off the identity experts.

        Returns:
            The routing with ids of real experts only, -1 elsewhere, and the sum of each token's
            weights for identity experts, (T, 1), or None if the layer has none.
        """
        if not self.num_zero_experts:
            return routing, None
        zero = routing.topk_ids >= self.num_experts
        weights_T1 = torch.where(zero, routing.topk_weights, 0.0).sum(dim=1, keepdim=True)
        return Routing(routing.topk_weights, routing.topk_ids.masked_fill(zero, -1)), weights_T1
