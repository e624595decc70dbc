#!/usr/bin/env bash
# Make a virtual environment, unless a working one is there already.
#   tools/venv.sh DIR        with $PYTHON, if set, or the first fit Python on the PATH
set -euo pipefail

target=$1

is_fit() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_fit "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: Polar needs Python 3.11, 3.12 or 3.13; found none as: ${PYTHON:-python3, python3.13, python3.12, python3.11}." >&2
    echo "       Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12 ..." >&2
    return 1
}

if is_fit "$target/bin/python" && "$target/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi
python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    echo "error: $python cannot make virtual environments: its modules venv and ensurepip are missing." >&2
    echo "       Debian, Ubuntu: apt-get install python3-venv; or name another Python: make PYTHON=/path/to/python3 ..." >&2
    exit 1
fi
echo "Making $target with $("$python" --version) ($python)"
"$python" -m venv --clear "$target"
