"""Listing backends and asking for their reasons imports no vendor's library."""

import os
import subprocess
import sys
import textwrap


def test_listing_and_reasons_import_nothing():
    code = """
        import sys
        import moekit
        names = dict(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
        parallel = moekit.ParallelConfig(ep_size=2)
        for device in ("cpu", "sm90"):
            for quant in ("none", "fp8_block", "fp8_tensor", "int8_w8a16", "int4_w4a8_g128"):
                problem = moekit.MoEProblem(
                    **names, device=device, quant=quant, max_num_tokens=16, parallel=parallel
                )
                found = moekit.registry()
                for spec in (*found.dispatchers.values(), *found.experts.values()):
                    spec.unsupported(problem)
        vendors = {
            "cutlass", "deep_ep", "deep_gemm", "flashinfer", "kt_kernel", "kt_kernel_ext",
            "moekit_kernels", "pplx_kernels", "quack", "triton", "tvm_ffi", "vllm",
        }
        late = vendors & set(sys.modules)
        late |= {n for n in sys.modules if n.startswith("moekit_") and n.endswith(".experts")}
        assert not late, late
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MOEKIT")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environ)
