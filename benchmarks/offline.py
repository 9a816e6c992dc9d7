"""Pack wheels into one small archive, for a GPU machine without network.

    pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 vllm==0.26.0
    python benchmarks/offline.py site.tar.xz wheels/*.whl --drop vllm/vllm-rs \\
        --kernels '*_vllm_fa3*=C<128> >, 128, cutlass::bfloat16_t|FwdCombine|prepare_varlen'

The archive holds a folder for PYTHONPATH. Of device code it keeps cubins of sm_90 (see
keep_sm90.py), and of other libraries no symbols. --drop leaves out files that match a pattern.
--kernels PATTERN=REGEX keeps only the kernels of such a library whose names match. PATTERN=all
keeps the whole library, for example one whose code for Hopper is PTX.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from keep_sm90 import keep


def unpack(wheel: Path, site: Path, drop: list[str]) -> None:
    """Unpack a wheel, with its packages beside each other as pip would lay them out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if name.endswith("/") or any(fnmatch(name, pattern) for pattern in drop):
                continue
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue  # scripts and headers
                parts = parts[2:]
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def shrink(site: Path, kernels: dict[str, str]) -> None:
    """Zero the device code of other architectures in the libraries below ``site``, and strip
    those without device code."""
    for library in site.rglob("*.so*"):
        name = str(library.relative_to(site))
        regex = next((regex for pattern, regex in kernels.items() if fnmatch(name, pattern)), "")
        sections = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True)
        if ".nv_fatbin" not in sections.stdout:
            subprocess.run(["strip", "-s", library], stderr=subprocess.DEVNULL)  # some are no ELF
        elif regex != "all":
            keep(str(library), str(library), regex)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--drop", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--kernels", action="append", default=[], metavar="PATTERN=REGEX")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for wheel in args.wheels:
            unpack(wheel, site, args.drop)
        shrink(site, dict(rule.split("=", 1) for rule in args.kernels))
        subprocess.run(
            ["tar", "-cJf", args.archive.resolve(), "-C", folder, "site"],
            env=os.environ | {"XZ_OPT": "-9e -T2"},
            check=True,
        )
    print(f"{args.archive}: {args.archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
