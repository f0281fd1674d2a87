#!/usr/bin/env bash
# Run the tests, installing first when needed. Arguments go to pytest: scripts/test.sh tests/unit -k manifest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/install.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
