"""How a layer chooses experts: `moekit.route` with the layer's options, and identity experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import InvalidProblem
from moekit.layer.route import OPTIONS, route
from moekit.runtime.checks import check_ids, check_tensor
from moekit.untrusted.arguments import FUNCTION, MAX_EXPERTS, accept, optional, size

# (hidden_states (T, H), router_logits (T, E) fp32, top_k, renormalize) -> (weights, ids), (T, K)
RoutingFunction = Callable[[Tensor, Tensor, int, bool], "tuple[Tensor, Tensor]"]


_KINDS = {
    **OPTIONS,
    "num_experts": size(1, MAX_EXPERTS),
    "zero_expert_num": size(0, MAX_EXPERTS),
    "scoring_func": OPTIONS["scoring"],
    "custom_routing_function": optional(FUNCTION),
}
del _KINDS["scoring"], _KINDS["checked"]  # the kernel's, and by another name


@dataclass(frozen=True, kw_only=True)
class Router:
    """Logits of real and then identity experts -> `Routing`, by the arguments of `FusedMoE`.

    Raises InvalidProblem or InvalidInput for options that contradict each other, or would be
    ignored.
    """

    num_experts: int
    zero_expert_num: int
    top_k: int
    renormalize: bool
    scoring_func: str
    e_score_correction_bias: Tensor | None
    num_expert_group: int | None
    topk_group: int | None
    routed_scaling_factor: float
    custom_routing_function: RoutingFunction | None

    def __post_init__(self) -> None:
        accept(_KINDS, vars(self))
        if self.e_score_correction_bias is not None:
            check_tensor("e_score_correction_bias", self.e_score_correction_bias)
        if self.custom_routing_function is None:
            # One token of no values: `route` judges the options.
            bias = self.e_score_correction_bias
            logits = torch.empty((1, self.width), device="meta")
            self._route(logits, None if bias is None else bias.to("meta"), None, False)
            return
        ignored = {
            "scoring_func": self.scoring_func != "softmax",
            "e_score_correction_bias": self.e_score_correction_bias is not None,
            "num_expert_group": self.num_expert_group is not None,
            "topk_group": self.topk_group is not None,
            "routed_scaling_factor": self.routed_scaling_factor != 1.0,
        }
        if any(ignored.values()):
            raise InvalidProblem(
                "custom_routing_function replaces all routing, and would ignore "
                f"{', '.join(name for name, given in ignored.items() if given)}: leave one out"
            )

    @property
    def width(self) -> int:
        """Logits of a token, and where ids end."""
        return self.num_experts + self.zero_expert_num

    def __call__(
        self, x_TH: Tensor, logits_TE: Tensor, is_padding: Tensor | None, checked: bool
    ) -> Routing:
        custom = self.custom_routing_function
        if custom is None:
            return self._route(logits_TE, self.e_score_correction_bias, is_padding, checked)
        return route(
            logits_TE,
            self.top_k,
            custom=lambda logits, top_k: custom(x_TH, logits, top_k, self.renormalize),
            is_padding=is_padding,
            checked=checked,
        )

    def _route(
        self, logits: Tensor, bias: Tensor | None, is_padding: Tensor | None, checked: bool
    ) -> Routing:
        return route(
            logits,
            self.top_k,
            scoring=self.scoring_func,
            renormalize=self.renormalize,
            correction_bias=bias,
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
            is_padding=is_padding,
            checked=checked,
        )

    def check(self, routing: Routing) -> None:
        """Raises InvalidInput for ids that `check_ids` refuses; synchronizes with the device."""
        check_ids(routing.topk_ids, self.width)

    def take_zero_experts(self, routing: Routing) -> tuple[Routing, Tensor | None]:
        """Real experts' ids only, and what a token's identity experts weigh, (T, 1) or None."""
        if not self.zero_expert_num:
            return routing, None
        zero = routing.topk_ids >= self.num_experts
        identity = torch.where(zero, routing.topk_weights, 0.0).sum(dim=1, keepdim=True)
        return Routing(routing.topk_weights, routing.topk_ids.masked_fill(zero, -1)), identity
