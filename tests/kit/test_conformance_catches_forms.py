"""Wrong experts that are right in the main scheme, layout and shape, and wrong in another one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import pytest
import torch
from conformance_catches import killed_by, mutants_of
from right_experts import Plain

# -- weights --------------------------------------------------------------------------------------


class Packs(Plain):
    """Packs what `changed` makes of some of the packed tensors."""

    NAMES = ()

    def pack(self, weights):
        packed = super().pack(weights)
        held = {n: self.changed(packed[n]) for n in self.NAMES if n in packed.experts}
        return replace(packed, experts={**packed.experts, **held})

    @abstractmethod
    def changed(self, tensor): ...


@killed_by("test_scheme", "int4_w4a16_g32_zp")
@killed_by("test_scheme", "int4_w4a16_channel_zp")
class ZeroPointOfZero(Packs):
    """Takes a zero point of 0 for no zero point, which is 8."""

    NAMES = ("w13_zero_points", "w2_zero_points")

    def changed(self, tensor):
        return torch.where(tensor == 0, 8, tensor).to(tensor.dtype)


@killed_by("test_scheme", "int4_w4a16_channel_zp")
class ZeroPointsPlusOne(ZeroPointOfZero):
    """Stores zero points plus one in four bits, where 15 becomes 0 and means -1."""

    def changed(self, tensor):
        return torch.where(tensor == 15, 255, tensor).to(tensor.dtype)


@pytest.mark.parametrize("mutant", mutants_of(__name__))
def test_killed(mutant):
    mutant.check()
