"""Expert-parallel load balancing: replicas of busy experts, and experts that move between ranks.

    Rebalancer   one object for a model's layers: route (and record), step, rebalance
    LoadWindow   how many tokens each expert got over the last steps
    Policy       load and placement -> a better placement; `Balanced` is built in
    Placement    which expert each physical slot holds
    migrate      packed weights follow a new placement, in place, while the model is served
"""

from __future__ import annotations

from moekit.eplb.migrate import MigrationReport, migrate
from moekit.eplb.placement import Placement
from moekit.eplb.policy import Balanced, Policy, policy, register_policy
from moekit.eplb.rebalancer import LoadWindow, RebalanceReport, Rebalancer

__all__ = [
    "Balanced",
    "LoadWindow",
    "MigrationReport",
    "Placement",
    "Policy",
    "RebalanceReport",
    "Rebalancer",
    "migrate",
    "policy",
    "register_policy",
]
