"""Expert-parallel load balancing: replicate hot experts, and move experts between ranks.

Rebalancer   counts the load of a model's layers and moves their experts
Policy       chooses a better placement from the load; `Balanced` is built in
Placement    the logical expert of each physical expert
migrate      moves packed weights to a new placement, in place, between two calls
"""

from moekit.eplb.migrate import MigrationReport as MigrationReport
from moekit.eplb.migrate import migrate as migrate
from moekit.eplb.policy import Balanced as Balanced
from moekit.eplb.policy import Policy as Policy
from moekit.eplb.policy import improve as improve
from moekit.eplb.rebalancer import LoadWindow as LoadWindow
from moekit.eplb.rebalancer import Rebalancer as Rebalancer
from moekit.eplb.rebalancer import RebalanceReport as RebalanceReport
from moekit.layer.replicas import Placement as Placement
