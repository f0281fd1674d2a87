#!/usr/bin/env bash
# Run the tests, installing first when needed: all of them, file by file on a worker for each core, four at most; or, on one, those that
# arguments to pytest choose: scripts/test.sh tests/unit -k manifest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/install.sh"
cd "$root"
if (($#)); then exec .venv/bin/python -m pytest "$@"; fi
workers=$(nproc)
# in the order of the files: the long ones come first
exec .venv/bin/python -m pytest -n $((workers < 4 ? workers : 4)) --dist loadfile --no-loadscope-reorder
