#!/usr/bin/env bash
# Linters and types. `scripts/check.sh --fix` mends what can be mended by machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
bin=${HF_ZERO_VENV:-.venv}/bin
if [ "${1:-}" = --fix ]; then
    "$bin/ruff" check --fix .
    "$bin/ruff" format .
fi

failed=0
check() {
    printf '[check] %s\n' "$1"
    shift
    "$@" || failed=1
}

# Quotes and dashes that look alike are bugs waiting in code, and a terminal may not show them.
ascii_only() {
    ! find . -type d \( -name '.?*' -o -name build -o -name __pycache__ \) -prune -o -type f \
        \( -name '*.py' -o -name '*.sh' -o -name '*.md' -o -name '*.toml' -o -name '*.json' -o -name '*.txt' \
        -o -name '*.cpp' -o -name '*.h' \) -print0 | LC_ALL=C xargs -0 grep -nP '[^\x00-\x7F]' /dev/null
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "ASCII only" ascii_only
[ "$failed" = 0 ] && printf '[check] all clean\n'
exit "$failed"
