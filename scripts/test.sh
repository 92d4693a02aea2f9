#!/usr/bin/env bash
# Set-up, then the tests.
#
#   scripts/test.sh                 all that a change needs
#   scripts/test.sh --fast          without those marked slow
#   scripts/test.sh --lag           those that stand in for a GPU (tests/lag); all others run without them
#   scripts/test.sh --nightly       whole matrices of which the others run a part: tests/nightly, and what is marked so
#   scripts/test.sh [--fast] ARGS   ARGS go to pytest: scripts/test.sh tests/sharding/test_layout.py -k pieces
#
# Three tests run at a time: ranks wait for each other half of their time, and two tests leave two cores idle for a
# sixth of it. `-n 0` runs one after the other, also in a debugger.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
selection=(--ignore=tests/lag -m "not nightly")
case "${1:-}" in
--fast)
    selection=(--ignore=tests/lag -m "not nightly and not slow")
    shift
    ;;
--lag)
    selection=(tests/lag -m "not nightly")
    shift
    ;;
--nightly)
    selection=(-m nightly --dist loadfile) # what a module prepares is made once
    shift
    ;;
esac
scripts/setup.sh
# One thread per process: the tests start several processes on one machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
# Without compiled modules every worker compiles the tests anew, for 3 seconds, and every interpreter that a test starts
# the package.
unset PYTHONDONTWRITEBYTECODE
exec "${HF_ZERO_VENV:-.venv}/bin/python" -m pytest -n 3 --dist worksteal "${selection[@]}" "$@"
