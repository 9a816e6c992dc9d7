"""Tests use one thread each (two cores run two workers), and Triton's interpreter without a GPU.

Both must be chosen before torch and triton are imported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MOEKIT_TUNED", "")  # a table must not steer the choice in tests
os.environ.setdefault("MOEKIT_CALIBRATE", "0")  # nor times that differ from run to run

import torch  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
