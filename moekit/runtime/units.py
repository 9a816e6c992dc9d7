"""Numbers of bytes as people read them."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Return ``nbytes`` in B, KiB, MiB or GiB, with three digits or more."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
