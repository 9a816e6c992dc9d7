"""Formats of checkpoints that plugins read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from moekit.contract.specs import TARGET, TEXT, Loadable
from moekit.errors import InvalidInput
from moekit.untrusted.arguments import accept_fields, matching

_NAME = matching(
    "lower-case letters, digits, - and _, at most 64 with a letter first",
    lambda name: type(name) is str and re.fullmatch("[a-z][a-z0-9_-]{0,63}", name),
)
_KINDS = {"name": _NAME, "target": TARGET, "install_hint": TEXT}


@dataclass(frozen=True, kw_only=True)
class FormatSpec(Loadable):
    """A format of checkpoints that a plugin adds to moekit's.

    name: the ``quant_method`` in the config of a checkpoint.
    target: ``"package.module:Class"`` of a `moekit.checkpoint.Method`. It is imported when a
        config names the format, or when no config says how tensors are stored that no format of
        moekit has.
    install_hint: the command that provides what the module needs.
    """

    name: str
    target: str
    install_hint: str = ""

    kind: ClassVar[str] = "checkpoint format"
    interface: ClassVar[str] = "Method"

    def __post_init__(self) -> None:
        accept_fields(self, _KINDS, InvalidInput)
