"""Checks for ``python -m moekit doctor``: can the user's tables of tiles be read, and is there one
for this machine's GPU?
"""

from __future__ import annotations

from collections.abc import Iterator

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec

from .tables import FILES

Finding = tuple[str, str, str]  # what was tried; ok, no or bad; what was found


def checks(device: DeviceSpec | None = None) -> Iterator[Finding]:
    """Read the user's tables, and look for a table of ``device``; default: this machine's."""
    for file in sorted(FILES.user_folder().glob("[!.]*.json")):
        try:
            FILES.read(file)
        except MoekitError as error:
            yield f"{FILES.owner}/{file.name}", "bad", str(error)
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
