#!/usr/bin/env bash
# The tests of tests/hf, and of DeepSpeed's names, beside transformers, accelerate, PEFT, TRL and datasets of other months.
#
#   scripts/test_versions.sh END [ARGS]    ARGS go to pytest: scripts/test_versions.sh lowest -x tests/hf/test_entries.py
#
# END is one of
#   lowest          the lower ends of the ranges in hf_zero/hf/versions.py
#   llamafactory    what LLaMA-Factory 0.9.5 pins
#   axolotl         what axolotl 0.19 pins
#   5.23            transformers of that version, with accelerate of the month before
#   newest          what pip chooses
#   "PINS"          others: scripts/test_versions.sh "transformers==5.20.2 accelerate==1.14.0"
#
# The environment of an end lies in build/versions and is made once, by scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skipped=(--ignore=tests/hf/test_peft_matrix.py) # it names tuners that only the newest PEFT has
case "${1:-}" in
lowest) pins="transformers==5.6.0 accelerate==1.11.0 peft==0.18.0 trl==1.2.0 datasets==4.7.0" ;;
llamafactory)
    pins="transformers==5.6.0 accelerate==1.11.0 peft==0.18.1 trl==0.24.0 datasets==4.0.0"
    skipped+=(--ignore=tests/hf/test_trl.py --ignore=tests/hf/test_liger.py) # TRL 0.24 has trainers that do not import here
    ;;
axolotl) pins="transformers==5.16.1 accelerate==1.13.0 peft==0.20.0 trl==1.9.0 datasets==4.8.4" ;;
5.23) pins="transformers==5.23.0 accelerate==1.14.0 peft==0.21.0 trl==1.16.0 datasets==5.2.0" ;;
newest) pins="" ;;
*==*) pins=$1 ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    [[ "${1:-}" == --help ]] && exit 0 || exit 2
    ;;
esac
venv=build/versions/${1// /_}
shift

mkdir -p build/versions
tr ' ' '\n' <<<"$pins" >"$venv.txt"
PIP_CONSTRAINT=$PWD/$venv.txt HF_ZERO_VENV=$venv scripts/setup.sh test
"$venv/bin/python" -c '
from importlib.metadata import version
print("beside", *(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft", "trl", "datasets")))'

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
unset PYTHONDONTWRITEBYTECODE
[[ "$*" == *tests/* ]] || set -- "$@" tests/hf tests/deepspeed/test_facade.py
exec "$venv/bin/python" -m pytest -n 3 --dist worksteal -m "not nightly" "${skipped[@]}" "$@"
