"""On the GPU when there is one, else in Triton's interpreter."""

from triton_interpreter import device  # noqa: F401 (a fixture)
