"""The tuned table into which `tune --select` puts measurements, and what it has already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from moekit.plugin import DeviceSpec, MoEProblem, check_writable, device_file, replace_file

from .internals import Key, Record, Table, user_path
from .internals import table as tuned_tables
from .records import Result, now


def table_file(output: Path | None, device: DeviceSpec) -> Path:
    """Return ``output`` if it is a file, else the device's file in that folder or the user's."""
    place = output or user_path()
    return place if place.suffix == ".json" else place / device_file(device.name or device.type)


def add_to(file: Path, table: Table) -> None:
    """Merge ``table`` into ``file`` atomically; other writers wait."""
    check_writable(file)
    with FileLock(file.with_name(f".{file.name}.lock")):
        old = tuned_tables.read(file) if file.exists() else {}
        replace_file(file, tuned_tables.encode(tuned_tables.merge([old, table])))


class TunedTable:
    """The table that a run fills.

    Args:
        made_with: (dispatcher, experts) -> the versions that a time depends on.
    """

    def __init__(self, file: Path, made_with: Mapping[tuple[str, str], str]) -> None:
        self.file, self.made_with = file, made_with
        add_to(file, {})  # a file that cannot be read or written ends the run before it begins
        self._known = self.read()

    def read(self) -> Table:
        return tuned_tables.read(self.file)

    def knows(self, problem: MoEProblem, names: tuple[str, str], tokens: int) -> bool:
        """Return whether the table had a measurement of the same versions when the run began."""
        record = self._known.get(Key.of(problem), {}).get(names, {}).get(tokens)
        return record is not None and record.made_with == self.made_with[names]

    def add(
        self,
        problem: MoEProblem,
        tokens: int,
        measured: Mapping[tuple[str, str], Result],
    ) -> None:
        """Write one row per combination; a wrong result has no time."""
        times = {}
        for names, r in measured.items():
            us = round(r.us, 3) if r.right and r.us is not None else None
            times[names] = {tokens: Record(us, r.copied, now(), self.made_with[names])}
        add_to(self.file, {Key.of(problem): times})
