#!/usr/bin/env bash
# What GPUs show of hf_zero, as a table. Exit status: 0 all right, 1 something is wrong, 2 where there are too few GPUs.
# One GPU, 4 minutes: all stages and media beside the CPU's losses, waits of the host, resume, teardown, memory beside its
# plan, speed of offload. Several ranks, over their own backend (NCCL), 10 minutes: all stages and media beside one
# process's losses, with the waits and collectives of a step; a rank that is killed or runs another program; a checkpoint
# at another number of ranks; tokens per second beside DDP and FSDP2.
#
#   scripts/smoke.sh                           set-up, then the table of one GPU
#   scripts/smoke.sh --ranks 2 --one-device    two ranks on one GPU: NCCL takes them for two hosts
#   scripts/smoke.sh --ranks 2                 two GPUs; 0: all of the host
#   scripts/smoke.sh --results                 add the table to RESULTS.md: please send that as a pull request
#   scripts/smoke.sh --folder /local_nvme      where offload to disk keeps its files
#   scripts/smoke.sh --only parity,memory      some of: parity lifetimes memory speed theirs; parity failures resume speed
#   scripts/smoke.sh --skip-without-gpu        exit status 0, not 2, where torch finds too few accelerators
#   scripts/smoke.sh --device lag --size tiny --brief   a rehearsal without hardware, on the device of tests/lag
#   scripts/smoke.sh --patience 3              three times the time limits, on a slow machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
scripts/setup.sh
exec "${HF_ZERO_VENV:-.venv}/bin/python" scripts/smoke.py "$@"
