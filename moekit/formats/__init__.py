"""How checkpoints store expert weights: one file a format, with one protocol.

    format              `Format` and its `Part`s: the tensors of a matrix, and their conversion
    matrix, method      what a format looks at, and the protocol that it implements
    plain, eight_bits, gptq, awq, compressed_tensors, modelopt, quark, fp4, gguf
                        the formats
    methods             all of them, and the fields of a quantization config
    declared            the format that a config declares before any tensor is there
    schemes             which quantization scheme of moekit computes with a format

Readers of files, loaders that push tensors, and plugins of engines use the same objects.
"""
