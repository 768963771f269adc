#!/usr/bin/env bash
# Makes .venv in the clone and installs optkit there: scripts/setup.sh run|test
# `run`: what the main job needs on a machine without a GPU. `test`: what the tests need besides.
# Running it again with unchanged requirements does nothing and needs no network. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:?usage: scripts/setup.sh run|test}

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "setup: expected Python 3.11 or 3.12 on the PATH (Debian: apt install python3 python3-venv), or PYTHON=/path/to/python" >&2
    exit 2
fi

# up_to_date NAME FILE...: whether what these files ask for is installed; stamp NAME FILE...: note that it is.
up_to_date() {
    local stamp=.venv/optkit-$1-stamp
    shift
    [ "$(cat "$stamp" 2>/dev/null)" = "$(sha256sum "$@" | sha256sum)" ]
}
stamp() {
    local stamp=.venv/optkit-$1-stamp
    shift
    sha256sum "$@" | sha256sum > "$stamp"
}

run_files=(requirements/run.txt pyproject.toml scripts/setup.sh)
test_files=("${run_files[@]}" requirements/test.txt requirements/test-no-deps.txt)
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }  # errors only

if ! up_to_date run "${run_files[@]}"; then
    echo "setup: installing what the main job needs into .venv (about 2 minutes, 1.5 GB; nothing is printed meanwhile)" >&2
    .venv/bin/python -m pip --version > /dev/null 2>&1 || rm -rf .venv  # absent, or left half made
    if [ ! -d .venv ] && ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "setup: cannot make a virtual environment (Debian: apt install python3-venv)" >&2
        exit 2
    fi
    if ! command -v nvidia-smi > /dev/null; then
        # No GPU: the CPU build of torch will do, a tenth of the default one. Where pip's index has none, PIP_EXTRA_INDEX_URL
        # or PIP_FIND_LINKS may name one that has; without, the CUDA build works too.
        torch=$(grep '^torch==' requirements/run.txt)+cpu
        pip install "$torch" 2> /dev/null ||
            echo "setup: no CPU build of $torch found: taking the CUDA build (some 5 GB more)" >&2
    fi
    pip install -r requirements/run.txt
    pip install --no-deps --no-build-isolation -e .
    stamp run "${run_files[@]}"
fi
if [ "$what" = test ] && ! up_to_date test "${test_files[@]}"; then
    echo "setup: installing what the tests need into .venv (about 1 minute, 0.3 GB)" >&2
    pip install -r requirements/run.txt -r requirements/test.txt
    pip install --no-deps -r requirements/test-no-deps.txt
    stamp test "${test_files[@]}"
fi
