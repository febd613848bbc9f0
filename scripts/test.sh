#!/usr/bin/env bash
# Sets up .venv if needed, then runs the tests: ./scripts/test.sh [pytest arguments]
set -euo pipefail

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_venv
cd "$root"
# One thread a rank: the tests start more ranks than there are cores, and results must not depend on the count.
export OMP_NUM_THREADS=1
# What a surrounding torchrun or Slurm job, or a Megatron checkout on the path, would change in the tests.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PYTHONPATH
exec "$venv/bin/python" -m pytest "$@"
