"""Device code and the functions that launch it.

gemm                      grouped GEMM over blocks of rows, all schemes
gemv                      dot products, for a few tokens
packed                    products with 4-bit weights, called by gemm
sorted_gemm               grouped GEMM over expert-sorted rows, by tensor descriptors
specialized               the same by specialized warps (Gluon, Hopper), 16 bits
specialized_fp8           the same for fp8 with block scales
specialized_tokens        the same with swap-AB, 16 bits
token_tiles               the list of swap-AB tiles
training_gemm             products of a training step: gathers, h and its gradient, outer sums
derivatives               derivatives of the activations, and the other sums of a backward
warps                     code that the specialized kernels share
operands, tiles           the records of arguments, and of tile and launch parameters
"""
