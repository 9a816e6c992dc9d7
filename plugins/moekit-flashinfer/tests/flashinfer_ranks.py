"""The dispatchers with the library's stand-in, as rank processes import them by name."""

from __future__ import annotations

import flashinfer_standins
from moekit_flashinfer.dispatcher import OneSidedDispatcher, TwoSidedDispatcher
from moekit_flashinfer.mega import PushKernel

flashinfer_standins.install()


class OneSided(OneSidedDispatcher):
    pass


class TwoSided(TwoSidedDispatcher):
    pass


class Mega(PushKernel):
    pass
