# Sourced by run.sh, test.sh and msrun_launch.sh: finds or makes the Python environment and puts its programs first on PATH.
#
# An active virtual or conda environment, or the interpreter in $PYTHON, is kept (Ascend images ship MindSpore) and gets only
# the missing packages. Otherwise .venv is made in this repository, and updated when setup.cfg changes.

use_environment() {  # use_environment EXTRAS: extras of setup.cfg, comma-separated
    local extras=$1 python stamps stamp
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
    elif [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
        python=${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python
    else
        python=.venv/bin/python
        [ -x "$python" ] || "$(find_python)" -m venv .venv
    fi
    command -v "$python" >/dev/null || { echo "PYTHON must be a Python interpreter, got $python" >&2; return 1; }
    # One stamp per set of extras, so that run.sh after test.sh installs nothing.
    stamps=$("$python" -c 'import sys; print(sys.prefix)')/.ms_varlen-installed
    stamp=$stamps/$(cksum < setup.cfg | cut -d' ' -f1)
    if [ ! -e "$stamp-${extras:-base}" ]; then
        echo "installing ms_varlen${extras:+[$extras]} for $python (the first time this downloads about 1 GB)"
        "$python" -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
        mkdir -p "$stamps" && touch "$stamp-base" "$stamp-${extras:-base}"
    fi
    PATH=$(dirname "$(command -v "$python")"):$PATH  # msrun and ms-varlen start programs by name
    export PATH
}

find_python() {
    local name
    for name in python3.11 python3.12 python3.10 python3; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'; then
            echo "$name"
            return
        fi
    done
    echo "Python 3.10, 3.11 or 3.12 is needed, found none; install one or set PYTHON" >&2
    return 1
}
