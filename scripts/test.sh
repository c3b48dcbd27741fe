#!/usr/bin/env bash
# Lint and tests, in the project's own virtual environment. Usage: scripts/test.sh [--all | --fast] [pytest arguments]
#   --all   also the tests marked long
#   --fast  leave out the tests marked slow (those that train or start processes)
# Two processes take the tests, with one compute thread each: -n 8 for more, -n 0 for all in one (-s needs it; --pdb sees
# to it itself).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
ensure_venv "[dev]"

export PYTEST_XDIST_AUTO_NUM_WORKERS="${PYTEST_XDIST_AUTO_NUM_WORKERS:-2}" # pytest's -n auto
# Neighbours stay together, for the fixtures that a file's tests share, until one process has nothing left to do.
arguments=(-n auto --dist worksteal)
case "${1:-}" in
    --all) shift ;;
    --fast) shift; arguments+=(-m "not slow") ;;
    *) arguments+=(-m "not long and not network") ;;
esac
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet . || { echo "Run .venv/bin/ruff format ." >&2; exit 1; }
exec .venv/bin/python -m pytest "${arguments[@]}" "$@"
