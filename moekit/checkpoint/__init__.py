"""Expert weights straight from safetensors files, as models and quantizers write them.

    with moekit.checkpoint.Checkpoint(path) as checkpoint:
        problem = moekit.checkpoint.problem_from_config(checkpoint, parallel=parallel)
        kernel = moekit.compose(problem)
        for layer, weights in load_layers(checkpoint, None, detect(checkpoint).layers, problem):
            packed[layer] = kernel.pack(weights)

`headers` and `files` know safetensors, `names` what tensors are called, `formats` how a matrix may
be stored, `probe` how it is, `schemes` which of moekit's schemes computes with it, `config` the
sizes; `share` is what one rank takes of a layer and what is wrong with it, `read` takes it, and
`scales` keeps scales right where a rank's share cuts their blocks; `load` is all of it.
"""

from moekit.checkpoint.config import Detected, detect, problem_from_config
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
