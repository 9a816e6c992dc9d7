"""Choice by measurement: tuned tables, and what is chosen from them.

    files.py   files of tables, and which measured sizes are near
    table.py   measured times by problem and combination
    choice.py  a problem's times, or the nearest shape's, and what follows from them
    plan.py    from times over tokens to a choice for each range of tokens

moekit-bench measures and writes the tables (``python -m moekit tune``). docs/bench.md documents the
files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from moekit.problem import MoEProblem
from moekit.untrusted.folders import cache_folder

VARIABLE = "MOEKIT_TUNED"
# A folder for each architecture.
SHIPPED = Path(__file__).with_name("shipped")


def any_for(problem: MoEProblem) -> bool:
    """Return whether there may be tables for a problem; most processes need not read any.

    Tables say nothing of batch-invariant problems: no backend was measured in that mode, and the
    choice must not depend on sizes. They say nothing of backwards either.
    """
    named = os.environ.get(VARIABLE)
    if problem.batch_invariant or problem.training or named == "":
        return False
    folder = SHIPPED / slug(str(problem.device))
    return bool(named) or folder.is_dir() or os.path.exists(user_path())


def user_path() -> Path:
    """Return the file or folder of the user's tables."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return cache_folder() / "moekit" / "tuned"


def slug(name: str) -> str:
    """Return a device's name as a file's: ``nvidia-h200`` for ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
