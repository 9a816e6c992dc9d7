"""Load pplx-kernels."""

from __future__ import annotations

from typing import Any

from moekit.errors import BackendBroken


def all_to_all() -> Any:
    """Return the library's class AllToAll. Raises BackendBroken if the package is installed, but
    the library behind it did not load."""
    import pplx_kernels

    if not hasattr(pplx_kernels.ops._ops, "all_to_all_intranode_create"):
        raise BackendBroken(
            "pplx_kernels is installed, but its library does not load (it logged the reason): "
            "build it for this version of torch"
        )
    return pplx_kernels.AllToAll
