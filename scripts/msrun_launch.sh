#!/usr/bin/env bash
# Train a recipe on several ranks. Usage: bash scripts/msrun_launch.sh RECIPE [N] [-- section.key=value ...]
# N ranks over all nodes (8); on several nodes also MASTER_ADDR, NODE_RANK and LOCAL_WORKER, see --help.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
source "$folder/scripts/environment.sh"
here=$PWD
cd "$folder" && use_environment "" && cd "$here"
exec python -m ms_varlen.launch "$@"
