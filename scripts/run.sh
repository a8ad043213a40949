#!/usr/bin/env bash
# Train a small decoder in mode varlen on the built-in corpus, on the CPU, and write its report.
# Usage: bash scripts/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment ""
exec ms-varlen train recipes/quickstart.yaml "$@"
