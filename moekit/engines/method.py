"""The part of an engine's quantization methods that moekit replaces.

A method creates a layer's parameters, prepares them after loading, and applies them. Engines ask a
method for its class and attributes in many places. So moekit's object has the attributes of the
engine's, and a class that extends the engine's under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moekit.engines.facts import Facts
from moekit.engines.mode import Engine, Mode
from moekit.errors import MoekitError
from moekit.untrusted.code import describe as reason_of

Stock: Any = object  # engines declare no types; `extended` puts the engine's class behind


class Extension(Stock):  # type: ignore[misc]
    """Override an engine's method, so that moekit computes its layer unless the engine keeps it.

    moekit_mode: What to do if moekit cannot compute the layer; OFF once the engine keeps it.
    moekit_experts: What computes the layer; None before the weights are loaded, and where the
        engine's own method does.
    """

    moekit_mode: Mode
    moekit_experts: Any = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def moekit_pack(
        self, layer: Any, engine: Engine, of: Any, facts: Callable[[Any, Any], Facts], name: str
    ) -> bool:
        """Pack the layer's loaded parameters by ``of``; return whether moekit computes the layer.

        Raises MoekitError if moekit cannot take an update of the weights. It keeps the layer: CUDA
        graphs that were captured would go on with its former weights.
        """
        before = self.moekit_experts
        if self.moekit_mode is not Mode.OFF:
            try:
                self.moekit_experts = of(layer, self, before)
            except Exception as error:  # of any kind: the engine has a kernel
                reason = str(error) if isinstance(error, MoekitError) else reason_of(error)
                if before is not None:
                    raise MoekitError(
                        f"moekit computes {name}, but not with its new weights: {reason}; send "
                        "weights that fit, or restart the engine"
                    ) from error
                engine.decline(self.moekit_mode, str(facts(layer, self)), reason)
                self.moekit_mode = Mode.OFF  # the engine keeps the layer through all updates
        return self.moekit_experts is not None


def extended(method: Any, extension: Any, mode: Mode) -> Any:
    """Return a method that lets moekit compute its layer, with the attributes of ``method``."""
    stock: Any = type(method)
    made = object.__new__(_class(extension, stock))
    object.__setattr__(made, "__dict__", vars(method))  # shared: bound methods may refer to it
    made.moekit_mode = mode
    return made


@cache
def _class(extension: Any, stock: Any) -> Any:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (extension, stock), names)
