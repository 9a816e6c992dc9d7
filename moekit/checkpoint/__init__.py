"""Expert weights straight from safetensors files, as models and quantizers write them.

    with moekit.checkpoint.Checkpoint(path) as checkpoint:
        problem = moekit.checkpoint.problem_from_config(checkpoint, parallel=parallel)
        kernel = moekit.compose(problem)
        for layer, weights in load_layers(checkpoint, None, detect(checkpoint).layers, problem):
            packed[layer] = kernel.pack(weights)

`files` knows safetensors, `names` what tensors are called, `formats` how a matrix is stored,
`detect` which of these a checkpoint has; `share` is what one rank takes of a layer, `read` takes
it, `scales` keeps scales right where a rank's share cuts their blocks.
"""

from moekit.checkpoint.detect import Detected, detect, problem_from_config
from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.formats import Format
from moekit.checkpoint.load import load_experts, load_layers
from moekit.checkpoint.names import NAMES, ExpertNames

__all__ = [
    "NAMES",
    "Checkpoint",
    "Detected",
    "ExpertNames",
    "Format",
    "detect",
    "load_experts",
    "load_layers",
    "problem_from_config",
]
