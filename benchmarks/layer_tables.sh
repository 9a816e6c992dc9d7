#!/bin/sh
# Write tables of whole layers between this machine's GPUs, with equal capacity for every dispatcher, as Markdown and JSON
# to the folder $1. The report's second table has eager and host times. The script takes about two minutes on two GPUs.
# FlashInfer compiles at first use. docs/measured.md says where it finds compiled modules.
set -u
OUT=${1:?usage: benchmarks/layer_tables.sh FOLDER [DISPATCHERS]}
DISPATCHERS=${2:-'nvlink_ht,naive,naive:16|nvlink_ht,flashinfer_alltoall,flashinfer_alltoall_two_sided,flashinfer_allgather'}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$OUT"
layers() {  # NAME LAYER SCHEME TOKENS
    python3 -m moekit bench --layers --layer "$2" --quant "$3" --tokens "$4" --capacity 8192 --experts triton \
        --dispatchers "$DISPATCHERS" --seconds 110 --json "$OUT/$1.json" --markdown "$OUT/$1.md"
    cat "$OUT/$1.md"
}
layers qwen3-30b qwen3-30b none 1,8192,16,128,512,1024,4096
layers dsv3 dsv3 fp8_block 1,4096,16,128,1024
