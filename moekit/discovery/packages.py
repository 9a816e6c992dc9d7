"""The packages of moekit's repository: what each offers, for messages where it is not installed.

This is data only: what an installed package can do is declared by its own specs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from moekit.contract.specs import importable
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class Package:
    """A package in the repository's folder ``plugins``.

    dispatchers, experts: the names that it offers. commands: what each is for.
    devices, schemes: what these are made for; schemes are patterns.
    needs: other packages of the repository that it imports.
    """

    name: str
    dispatchers: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        """The command that installs it, in a clone of the repository."""
        folders = [f"./plugins/{name}" for name in (*self.needs, self.name)]
        return f"pip install {' '.join(folders)}"

    @property
    def installed(self) -> bool:
        return importable(self.name.replace("-", "_"))


def _package(name: str, *, commands: Mapping[str, str] | None = None, **words: str) -> Package:
    """Return a package; its other fields are lists of words."""
    facts: dict[str, Any] = {field: tuple(text.split()) for field, text in words.items()}
    return Package(name, commands=commands or {}, **facts)


_KERNELS = "moekit-kernels"
# The fastest first.
REPOSITORY = (
    _package(
        "moekit-triton", experts="triton triton_batched", devices="cuda>=8.0", needs=_KERNELS,
        schemes="none fp8_* int8_channel_token int8_w8a16 int4_w4a16_*[!r] mxfp4_w4a16",
    ),
    _package(
        "moekit-marlin", experts="marlin marlin_batched", devices="cuda>=8.0", needs=_KERNELS,
        schemes="fp8_w8a16_* int8_w8a16 int4_w4a16_* mxfp4_w4a16 nvfp4_w4a16",
    ),
    _package(
        "moekit-deepgemm", experts="deepgemm deepgemm_batched", devices="cuda==9.0",
        schemes="none fp8_block", needs=_KERNELS,
    ),
    _package(
        "moekit-cutlass", experts="cutlass cutlass_batched", devices="cuda==9.0",
        schemes="none fp8_tensor fp8_tensor_static fp8_channel_token", needs=_KERNELS,
    ),
    _package(
        "moekit-ktransformers", experts="ktransformers", devices="cpu",
        schemes="fp8_block fp8_w8a16_block int4_w4a16_g32 mxfp4_w4a16",
    ),
    _package("moekit-naive", dispatchers="naive", devices="cpu cuda"),
    _package("moekit-nvlink", dispatchers="nvlink_ht nvlink_ll", devices="cuda>=8.0",
             needs=_KERNELS),
    _package(
        "moekit-flashinfer", experts="flashinfer_cutlass", devices="cuda==9.0", needs=_KERNELS,
        dispatchers="flashinfer_alltoall flashinfer_alltoall_two_sided flashinfer_allgather",
        schemes="none fp8_tensor_static fp8_block",
    ),
    _package(
        "moekit-deepep", dispatchers="deepep_ht deepep_ll deepep_elastic", devices="cuda==9.0"
    ),
    _package("moekit-nccl", dispatchers="nccl_ht nccl_ll", devices="cuda>=9.0"),
    _package("moekit-pplx", dispatchers="pplx", devices="cuda>=9.0"),
    _package(
        "moekit-bench",
        commands={
            "bench": "time experts, dispatchers (--dispatch) or whole layers (--layers)",
            "tune": "measure what `compose` chooses from, or what its choice loses",
        },
    ),
)  # fmt: skip


def offering(kind: str, name: str) -> Package | None:
    """Return the package with that name among its ``dispatchers``, ``experts`` or ``commands``."""
    return next((each for each in REPOSITORY if name in getattr(each, kind)), None)


def not_installed(problem: MoEProblem) -> Iterator[str]:
    """Yield a line for dispatchers and one for experts that packages have for ``problem``."""
    device, scheme = problem.device, problem.quant.name
    here = [
        each for each in REPOSITORY if any(map(device.meets, each.devices)) and not each.installed
    ]
    able = [each for each in here if any(fnmatchcase(scheme, known) for known in each.schemes)]
    moving = [each for each in here if each.dispatchers] if problem.parallel.moves_tokens else []
    for what, packages in (("a dispatcher", moving), ("experts", able)):
        if packages:
            first, *others = packages
            also = f"; so have {', '.join(each.name for each in others)}" if others else ""
            yield (
                f"{first.name} has {what} for this problem and is not installed: {first.install} "
                f"(in a clone of moekit's repository){also}"
            )
