#!/usr/bin/env bash
# all.sh [FOLDER]: all runs of the report, in the root of the clone, and the report, in FOLDER [outputs/images]
set -euo pipefail
folder=${1:-outputs/images}
export OMP_NUM_THREADS=1
for way in plain dp; do
    python recipes/images/train.py --output "$folder" --way $way
done
for run in "--way ddp" --precision\ fp32\ --stage\ {0,1,2,3} --precision\ fp32\ --offload\ --stage\ {2,3} \
    --precision\ {bf16,fp16,O1,O2,O3} "--epochs 10" "--net Net --epochs 4 --deepspeed_config recipes/fp8/ds_config.json"; do
    # shellcheck disable=SC2086  # a run is several words
    torchrun --standalone --nproc_per_node 2 recipes/images/train.py --output "$folder" $run
done
python recipes/images/report.py "$folder" --output "$folder"
