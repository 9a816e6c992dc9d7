"""How checkpoints store expert weights: one file a format, with one protocol.

    format      `Format` and its `Part`s: the tensors of a matrix, and their conversion
    method      what a format looks at, and the protocol that it implements
    eight_bits, gptq, compressed_tensors, modelopt, fp4, gguf
                the formats
    methods     all of them, the fields of a config, and the format that a config declares

Readers of files, loaders that push tensors, and plugins of engines use the same objects.
"""
