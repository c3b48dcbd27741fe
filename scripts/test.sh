#!/usr/bin/env bash
# Lint and all tests, in the project's own virtual environment. Usage: scripts/test.sh [--fast] [pytest arguments]
#   --fast  leave out the tests marked slow (those that train or start processes)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
ensure_venv "[dev]"

arguments=()
if [ "${1:-}" = "--fast" ]; then
    shift
    arguments=(-m "not slow")
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet . || { echo "Run .venv/bin/ruff format ." >&2; exit 1; }
exec .venv/bin/python -m pytest "${arguments[@]}" "$@"
