#!/usr/bin/env bash
# Style, types and tests. Usage: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment "test,mindformers"
ruff format --check .
ruff check .
lint-imports --no-logo
mypy
exec python -m pytest --numprocesses 2 "$@"
