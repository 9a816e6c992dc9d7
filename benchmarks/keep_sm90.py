"""Zero a library's device code that an H100 or H200 does not need, so that xz makes it small.

    python benchmarks/keep_sm90.py IN.so OUT.so [REGEX]

The script keeps cubins of sm_90 in the section .nv_fatbin. With REGEX it keeps only cubins with a
kernel whose name matches it (as readelf and c++filt print names). It keeps all headers, so the
library loads as before. A kernel without its code fails when it is launched.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FATBIN, _CUBIN, _SM90 = b"\x50\xed\x55\xba", 2, 90


def section(path: str) -> tuple[int, int]:
    """Return the offset of .nv_fatbin in a file, and its number of bytes."""
    said = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True)
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+ (\w+) (\w+)", said.stdout)
    if found is None:
        sys.exit(f"{path} has no section .nv_fatbin")
    return int(found[1], 16), int(found[2], 16)


def entries(data: bytes, start: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the kind (2 = cubin), architecture and offsets of each piece of device code."""
    at = start
    while at < start + size:
        if data[at : at + 4] != _FATBIN:
            at += 8
            continue
        header, length = struct.unpack_from("<6xHQ", data, at)
        entry, at = at + header, at + header + length
        while entry < at:
            kind, header, length = struct.unpack_from("<H2xIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            yield kind, architecture, slice(entry + header, entry + header + length)
            entry += header + length


def kernels(cubin: bytes) -> str:
    """Return the names of the kernels of an uncompressed cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = f"readelf -sW {file.name} | grep FUNC | awk '{{print $NF}}' | c++filt"
        return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


def keep(source: str, target: str, pattern: str = "") -> None:
    """Write a library without the code of other architectures, and of kernels the pattern omits."""
    data = bytearray(Path(source).read_bytes())
    kept = zeroed = 0
    for kind, architecture, place in entries(bytes(data), *section(source)):
        needed = (kind, architecture) == (_CUBIN, _SM90)
        if needed and pattern:
            needed = re.search(pattern, kernels(bytes(data[place]))) is not None
        if needed:
            kept += place.stop - place.start
        else:
            zeroed += place.stop - place.start
            data[place] = bytes(place.stop - place.start)
    Path(target).write_bytes(data)
    print(f"{source}: kept {kept / 1e6:.1f} MB, zeroed {zeroed / 1e6:.1f} MB")


if __name__ == "__main__":
    keep(*sys.argv[1:])
