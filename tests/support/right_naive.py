"""`naive` as the right control of mutants that move tokens."""

from __future__ import annotations

from moekit_naive.dispatcher import NaiveDispatcher


class Naive(NaiveDispatcher):
    """The right control. Mutants change what it is given, sends, or hands to the experts."""

    BASE = "naive"

    def sent(self, x_TH):
        return x_TH

    def routed(self, routing):
        return routing

    def handed(self, tokens):
        return tokens

    def prepare(self, x_TH, routing, quantize):
        self.told = routing.max_tokens
        return super().prepare(self.sent(x_TH), routing, quantize)

    def _to_send(self, x_TH, routing, quantize):
        return super()._to_send(x_TH, self.routed(routing), quantize)

    def _arrived(self, *args):
        return self.handed(super()._arrived(*args))
