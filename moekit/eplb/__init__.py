"""Expert-parallel load balancing: replicas of busy experts, and experts that move between ranks.

Rebalancer   for a model's layers: route (and count), step, rebalance
Policy       load and placement -> a better placement; `Balanced` is built in
Placement    which expert each physical slot holds
migrate      packed weights follow a new placement, in place, between two calls
"""

from moekit.eplb.migrate import MigrationReport as MigrationReport
from moekit.eplb.migrate import migrate as migrate
from moekit.eplb.policy import POLICIES as POLICIES
from moekit.eplb.policy import Balanced as Balanced
from moekit.eplb.policy import Policy as Policy
from moekit.eplb.policy import improve as improve
from moekit.eplb.rebalancer import LoadWindow as LoadWindow
from moekit.eplb.rebalancer import Rebalancer as Rebalancer
from moekit.eplb.rebalancer import RebalanceReport as RebalanceReport
from moekit.problem.placement import Placement as Placement
