#!/usr/bin/env bash
# The main job: varlen training of a small decoder on the built-in corpus, on the CPU, with its report.
# Usage: bash scripts/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment ""
exec ms-varlen train recipes/quickstart.yaml "$@"
