"""On the GPU when there is one, else in Triton's interpreter."""

from moekit.testing.device import device  # noqa: F401 (a fixture)
