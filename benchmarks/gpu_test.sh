#!/bin/sh
# Conformance on this machine's GPUs, with the python that is here: no network, no venv.
# Prints what results under benchmarks/results/ keep: versions, then pass and skip counts with reasons.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"  # of each worker with -n; torch takes all cores
PLUGINS=${PLUGINS:-$(echo plugins/*)}
for package in . $PLUGINS; do
    "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation "$package"
done
"$PYTHON" - <<'PY'
import datetime, platform
import torch, triton
import moekit
assert torch.cuda.is_available(), "no GPU here: use `make test`"
print(f"date {datetime.date.today()}  python {platform.python_version()}  torch {torch.__version__}  "
      f"triton {triton.__version__}  moekit {moekit.__version__}")
print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
PY
"$PYTHON" -m moekit plugins
exec "$PYTHON" -m pytest -rs -m "" -p no:cacheprovider -p no:benchmark tests/kit/test_conformance_builtin.py \
    tests/ranks/test_eplb_ranks.py tests/layer/test_layer_gpu.py tests/core/test_graphed_gpu.py tests/core/test_threads_gpu.py tests/layer/test_transformers_*.py $PLUGINS "$@"
