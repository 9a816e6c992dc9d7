"""Code that moekit's packages for inference engines share (moekit-vllm and moekit-sglang).

An engine creates and loads a layer's parameters. moekit reads them, packs them and computes with
them, unless the engine keeps the layer. The path of a layer, in this order:

    mode      the variable with the values on, off and require, and the engine's log
    method    the quantization method of a layer, which moekit extends
    facts     what the engine says of the layer, and the layer's problem
    readers   the layer's parameters as `moekit.ExpertWeights`
    kernels   the kernel of a problem, shared by its layers, or why the engine's is better
    experts   the kernel and packed weights of a layer, their updates, and the warm-up
"""
