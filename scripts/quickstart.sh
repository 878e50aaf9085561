#!/usr/bin/env bash
# Set up a virtual environment and run the quickstart: distill, quantize, verify, evaluate, report.
#   scripts/quickstart.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv}"
source scripts/setup.sh "$venv"
exec "$venv/bin/compressor" run recipes/quickstart.yaml --overwrite
