"""The example's fused kernel as the right control of mutants, in parts that they change."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend" / "src"
if str(EXAMPLE) not in sys.path:
    sys.path.append(str(EXAMPLE))

import acme_moe  # noqa: E402
from acme_moe.fused import AcmeFused  # noqa: E402


class Fused(AcmeFused):
    """Right on one rank."""

    BASE = "on one rank"


class FusedOnRanks(AcmeFused):
    """Right on several."""

    BASE = "on ranks"


__all__ = ["EXAMPLE", "Fused", "FusedOnRanks", "acme_moe"]
