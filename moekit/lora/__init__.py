"""Adapters (LoRA) on experts: read them, cut them to a rank's share, and keep them in a stack.

problem = MoEProblem(..., adapters=AdapterSlots(count=8, rank=32))
kernel = moekit.compose(problem)
stack = moekit.lora.Stack(problem, device)
stack.load("poet", moekit.lora.read(tensors, config, problem, "model.layers.0.mlp.experts"))
weights = stack.on(kernel.pack(weights))
out = kernel(x, weights, Routing(topk_weights, topk_ids, adapter_ids=stack.ids(names)))
"""

from moekit.contract import Adapters as Adapters
from moekit.lora.adapter import Adapter as Adapter
from moekit.lora.read import read as read
from moekit.lora.read import tensors_of as tensors_of
from moekit.lora.stack import Stack as Stack
from moekit.problem import AdapterSlots as AdapterSlots

__all__ = ["Adapter", "AdapterSlots", "Adapters", "Stack", "read", "tensors_of"]
