"""A check for ``python -m moekit doctor``: is there a tuned table for this machine's GPU?"""

from __future__ import annotations

from collections.abc import Iterator

from moekit.plugin import DeviceSpec

from .tables import FILES

Finding = tuple[str, str, str]  # what was tried; ok, no or bad; what was found


def checks(device: DeviceSpec | None = None) -> Iterator[Finding]:
    """Look for tables of ``device``; default: this machine's."""
    device = device or DeviceSpec.detect()
    if device.type != "cuda":
        yield "tuned tiles", "no", "no GPU to have tiles for"
        return
    found = len(FILES.known(device.name)) if device.name else 0
    if found:
        yield "tuned tiles", "ok", f"{found} problems were measured on {device.name}"
    else:
        text = f"none for {device.name or device}; a heuristic chooses tiles"
        yield "tuned tiles", "no", f"{text} (python -m moekit tune triton measures them)"
