#!/usr/bin/env bash
# What one GPU shows of hf_zero, in 8 minutes: all stages and media beside the CPU's losses, waits of the host, resume,
# teardown, two ranks on the one device, memory beside its plan, speed of offload. Exit status 1 if anything is wrong.
#
#   scripts/gpu_smoke.sh                       set-up, then the table
#   scripts/gpu_smoke.sh --results             add the table to RESULTS.md: please send that as a pull request
#   scripts/gpu_smoke.sh --folder /local_nvme  where offload to disk keeps its files
#   scripts/gpu_smoke.sh --only parity,memory  some of: parity lifetimes shared memory speed theirs
#   scripts/gpu_smoke.sh --skip-without-gpu    exit status 0, not 2, where torch finds no accelerator
#   scripts/gpu_smoke.sh --device lag --size tiny --brief   a rehearsal without hardware, on the device of tests/lag
#   scripts/gpu_smoke.sh --patience 3          three times the time limits, on a slow machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
scripts/setup.sh
exec "${HF_ZERO_VENV:-.venv}/bin/python" scripts/gpu_smoke.py "$@"
