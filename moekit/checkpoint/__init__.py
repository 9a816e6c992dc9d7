"""Load expert weights from safetensors and GGUF files, as models and quantizers write them.

    with moekit.checkpoint.Checkpoint(path) as checkpoint:
        problem = moekit.checkpoint.problem_from_config(checkpoint, parallel=parallel)
        kernel = moekit.compose(problem)
        for layer, weights in load_layers(checkpoint, None, detect(checkpoint).layers, problem):
            packed[layer] = kernel.pack(weights)

The modules, from the files up:

    schema       the fields of config.json: their types and bounds, and which are understood
    tensors      tensors by name, from files or from a caller
    files        the tensors of safetensors files, by name; the checkpoint's config
    gguf_file    the tensors and the config of GGUF files
    names        what checkpoints call the tensors of their experts
    schemes      which quantization scheme computes with a stored format, and its scales
    share        which part of a layer one rank loads, and the format of each matrix, by `formats`
    config       what config.json says about a layer's experts and its routing
    read, load   reading that part, expert by expert
    pushed       the same from tensors that a caller passes one by one
"""

from moekit.checkpoint.config import Detected, detect, layer_arguments, problem_from_config
from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.load import load_experts, load_layers
from moekit.checkpoint.names import NAMES, ExpertNames
from moekit.checkpoint.pushed import PushedExperts
from moekit.checkpoint.schemes import scheme_of
from moekit.formats.format import Format, Part
from moekit.formats.method import Matrix, Method
from moekit.formats.methods import declared_format, format_of_scheme

__all__ = [
    "NAMES",
    "Checkpoint",
    "Detected",
    "ExpertNames",
    "Format",
    "Matrix",
    "Method",
    "Part",
    "PushedExperts",
    "declared_format",
    "detect",
    "format_of_scheme",
    "layer_arguments",
    "load_experts",
    "load_layers",
    "problem_from_config",
    "scheme_of",
]
