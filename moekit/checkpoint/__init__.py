"""Load expert weights from safetensors and GGUF files, as models and quantizers write them.

    with moekit.checkpoint.Checkpoint(path) as checkpoint:
        problem = moekit.checkpoint.problem_from_config(checkpoint, parallel=parallel)
        kernel = moekit.compose(problem)
        for layer, weights in load_layers(checkpoint, None, detect(checkpoint).layers, problem):
            packed[layer] = kernel.pack(weights)

The modules, from the files up:

    headers, files   the safetensors format: which tensors a file holds, and reading them
    gguf_header, gguf_config
                     the GGUF format: its tensors, and its metadata as config.json
    schema, config   the fields of config.json: their types and bounds, and what they mean
    names            what checkpoints call the tensors of their experts
    routing          the arguments of a whole layer
    stored           the format of each matrix, by `moekit.formats`
    schemes          which quantization scheme of moekit computes with a stored format
    share, scales    which part of a layer one rank loads, and its scales where blocks are cut
    read, load       reading that part, expert by expert
    pushed, stacks   reading from tensors that a caller passes one by one, of one matrix or several
    progress         reports of how much of a checkpoint is read
"""

from moekit.checkpoint.config import Detected, detect, layer_arguments, problem_from_config
from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.load import load_experts, load_layers
from moekit.checkpoint.names import NAMES, ExpertNames
from moekit.checkpoint.pushed import PushedExperts
from moekit.checkpoint.schemes import scheme_of
from moekit.formats.format import Format
from moekit.formats.methods import declared_format, format_of_scheme

__all__ = [
    "NAMES",
    "Checkpoint",
    "Detected",
    "ExpertNames",
    "Format",
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
