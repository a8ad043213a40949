#!/usr/bin/env bash
# Style, types, imports and tests. Usage: bash scripts/test.sh [--quick] [pytest arguments]
# --quick leaves out the tests that compile graphs, start several ranks or take seconds each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment "test,mindformers"
selection=()
if [ "${1:-}" = --quick ]; then
    selection=(-m "not (graph or ranks or slow)")
    shift
fi
ruff format --check .
ruff check .
lint-imports --no-logo
mypy
exec python -m pytest --numprocesses 2 --dist worksteal "${selection[@]}" "$@"
