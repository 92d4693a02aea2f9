#!/usr/bin/env bash
# What several GPUs of a host show of hf_zero, over their own backend (NCCL): all stages and media beside one process's
# losses, with the waits and collectives of a step; a rank that is killed; a checkpoint at another number of ranks; tokens
# per second beside DDP and FSDP2. 10 minutes. Exit status 1 if anything is wrong, 2 where there are not two GPUs.
#
#   scripts/multi_gpu_smoke.sh                       set-up, then the table, on all GPUs
#   scripts/multi_gpu_smoke.sh --ranks 2             on two of them
#   scripts/multi_gpu_smoke.sh --results             add the table to RESULTS.md: please send that as a pull request
#   scripts/multi_gpu_smoke.sh --folder /local_nvme  where offload to disk keeps its files
#   scripts/multi_gpu_smoke.sh --only parity,killed  some of: parity killed resume speed
#   scripts/multi_gpu_smoke.sh --device lag --size tiny --brief   a rehearsal without hardware, on the device of tests/lag
#   scripts/multi_gpu_smoke.sh --patience 3          three times the time limits, on a slow machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
scripts/setup.sh
exec "${HF_ZERO_VENV:-.venv}/bin/python" scripts/multi_gpu_smoke.py "$@"
