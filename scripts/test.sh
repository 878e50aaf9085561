#!/usr/bin/env bash
# Set up a virtual environment with the development tools and run every check: style, types, imports, tests.
#   scripts/test.sh [VENV] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv}"
[ $# -gt 0 ] && shift
source scripts/setup.sh "$venv" dev
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/lint-imports"
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet
# A process per core with one thread each: most of the time is spent in short-lived processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m pytest -q -n auto --dist loadfile "$@"
