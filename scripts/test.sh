#!/usr/bin/env bash
# Sets up what is missing, then lint and tests. Arguments go to pytest: bash scripts/test.sh tests/unit -k parsing
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh" test
cd -- "$root"

# One thread a process: more of them on few cores slow one another tenfold.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1

python -m ruff check .
python -m ruff format --check .
exec python -m pytest --durations=15 --durations-min=1 "$@"
