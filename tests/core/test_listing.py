"""The command line starts at once: listing and choosing import few modules and no vendor's."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tuned_tables import PROBLEM, make_table, no_tables, write_table

import moekit

tuned = pytest.fixture(no_tables, name="tuned")


def test_listing_reasons_and_tables_import_nothing(tuned: Path) -> None:
    h200 = PROBLEM.replace(
        dtype=torch.bfloat16, device=moekit.DeviceSpec("cuda", (9, 0), "NVIDIA H200")
    )
    names = ("torch", "triton", "deepgemm", "cutlass", "marlin", "acme")
    write_table(tuned / "x.json", make_table({name: (1, 1) for name in names}, h200))
    code = """
        import sys, torch
        before = set(sys.modules)
        import moekit
        from moekit.cli.main import main
        sizes = "--num-experts 256 --top-k 8 --hidden-size 7168 --intermediate-size 2048"
        main(["plugins"])
        main(["explain", *sizes.split(), "--quant", "fp8_block", "--device", "sm90"])
        new = [name for name in sys.modules if name not in before]
        assert len(new) < 400, f"{len(new)} modules besides torch's"
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
        sizes = dict(num_experts=4, top_k=2, hidden_size=64, intermediate_size=48)
        chosen = moekit.explain(moekit.MoEProblem(**sizes, device="sm90"))
        assert "by measurement" in chosen.why, chosen
        vendors = {
            "cutlass", "deep_ep", "deep_gemm", "flashinfer", "kt_kernel", "kt_kernel_ext",
            "moekit_kernels", "pplx_kernels", "quack", "torch._dynamo", "transformers", "triton",
            "tvm_ffi", "vllm",
        }
        late = vendors & (set(sys.modules) - before)
        late |= {n for n in sys.modules if n.startswith("moekit_") and n.endswith(".experts")}
        assert not late, late
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MOEKIT")}
    environ["MOEKIT_TUNED"] = str(tuned)
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environ)
