#!/usr/bin/env bash
# Sets up what is missing and trains: the A100 recipe where there is a GPU, the CPU demo where there is none.
#
#   bash train_grpo.sh                                          from any directory
#   bash train_grpo.sh trainer.total_training_steps=5           further arguments are Hydra overrides
#   bash train_grpo.sh profile=cpu_demo max_turns=3             another recipe (verl/trainer/config/profile/)
#
# The same command resumes a run that was stopped. Keys: verl/trainer/config/ppo_trainer.yaml.
#
# Several machines: run it on each one with PET_NODE_RANK, PET_NNODES and MASTER_ADDR set (torchrun's launchers do) and
# the same RAY_AUTH_TOKEN; rank 0 trains, the others join its Ray. Or start Ray yourself, and run it on one machine.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"

case "${1:-}" in -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh" run

rank="${PET_NODE_RANK:-0}"
port="${RAY_PORT:-6379}"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Processes with several threads each on few cores slow one another tenfold.
miniresearcher_has_gpu || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$rank" -gt 0 ] || { [ "${PET_NNODES:-1}" -gt 1 ] && [ -z "${RAY_ADDRESS:-}" ]; }; then
    # Whoever reaches a Ray without tokens can run any code there.
    if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -e "$HOME/.ray/auth_token" ]; then
        export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    elif [ "${RAY_AUTH_MODE:-}" != disabled ]; then
        echo "Ray across machines needs a token: export the same RAY_AUTH_TOKEN on each (openssl rand -hex 32 makes one)," \
            "or RAY_AUTH_MODE=disabled in a network where you trust everyone" >&2
        exit 1
    fi
fi

if [ "$rank" -gt 0 ]; then
    if [ -z "${MASTER_ADDR:-}" ]; then
        echo "PET_NODE_RANK=$rank joins the Ray of rank 0, whose address is not known; export MASTER_ADDR" >&2
        exit 1
    fi
    for attempt in $(seq 1 60); do # rank 0 may still be installing
        (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null && exec ray start --address="$MASTER_ADDR:$port" --block
        [ "$attempt" -gt 1 ] || echo "waiting for Ray at $MASTER_ADDR:$port, up to 10 minutes" >&2
        sleep 10
    done
    echo "no Ray at $MASTER_ADDR:$port after 10 minutes; is rank 0 running, and the port open?" >&2
    exit 1
fi

# -P: the working directory may hold another `verl`.
command=(python -P -m verl.trainer.main_ppo "$@")
profile="$(miniresearcher_profile "$@")"
[ -z "$profile" ] || command+=("$profile")

if [ "${PET_NNODES:-1}" -gt 1 ] && [ -z "${RAY_ADDRESS:-}" ]; then
    mkdir -p "$root/outputs"
    ray start --head --port="$port" --include-dashboard=false --block >"$root/outputs/ray_head.log" 2>&1 &
    head=$!
    trap 'kill "$head" 2>/dev/null; wait "$head" 2>/dev/null || true' EXIT
    export RAY_ADDRESS="${MASTER_ADDR:-127.0.0.1}:$port"
    for _ in $(seq 1 60); do
        (exec 3<>"/dev/tcp/${RAY_ADDRESS%:*}/$port") 2>/dev/null && break
        sleep 1
    done
    "${command[@]}" &
    trainer=$!
    trap 'kill -TERM "$trainer" 2>/dev/null' INT TERM
    until wait "$trainer"; do # a signal ends the wait, not the trainer, which saves first
        status=$?
        kill -0 "$trainer" 2>/dev/null || exit "$status"
    done
    exit
fi
exec "${command[@]}" # signals reach the trainer itself
