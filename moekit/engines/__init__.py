"""Code that moekit's packages for inference engines share (moekit-vllm and moekit-sglang).

An engine creates and loads a layer's parameters. moekit reads them, packs them and computes with
them, unless the engine keeps the layer.

    mode      the variable with the values on, off and require, and the engine's log
    weights   a layer's parameters as `moekit.ExpertWeights`
    method    the quantization method of a layer, which moekit extends
    packed    packed weights that the layer holds as parameters and that keep their memory
    kernels   the kernel of a problem, shared by its layers, or why the engine's is better
"""
