"""Kernels with gradients: what `moekit.compose` makes for problems with ``training=True``."""

from moekit.training.kernel import TrainableKernel as TrainableKernel
