#!/usr/bin/env bash
# Sets up all that the main job needs (once) and runs it: scripts/run.sh [RECIPE [KEY=VALUE ...]]
# Without arguments: the tiny Kimi K3, from its recipe to evidence, on a machine without a GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh" run
if [ $# -eq 0 ]; then set -- kimi_k3/tiny; fi
exec "$root/.venv/bin/optkit" run "$@"
