#!/bin/bash
# Runs everything that report.py draws and tells of: run.sh [OUTPUT] [further arguments of train.py and one_process.py]
set -euo pipefail
out=$(realpath -m "${1:-outputs/engine_loop}")
cd "$(dirname "$0")"
shift $(($# > 0))
export OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error
train() { torchrun --standalone --nproc_per_node 2 train.py "$@" --output "$out"; }

train --deepspeed_config zero_dp_config.org.json "$@"
train --config zero_config "$@"
train --config zero_config.3.org "$@"
train --config zero_config.3 "$@"
train --deepspeed_config zero_dp_config.json "$@"
train --deepspeed_config zero_r_config.json --checkpoint_layers "$@"
train --deepspeed_config zero_off_config.json --optimizer CPUAdam "$@"
train --deepspeed_config zero_infinity_config.json --optimizer CPUAdam --nvme_path "$(mktemp -d)" "$@"
train --config zero_config.3.org --nan_from 40 "$@" || echo "which is what the document shows"
for precision in fp32 amp hand; do
    python one_process.py --precision $precision --output "$out" "$@" &
done
wait
torchrun --standalone --nproc_per_node 4 memory.py --output "$out"
