#!/usr/bin/env bash
# Sets up .venv, then makes a corpus, trains on it and reports: ./scripts/quickstart.sh [arguments of `study`]
set -euo pipefail

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_venv
exec "$venv/bin/python" -m megatron_asyncpp study "$@"
