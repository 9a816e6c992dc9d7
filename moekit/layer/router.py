"""The router of a layer: `moekit.route` with the layer's options, and identity experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moekit.contract import Routing
from moekit.errors import InvalidInput, InvalidProblem
from moekit.layer.route import OPTIONS, check_hash_table, route
from moekit.layer.simulate import SIMULATED, simulate_routing
from moekit.runtime.checks import check_tensor
from moekit.untrusted.arguments import FUNCTION, MAX_EXPERTS, accept_fields, choice, optional, size

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
    "simulated": optional(choice(SIMULATED)),
}


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
        zero_expert_num: Number of identity experts. Their ids and logits follow those of the
            ``num_experts`` real ones.
        hash_table: (V, K) ids of each vocabulary token's experts, as in `moekit.route`. Calls then
            need ``token_ids``. A Parameter may be filled later.
        simulated: For benchmarks: choose experts at random instead of by logits, as
            `moekit.simulate_routing` does for this kind, the same at every call.

    Raises:
        InvalidProblem: A value has the wrong type, or one would be ignored.
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
    simulated: str | None = None

    def __post_init__(self) -> None:
        accept_fields(self, _KINDS)
        if self.e_score_correction_bias is not None:
            check_tensor("e_score_correction_bias", self.e_score_correction_bias)
        if self.hash_table is not None:
            check_tensor("hash_table", self.hash_table)
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        ways = ("custom_routing_function", "hash_table", "simulated")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidProblem(f"{' and '.join(given)} each choose all experts: leave one out")
        chooses = {
            "e_score_correction_bias": self.e_score_correction_bias is not None,
            "num_expert_group": self.num_expert_group is not None,
            "topk_group": self.topk_group is not None,
        }
        if self.hash_table is not None and any(chooses.values()):
            raise InvalidProblem(
                "hash_table chooses all experts and would ignore "
                f"{', '.join(name for name, found in chooses.items() if found)}: leave one out"
            )
        ignored = {
            "scoring_func": self.scoring_func != "softmax",
            **chooses,
            "routed_scaling_factor": self.routed_scaling_factor != 1.0,
        }
        if self.custom_routing_function is not None and any(ignored.values()):
            raise InvalidProblem(
                "custom_routing_function replaces all routing and would ignore "
                f"{', '.join(name for name, given in ignored.items() if given)}: leave one out"
            )

    def on(self, device: torch.device) -> RoutingConfig:
        """Return the same with its tensors on ``device``. Parameters stay with their owners.

        Raises:
            InvalidInput: A tensor is a meta tensor.
        """
        moved: dict[str, Any] = {}
        for name in ("e_score_correction_bias", "hash_table"):
            tensor = getattr(self, name)
            if tensor is None or isinstance(tensor, nn.Parameter):
                continue
            if tensor.is_meta:
                raise InvalidInput(
                    f"{name} is a meta tensor, which holds no values: make it on {device}, where "
                    "it may be filled later"
                )
            moved[name] = tensor.to(device)
        return replace(self, **moved) if moved else self

    def __str__(self) -> str:
        if self.custom_routing_function is not None:
            words = [getattr(self.custom_routing_function, "__name__", "custom function")]
        else:
            words = [self.scoring_func]
        words = [f"simulated: {self.simulated}"] if self.simulated is not None else words
        words += ["hash table"] * (self.hash_table is not None)
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
        if self.config.simulated is not None and self.batch_invariant:
            raise InvalidProblem(
                "simulated routing depends on a token's place in the call, so it cannot be "
                "batch-invariant: leave one out"
            )
        table = self.config.hash_table
        if table is not None:  # the values of a Parameter may come later
            values = table.to("meta") if isinstance(table, nn.Parameter) else table
            check_hash_table(values, self.num_experts, self.top_k)
        if self.config.custom_routing_function is None:
            # `route` checks the options on one token without values.
            bias = self.config.e_score_correction_bias
            if bias is not None and bias.shape != (self.width,):
                raise InvalidInput(
                    f"e_score_correction_bias must have shape ({self.width},), a number for each "
                    f"expert (got {tuple(bias.shape)})"
                )
            logits = torch.empty((1, self.width), device="meta")
            token = torch.zeros(1, dtype=torch.int64, device="meta")
            meta = None if table is None else (table.to("meta"), token)
            self._route(logits, None if bias is None else bias.to("meta"), None, False, meta)

    @property
    def num_zero_experts(self) -> int:
        """The number of identity experts."""
        return self.config.zero_expert_num

    @property
    def width(self) -> int:
        """The number of logits of each token; ids are below it."""
        return self.num_experts + self.num_zero_experts

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
        custom, table = config.custom_routing_function, config.hash_table
        if (table is None) != (token_ids is None):
            raise InvalidInput(
                "this layer routes by hash_table: give token_ids (vLLM's input_ids)"
                if token_ids is None
                else "token_ids have no effect without a hash_table: leave them out"
            )
        if config.simulated is not None:
            return self._simulate(len(logits_TE), logits_TE.device, is_padding)
        if custom is None:
            hashed = None if table is None or token_ids is None else (table, token_ids)
            bias = config.e_score_correction_bias
            return self._route(logits_TE, bias, is_padding, checked, hashed)
        return route(
            logits_TE,
            self.top_k,
            custom=lambda logits, top_k: custom(x_TH, logits, top_k, config.renormalize),
            is_padding=is_padding,
            checked=checked,
        )

    def _simulate(
        self, num_tokens: int, device: torch.device, is_padding: Tensor | None
    ) -> Routing:
        kind = self.config.simulated
        assert kind is not None
        made = simulate_routing(kind, num_tokens, self.num_experts, self.top_k, device=device)
        if is_padding is None:
            return made
        weights = made.topk_weights.masked_fill(is_padding[:, None], 0.0)
        return Routing(weights, made.topk_ids.masked_fill(is_padding[:, None], -1))

    def _route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        is_padding: Tensor | None,
        checked: bool,
        hashed: tuple[Tensor, Tensor] | None,
    ) -> Routing:
        config, (table, token_ids) = self.config, hashed or (None, None)
        return route(
            logits,
            self.top_k,
            scoring=config.scoring_func,
            renormalize=config.renormalize,
            correction_bias=bias,
            num_expert_group=config.num_expert_group,
            topk_group=config.topk_group,
            routed_scaling_factor=config.routed_scaling_factor,
            hash_table=table,
            token_ids=token_ids,
            is_padding=is_padding,
            checked=checked,
            batch_invariant=self.batch_invariant,
        )

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
