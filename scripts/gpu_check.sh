#!/usr/bin/env bash
# Checks the plugin on a machine with GPUs, and writes one report: ./scripts/gpu_check.sh [--cpu] [--stages P] [--out FILE]
# Takes the python3 on the PATH if that has Megatron, as in a container, and else the project's own .venv.
set -euo pipefail

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

has_megatron='import importlib.util as u, sys
sys.exit(any(u.find_spec(name) is None for name in ("torch", "megatron.core", "emerging_optimizers", "psutil")))'
if ! python=$(command -v python3) || ! "$python" -c "$has_megatron" >/dev/null 2>&1; then
  prepare_venv
  python=$venv/bin/python
fi
exec "$python" "$root/scripts/gpu_check.py" "$@"
