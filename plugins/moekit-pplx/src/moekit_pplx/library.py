"""Find and load pplx-kernels."""

from __future__ import annotations

from typing import Any

from moekit.errors import BackendBroken
from moekit.plugin import VendorLibrary

PPLX = VendorLibrary(
    distribution="pplx-kernels", versions=">=0",
    install_hint="build it from github.com/perplexityai/pplx-kernels",
)  # fmt: skip
_CALLS = {
    "AllToAll.intranode": "0 max_num_tokens num_experts experts_per_token rank world_size dp_size "
    "hidden_dim hidden_dim_bytes hidden_dim_scale_bytes group_name",
    "AllToAll.dispatch": "8 do_send do_recv",
    "AllToAll.combine": "6 do_send do_recv",
}


def all_to_all() -> Any:
    """Return the library's class AllToAll. Raises BackendBroken if the package is installed, but
    the library behind it did not load, or its methods take other arguments."""
    library = PPLX.load("pplx_kernels", {})
    if not hasattr(library.ops._ops, "all_to_all_intranode_create"):
        raise BackendBroken(
            f"{PPLX.describe() or 'pplx_kernels'} is installed, but its library does not load (it "
            "logged the reason): build it for this version of torch"
        )
    PPLX.check(library, _CALLS)
    return library.AllToAll
