#!/usr/bin/env bash
# Install into a virtual environment, saying little: the large downloads, and how many packages are unpacked.
# All that pip said is in DIR/pip.log.
#   tools/pip.sh DIR ARGUMENTS-OF-PIP-INSTALL...
set -euo pipefail

target=$1
shift
log=$target/pip.log

progress() {
    awk '
        /^ *Downloading .* MB\)/ { split($2, part, "-"); print "  downloading " part[1], part[2], $3, $4; fflush() }
        /^Installing collected packages:/ { print "  installing " NF - 3 (NF == 4 ? " package" : " packages"); fflush() }
    '
}

if ! "$target/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1 | tee "$log" | progress; then
    grep -v '^WARNING: ' "$log" | tail -n 20 >&2
    echo "error: pip install $* failed, see above; all that it said is in $log." >&2
    echo "       Without network, the packages must be in pip's cache already." >&2
    exit 1
fi
